"""Generate text of a Llama-shaped model whose layers call cutegen, or torch where there is no GPU."""

import torch
from llama import Llama

import cutegen

torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
    model = Llama("1B" if device.type == "cuda" else "tiny").to(torch.bfloat16).requires_grad_(False)
    found = cutegen.optimize(model)
    print(
        "swapped:", len(found.layers), "layers,", len(found.norms), "norms,", len(found.gates), "gated MLPs"
    )
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(8):
        logits = model(tokens, torch.arange(tokens.shape[1]))
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
print("tokens:", *tokens[0].tolist())
print(cutegen.counters())
