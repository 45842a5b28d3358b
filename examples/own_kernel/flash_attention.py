"""FlashAttention's Hopper forward in CuTe (its wheel flash-attn-4), as it is; tools/fetch_foreign.py gets it.

    python tools/fetch_foreign.py foreign && export PYTHONPATH=foreign
    python -m cutegen.tune --kernel flash_attention.py --shape 4x4096x4096x32x8x128 --options causal

FlashAttention imports torch and triton, so both must be there where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "flash_attention",
    "FlashAttention's Hopper forward",
    entry="flash_attn.cute.flash_fwd_sm90:FlashAttentionForwardSm90",
    # batch, queries, keys, heads of queries, heads of keys and values, head size
    sizes={"b": free, "s": free, "t": free, "h": fixed, "g": fixed, "d": fixed},
    options={"dtype": ("bf16", "fp16"), "causal": False},
    arguments=(
        read("q", "dtype", ("b", "s", "h", "d")),
        read("k", "dtype", ("b", "t", "g", "d")),
        read("v", "dtype", ("b", "t", "g", "d")),
        write("o", "dtype", ("b", "s", "h", "d")),
        scalar("scale", "fp32", (0.088, 0.05)),
    ),
    knobs={
        "tile_m": (64, 128, 192),
        "tile_n": (48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
        "stages": (1, 2, 3),
        "weights": ("registers", "smem"),
        "overlap": (True, False),
        "packed": (True, False),
    },
    default=lambda h, g, d, causal: flash_config(h, g, d, causal),
    construct="dtype, d, d, h // g, is_causal=causal, pack_gqa=packed, tile_m=tile_m, tile_n=tile_n, "
    "num_stages=stages, num_threads=384, intra_wg_overlap=overlap, mma_pv_is_rs=weights == 'registers'",
    call="q, k, v, o, None, scale, stream=stream",
    rows="b",
    tails=({"b": 3, "s": 200, "t": 333},),
    examples=("4x4096x4096x32x8x128 bf16 causal", "8x300x300x16x16x64 fp16", "1x1024x1024x16x2x256 bf16"),
)


def flash_config(h: int, g: int, d: int, causal: bool) -> dict[str, int | str | bool]:
    """Return what flash-attn-4 4.0.0b36 runs; a test compares it with the package's own function."""
    if d <= 96:
        tile_m, tile_n = 192, 128 if d <= 64 or causal else 144
    else:
        tile_m, tile_n = 128, 128 if d <= 128 else 112 if d <= 192 else 80
    weights = "smem" if 64 < d <= 96 else "registers"
    sizes = {"tile_m": tile_m, "tile_n": tile_n, "stages": 2}
    return {**sizes, "weights": weights, "overlap": True, "packed": h > g}


@kernel.rule
def fits_registers(tile_m: int, tile_n: int, d: int, weights: str) -> bool:
    """Scores, output and weights of 64 queries are in the registers of 128 threads, 224 each at most.

    Two such groups leave 216 for each, three 144.
    """
    used = tile_n // 2 + d // 2 + (tile_n // 4 if weights == "registers" else 0)
    return used <= {64: 224, 128: 216, 192: 144}[tile_m]


@kernel.rule
def fits_shared_memory(tile_m: int, tile_n: int, d: int, stages: int, weights: str) -> bool:
    """Queries, stages of keys and values, and weights that are not in registers take at most 226 KB."""
    own = tile_m * tile_n if weights == "smem" else 0
    return 2 * (tile_m * d + 2 * stages * tile_n * d + own) <= 226 * 1024


@kernel.rule
def heads_share_keys(h: int, g: int, packed: bool) -> bool:
    """Heads are packed into a tile where several of them share keys."""
    return h > g or not packed


@kernel.rule
def tile_holds_groups(h: int, g: int, tile_m: int, packed: bool) -> bool:
    """With packed heads, a tile of queries must hold whole groups, or they are loaded without TMA."""
    return not packed or tile_m % (h // g) == 0


@kernel.reference
def reference(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
    """Return attention in fp64, head by head; the last query sees the last key."""
    import torch

    out = torch.empty_like(q)
    later = 1 + k.shape[1] - q.shape[1]
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            keys, values = (x[batch, :, head * k.shape[2] // q.shape[2]] for x in (k, v))
            scores = q[batch, :, head] @ keys.T * scale
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(later), float("-inf"))
            out[batch, :, head] = scores.softmax(-1) @ values
    return out


@kernel.tolerance
def allowed(want: Any, dtype: str, causal: bool, t: int) -> Any:
    """Rounding of the output, and of weights before the second product, for normal inputs: six deviations.

    The weights of n keys have a sum of squares of about 8/n at most, and each is rounded on its own.
    """
    import torch

    unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
    first = t - want.shape[1] + 1 if causal else t
    keys = torch.linspace(first, t, want.shape[1], dtype=want.dtype, device=want.device)
    weights = (8.0 / keys).clamp_(max=1.0).sqrt_().reshape(1, -1, 1, 1)
    return want.abs() * unit + 4 * unit * weights


@kernel.rule
def queries_see_keys(s: int, t: int, causal: bool) -> bool:
    """The last query sees the last key, so with more queries than keys the first would see none."""
    return s <= t or not causal


@kernel.flops
def flops(b: int, s: int, t: int, h: int, d: int, causal: bool) -> int:
    """Return operations of both products; half of them with a causal mask."""
    return 4 * b * h * s * t * d // (2 if causal else 1)


@kernel.baseline("sdpa, cuDNN")
def cudnn(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
    """Call PyTorch with cuDNN forced; by default it takes a slower kernel on Hopper.

    Where this cuDNN does not let heads share keys, these are repeated, which counts.
    """
    from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if not can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, causal, True)):
        k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@kernel.baseline("sdpa")
def sdpa(q: Any, k: Any, v: Any, scale: float, causal: bool) -> Any:
    """Call PyTorch, which chooses."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
