"""Multiply fp8 matrices with one scale each, as after quantising a layer per tensor."""

import torch

import cutegen

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantise(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8 and the fp32 factor that undoes its scaling."""
    scale = matrix.abs().amax().float() / FP8_MAX
    return (matrix / scale).to(torch.float8_e4m3fn), scale


x = torch.randn(2048, 4096, device="cuda")
w = torch.randn(1024, 4096, device="cuda")
x8, scale_x = quantise(x)
w8, scale_w = quantise(w)

y = cutegen.scaled_gemm(x8, w8.t(), scale_x, scale_w, out_dtype=torch.bfloat16)  # sums are kept in fp32

error = (y.float() - x @ w.t()).norm() / (x @ w.t()).norm()
print(f"relative error against fp32, from quantising: {error.item():.3g}")
