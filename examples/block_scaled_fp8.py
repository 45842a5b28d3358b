"""Multiply fp8 matrices with factors of blocks, as DeepSeek-V3 has them: 1 x 128 of x, 128 x 128 of w."""

import torch

import cutegen

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantise(matrix: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8, and the fp32 factors of its blocks of ``rows`` x 128."""
    m, k = matrix.shape
    blocks = matrix.view(m // rows, rows, k // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3)).float() / FP8_MAX
    return (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(m, k), scale


x = torch.randn(2048, 4096, device="cuda")
w = torch.randn(1024, 4096, device="cuda")
x8, scale_x = quantise(x, rows=1)
w8, scale_w = quantise(w, rows=128)
scale_x = scale_x.t().contiguous().t()  # those of x are contiguous along its rows, as torch._scaled_mm has it

y = cutegen.scaled_gemm(x8, w8.t(), scale_x, scale_w)  # sums of 128 products are added up in fp32

error = (y.float() - x @ w.t()).norm() / (x @ w.t()).norm()
print(f"relative error against fp32, from quantising: {error.item():.3g}")
