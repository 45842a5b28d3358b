"""A Llama-shaped model with random weights, as large as the 1B or the 8B one: what other examples run."""

import torch
from llama_block import Block
from torch import Tensor, nn

#: Width, layers, heads, heads of keys and values, width of the MLP, vocabulary.
SIZES = {
    "tiny": (256, 2, 8, 2, 512, 1024),
    "1B": (2048, 16, 32, 8, 8192, 128256),
    "8B": (4096, 32, 32, 8, 14336, 128256),
}


class Llama(nn.Module):
    """Tokens (texts, length) at their places to logits of the last, or with ``head=False`` what it takes."""

    def __init__(self, size: str, layers: int = 0) -> None:
        super().__init__()
        width, depth, heads, groups, hidden, words = SIZES[size]
        self.embed, self.norm = nn.Embedding(words, width), nn.RMSNorm(width, 1e-5)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers or depth))
        self.head, self.turns = nn.Linear(width, words, bias=False), width // heads // 2

    def forward(self, tokens: Tensor, at: Tensor, caches: Tensor | None = None, head: bool = True) -> Tensor:
        x, turns = self.embed(tokens), torch.arange(self.turns, device=at.device).float() / self.turns
        t = at[:, None] * 5e5**-turns
        turn = torch.stack([t.cos().repeat(1, 2), torch.cat([-t.sin(), t.sin()], -1)]).to(x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, turn, at, None if caches is None else caches[layer])
        x = self.norm(x)
        found: Tensor = self.head(x[:, -1]) if head else x
        return found
