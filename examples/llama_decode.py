"""Decode with a Llama-shaped model in a CUDA graph: one replay is one token of each text."""

import torch
from llama import SIZES, Llama

import cutegen

torch.manual_seed(0)
texts, context = 8, 128
width, _, heads, groups = SIZES["1B"][:4]
cutegen.configure(build="allow")  # what a graph captures must be compiled; cutegen.warmup does it before
with torch.device("cuda"), torch.no_grad():
    model = Llama("1B").to(torch.bfloat16)
    cutegen.optimize(model)
    caches = torch.zeros(len(model.blocks), 2, texts, groups, context, width // heads, dtype=torch.bfloat16)
    tokens, at = torch.zeros(texts, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)

    def step() -> None:
        """Decode one token of each text, and go on to the next place."""
        tokens.copy_(model(tokens, at, caches).argmax(-1, keepdim=True))
        at.add_(1)

    step()  # looks up, compiles and loads; a capture does none of these
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    at.zero_()
    for _ in range(context):
        graph.replay()
print("places:", at.item(), "tokens:", *tokens.flatten().tolist())
