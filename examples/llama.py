"""A Llama-shaped model with random weights, as large as the 1B or the 8B one: what other examples run."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

#: Width, layers, heads, heads of keys and values, width of the MLP, vocabulary.
SIZES = {
    "tiny": (256, 2, 8, 2, 512, 1024),
    "1B": (2048, 16, 32, 8, 8192, 128256),
    "8B": (4096, 32, 32, 8, 14336, 128256),
}


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm; QKV is one GEMM, and so are gate and up."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.split = [heads, groups, groups]
        self.norm, self.norm_mlp = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, width // heads * sum(self.split), bias=False)
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(hidden, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor, at: Tensor, cache: Tensor | None) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (sum(self.split), -1)).transpose(1, 2)
        q, k, v = heads.split(self.split, 1)
        q, k = (torch.addcmul(turn[0] * x, turn[1], torch.cat(x.chunk(2, -1)[::-1], -1)) for x in (q, k))
        if cache is None:  # whole texts
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:  # the token at one place of each; heads that share keys are rows of one product
            k, v = cache[0].index_copy_(2, at, k), cache[1].index_copy_(2, at, v)
            q, seen = q.reshape(*k.shape[:2], -1, k.shape[3]), torch.arange(k.shape[2], device=x.device) <= at
            y = scaled_dot_product_attention(q, k, v, seen.expand(*q.shape[:3], -1))
        x = x + self.out(y.reshape(x.shape))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return torch.add(x, self.down(silu(gate) * up))


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
