"""The gate of an MLP as one kernel: two projections, silu and the product, without a tensor in between."""

import torch

import cutegen

torch.manual_seed(0)
x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
w_gate, w_up = torch.randn(2, 2816, 1024, device="cuda", dtype=torch.bfloat16) / 32
w = torch.cat([w_gate, w_up])  # as checkpoints of many models have it: nothing is packed again

h = cutegen.gated_gemm(x, w)
assert isinstance(h, torch.Tensor)
print(h.shape, torch.nn.functional.cosine_similarity(h, cutegen.swiglu(x @ w.T), dim=-1).min().item())

by_turns = torch.stack([w_gate, w_up], 1).flatten(0, 1)  # a row of w_gate, one of w_up
h, pre = cutegen.gated_gemm(x, by_turns, "gelu_tanh", layout="interleaved", return_pre=True)
print(h.shape, torch.allclose(pre, x @ by_turns.T, rtol=0.02, atol=0.02))
