"""Tune one shape, see what won and by how much, then call it."""

import torch

import cutegen

tuner = cutegen.AutoTuner()
result = tuner.tune(64, 7168, 2048, dtype="bf16")  # seconds the first time, remembered from then on

print(result.problem, "->", result.config)
if result.time_us is not None and result.ratio is not None:
    print(f"{result.time_us:.2f} us, {result.ratio.mid:.3f} times as fast as {result.baseline}")

x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
w = torch.randn(7168, 2048, device="cuda", dtype=torch.bfloat16)
y = cutegen.linear(x, w)  # uses what was just tuned: the table in the cache folder names it
print(y.shape)
