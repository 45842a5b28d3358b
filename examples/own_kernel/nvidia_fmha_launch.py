"""NVIDIA's Hopper attention, called with tensors of four dimensions as PyTorch users have them."""

from __future__ import annotations

from typing import Any

import cutlass
from cute.hopper.kernel.attention import fmha
from cutlass import cute

_LOG2_E = 1.4426950408889634


def _by_head(tensor: Any, group: int, heads: int) -> Any:
    """Return (b, s, heads * group, d) as the example has it: (s, d, group, heads, b)."""
    batch, length, _, size = tensor.shape
    strides = tensor.stride
    shape = (length, size, group, heads, batch)
    stride = (strides[1], strides[3], strides[2], strides[2] * group, strides[0])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def attention(
    group: int, heads: int, size: int, tile_n: int, persistent: bool, residual: bool, causal: bool
) -> Any:
    """Return a launch of the example's kernel.

    Args:
        group: Heads of queries that share one of keys.
        heads: Heads of keys and values.
        size: Of each head.
        tile_n: Keys that are worked on at a time.
        persistent: Whether blocks take turns with tiles.
        residual: Whether keys past the last are masked.
        causal: Whether later keys are masked.
    """
    mask = fmha.fmha_utils.MaskEnum.RESIDUAL_MASK if residual else fmha.fmha_utils.MaskEnum.WINDOW_MASK
    types = (cutlass.Float32, cutlass.Float32)
    op = fmha.HopperFusedMultiHeadAttentionForward(*types, (64, tile_n, size), persistent, mask)

    @cute.jit
    def launch(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        scale: cutlass.Float32,
        stream: Any,
    ) -> None:
        batch, length, _ = lse.shape
        strides = lse.stride
        sums = cute.make_layout(
            (length, 1, group, heads, batch),
            stride=(strides[1], 0, strides[2], strides[2] * group, strides[0]),
        )
        op(
            _by_head(q, group, heads),
            _by_head(k, 1, heads),
            _by_head(v, 1, heads),
            _by_head(o, group, heads),
            cute.make_tensor(lse.iterator, sums),
            scale * _LOG2_E,
            scale,
            cutlass.Float32(1.0),
            None,
            cutlass.Int32(0) if cutlass.const_expr(causal) else None,
            stream,
        )

    return launch
