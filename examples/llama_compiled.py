"""Compile the blocks of a Llama-shaped model with the backend ``cutegen``, once for all numbers of tokens."""

import torch
from llama import Llama

torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device, torch.no_grad():
    model = Llama("1B" if device.type == "cuda" else "tiny").to(torch.bfloat16)
    for block in model.blocks:
        block.compile(backend="cutegen", dynamic=True)  # all of them share what is compiled for the first
    for length in (16, 100, 512):
        logits = model(torch.zeros(1, length, dtype=torch.long), torch.arange(length))
        print(length, "tokens, the next one:", logits.argmax(-1).item())
