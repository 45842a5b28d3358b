"""Fuse scaling, an addend, a bias and an activation behind the product: one kernel writes the result once."""

import torch

import cutegen


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


a, b, c, bias = random(2048, 1024), random(1024, 4096), random(2048, 4096), random(4096)

d = cutegen.gemm(a, b, c=c, alpha=0.5, beta=2.0, bias=bias, activation="gelu")

want = torch.nn.functional.gelu(0.5 * (a.float() @ b.float()) + 2.0 * c.float() + bias.float())
print(f"largest difference from fp32: {(d.float() - want).abs().max().item():.3g}")
