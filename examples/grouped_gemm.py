"""The experts of a mixture: each token's rows sorted by expert, one launch for all experts."""

import torch

import cutegen

torch.manual_seed(0)
tokens, hidden, ffn, experts, top = 1024, 2048, 1536, 128, 8
x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
w = torch.randn(experts, ffn, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5

chosen = torch.rand(tokens, experts, device="cuda").topk(top).indices.flatten()
order = chosen.argsort(stable=True)  # rows of an expert follow one another
rows = x[order // top]
ends = chosen.bincount(minlength=experts).cumsum(0).int()  # where each expert's rows end; the host never asks

y = cutegen.grouped_gemm(rows, w, ends)
print(y.shape, y.float().norm().item())

# In decoding, a matrix for each expert with as many rows as it got, and one CUDA graph for any counts.
batch = torch.randn(experts, 64, hidden, device="cuda", dtype=torch.bfloat16)
counts = torch.randint(0, 9, (experts,), device="cuda", dtype=torch.int32)
out = torch.zeros(experts, 64, ffn, device="cuda", dtype=torch.bfloat16)
cutegen.grouped_gemm(batch, w, counts=counts, out=out, expected_rows=4)
print(out.float().norm().item())
