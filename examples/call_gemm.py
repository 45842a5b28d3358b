"""Multiply two matrices with the kernel that the dispatch table names, and check the result."""

import torch

import cutegen

a = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
b = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)

d = cutegen.gemm(a, b)  # while the kernel of new shapes is compiled, torch.mm computes
cutegen.gemm(a, b, out=d)  # nothing is allocated
cutegen.gemm(a, a.t())  # operands are taken as they are: contiguous along either axis, no copies

error = (d.float() - a.float() @ b.float()).abs().max().item()
print(f"largest difference from an fp32 product: {error:.3g}")
