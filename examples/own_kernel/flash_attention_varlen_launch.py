"""FlashAttention's Hopper forward for sequences that end in the same places for queries and keys."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90


def _heads_at_run_time(tensor: Any) -> Any:
    """Return (tokens, heads, d) with a number of heads that the compiler must not know: it dies otherwise."""
    tokens, heads, size = tensor.shape
    layout = cute.make_layout((tokens, cutlass.Int32(heads), size), stride=tensor.stride)
    return cute.make_tensor(tensor.iterator, layout)


def attention(*given: Any, **chosen: Any) -> Any:
    """Return a launch of the kernel that FlashAttention's class makes of the same arguments."""
    op = FlashAttentionForwardSm90(*given, **chosen)

    @cute.jit
    def launch(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens: cute.Tensor,
        o: cute.Tensor,
        scale: cutlass.Float32,
        stream: Any,
    ) -> None:
        q, k, v, o = (_heads_at_run_time(tensor) for tensor in (q, k, v, o))
        op(q, k, v, o, None, scale, cu_seqlens, cu_seqlens, stream=stream)

    return launch
