"""Tune a whole model in one line, forward and backward, then run it eager or compiled."""

import torch

import cutegen

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, device="cuda", dtype=torch.bfloat16)
model = torch.nn.Sequential(layer, torch.nn.Linear(256, 1000, device="cuda", dtype=torch.bfloat16))
x = torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16)

found = cutegen.autotune(model, x, training=True, budget_s=30)  # a second time takes seconds
for gain in found.gains:
    print(gain.calls, gain.problem, gain.how, gain.tuned_us)

cutegen.optimize(model)  # or torch.compile(model, backend="cutegen")
with cutegen.record() as recording:
    model(x).float().square().mean().backward()
print(recording.report())
