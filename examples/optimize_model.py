"""Let linear layers, norms and gated MLPs call cutegen, in place, and see what torch still computes."""

import torch
from llama_block import MLP

import cutegen

torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
model = torch.nn.Sequential(layer, torch.nn.RMSNorm(256), MLP(256, 768), torch.nn.Linear(256, 1000))
model.to("cuda", torch.bfloat16)
x = torch.randn(8, 128, 256, device="cuda", dtype=torch.bfloat16)

found = cutegen.optimize(model)
print("swapped:", *found.layers, *found.norms, *found.gates)
for name, reason in found.skipped.items():
    print(f"left alone: {name}: {reason}")

model(x).float().square().mean().backward()
print(cutegen.counters())
cutegen.restore(model)
