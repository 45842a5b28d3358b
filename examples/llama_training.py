"""Train a Llama-shaped model whose layers call cutegen: gradients of linear layers are GEMMs of cutegen."""

import torch
from llama import Llama

import cutegen

torch.manual_seed(0)
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    model = Llama("tiny").to(torch.bfloat16)
    cutegen.optimize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = torch.nn.CrossEntropyLoss()
    tokens, places = torch.randint(0, 1024, (4, 65)), torch.arange(64)
    for step in range(5):
        logits = model.head(model(tokens[:, :-1], places, head=False))
        loss = criterion(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
print(cutegen.counters())
