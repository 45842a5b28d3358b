"""The experts of a mixture in fp8 with factors of blocks, as in DeepSeek-V3: one launch for all of them."""

import torch

import cutegen

torch.manual_seed(0)
tokens, hidden, ffn, experts, top = 1024, 2048, 4096, 32, 8
x = torch.randn(tokens, hidden, device="cuda")
w = torch.randn(experts, ffn, hidden, device="cuda") / hidden**0.5

# A factor for 128 elements of a row, and for 128 x 128 of a weight; those of rows in contiguous columns.
of_rows = x.view(tokens, -1, 128).abs().amax(2) / 448
of_blocks = w.view(experts, ffn // 128, 128, hidden // 128, 128).abs().amax((2, 4)) / 448
x8 = (x / of_rows.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
w8 = (w / of_blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)).to(torch.float8_e4m3fn)

chosen = torch.rand(tokens, experts, device="cuda").topk(top).indices.flatten()
order = chosen.argsort(stable=True) // top  # rows of an expert follow one another
ends = chosen.bincount(minlength=experts).cumsum(0).int()  # where each expert's rows end; the host never asks

scale_x = of_rows.t()[:, order].contiguous().t()
y = cutegen.scaled_grouped_gemm(x8.view(torch.uint8)[order].view(x8.dtype), w8, scale_x, of_blocks, ends)

first = int(ends[0])
want = x[order[:first]] @ w[0].T
print(y.shape, y.dtype, ((y[:first] - want).norm() / want.norm()).item())
