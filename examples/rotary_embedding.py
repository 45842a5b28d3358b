"""Rotary position embedding of a packed projection: queries and keys in one launch, in place."""

import torch

import cutegen

torch.manual_seed(0)
tokens, heads, kv_heads, d = 1024, 32, 8, 128
qkv = torch.randn(tokens, heads + 2 * kv_heads, d, device="cuda", dtype=torch.bfloat16)
q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]

frequencies = 10000.0 ** (-torch.arange(0, d, 2, device="cuda") / d)
angles = torch.arange(4096, device="cuda")[:, None] * frequencies
cos, sin = angles.cos(), angles.sin()  # (4096, 64): a row for each position, a column for each pair
positions = torch.arange(100, 100 + tokens, device="cuda")

cutegen.rope_(q, k, cos, sin, positions)  # the values behind them stay what they are
print(qkv.float().norm().item())

weight = torch.ones(d, device="cuda", dtype=torch.bfloat16)
q_new, k_new = cutegen.rope(
    q, k, cos, sin, positions, q_weight=weight, k_weight=weight
)  # norms of heads first
print(q_new.shape, k_new.shape)
