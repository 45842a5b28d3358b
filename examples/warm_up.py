"""Compile before the first call: afterwards no shape of these kinds makes anybody wait for a compiler."""

import torch

import cutegen

# Linear layers in bf16, plain and with bias and SiLU. The next process on this machine compiles nothing.
warmed = cutegen.warmup("gemm", dtypes=["bf16"], layouts=["kk"], options=["", "bias=n act=silu"])
print(f"{len(warmed.compiled)} kernels compiled, {len(warmed.present)} present, {len(warmed.failed)} failed")

w = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
bias = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
for rows in (1, 37, 500, 3001):  # whatever the batch brings
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    print(rows, cutegen.linear(x, w, bias, activation="silu").shape)
