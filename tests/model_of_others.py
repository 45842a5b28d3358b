"""Attention as models of others write it: a module that makes tables, a function that turns, an attention.

Tests load it under names of their own, since :func:`cutegen.optimize` replaces the function where it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HEADS, KEYS, EXTENT = 4, 2, 16


class Rotary(nn.Module):
    """Cosines and sines of positions, every column twice."""

    def __init__(self, scaling: float = 1.0) -> None:
        super().__init__()
        frequencies = 100.0 ** (-torch.arange(EXTENT // 2) / (EXTENT // 2))
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.scaling = scaling

    def forward(self, x: Any, position_ids: Any) -> tuple[Any, Any]:
        angles = position_ids[..., None].float() * self.inv_freq
        twice = torch.cat([angles, angles], -1)
        return (twice.cos() * self.scaling).to(x.dtype), (twice.sin() * self.scaling).to(x.dtype)


class Uneven(Rotary):
    """Its halves differ."""

    def forward(self, x: Any, position_ids: Any) -> tuple[Any, Any]:
        angles = position_ids[..., None].float() * self.inv_freq
        twice = torch.cat([angles, 2 * angles], -1)
        return twice.cos().to(x.dtype), twice.sin().to(x.dtype)


class Other(nn.Module):
    """Has a buffer, and is something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Any) -> Any:
        return x * self.scale.sum()


def rotate_half(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def apply_rotary_pos_emb(
    q: Any, k: Any, cos: Any, sin: Any, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Any, Any]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def turn_back(q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Looks alike, and computes something else."""
    return apply_rotary_pos_emb(q, k, cos, -sin)


class Attention(nn.Module):
    """Queries and keys, turned."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * EXTENT
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, KEYS * EXTENT, bias=False)

    def forward(self, x: Any, tables: tuple[Any, Any]) -> Any:
        q, k = (layer(x).unflatten(-1, (-1, EXTENT)).transpose(1, 2) for layer in (self.q_proj, self.k_proj))
        q, k = apply_rotary_pos_emb(q, k, *tables)
        return q @ k.repeat_interleave(HEADS // KEYS, 1).transpose(-2, -1)


class Model(nn.Module):
    """Tables for all layers, and two of these."""

    def __init__(self, rotary: Any = Rotary) -> None:
        super().__init__()
        self.rotary_emb, self.other = rotary(), Other()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Any, position_ids: Any) -> Any:
        tables = self.rotary_emb(x, position_ids=position_ids)
        return sum(layer(x, tables) for layer in self.layers)
