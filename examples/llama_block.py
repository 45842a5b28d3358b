"""One block of a Llama-shaped model: attention and a gated MLP, each behind a norm."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


class MLP(nn.Module):
    """A gated MLP whose gate and up are one GEMM."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        found: Tensor = self.down(silu(gate) * up)
        return found


class Block(nn.Module):
    """QKV is one GEMM; queries and keys are turned by ``turn``, and the others kept in ``cache`` if given."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.split = [heads, groups, groups]
        self.norm, self.norm_mlp = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, width // heads * sum(self.split), bias=False)
        self.out, self.mlp = nn.Linear(width, width, bias=False), MLP(width, hidden)

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
        return torch.add(x, self.mlp(self.norm_mlp(x)))
