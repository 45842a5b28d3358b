"""FlashAttention's Hopper forward for sequences of different lengths, one after the other in one tensor.

    python tools/fetch_foreign.py foreign && export PYTHONPATH=foreign
    python -m cutegen.tune --kernel flash_attention_varlen.py --shape 16384x13x32x8x128 --options causal

FlashAttention imports torch and triton, so both must be there where it is compiled.
"""

from __future__ import annotations

import random
from itertools import accumulate, chain, pairwise
from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "flash_attention_varlen",
    "FlashAttention's Hopper forward of sequences of different lengths",
    entry="flash_attention_varlen_launch:attention",
    # tokens of all sequences, sequences + 1, heads of queries, heads of keys and values, head size
    sizes={"tokens": free, "ends": free, "h": fixed, "g": fixed, "d": fixed},
    options={"dtype": ("bf16", "fp16"), "causal": False},
    arguments=(
        read("q", "dtype", ("tokens", "h", "d")),
        read("k", "dtype", ("tokens", "g", "d")),
        read("v", "dtype", ("tokens", "g", "d")),
        read("cu_seqlens", "int32", ("ends",)),
        write("o", "dtype", ("tokens", "h", "d")),
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
    call="q, k, v, cu_seqlens, o, scale, stream",
    tails=({"tokens": 333, "ends": 6}, {"tokens": 37, "ends": 2}),
    examples=("16384x13x32x8x128 bf16 causal", "1000x9x16x16x64 fp16", "2048x3x16x2x256 bf16"),
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


def borders(tokens: int, ends: int) -> list[int]:
    """Return where sequences end, from 0 to ``tokens``: log-normal lengths, of three or more the first 0."""
    draw = random.Random(ends)
    lengths = [draw.lognormvariate(0.0, 0.8) for _ in range(ends - 1)]
    if ends > 3:
        lengths[0] = 0.0
    inner = [round(part / sum(lengths) * tokens) for part in accumulate(lengths)]
    return [0, *inner[:-1], tokens]


@kernel.inputs
def inputs(generator: Any, tokens: int, ends: int) -> dict[str, Any]:
    """Return where sequences end; the rest is normal."""
    import torch

    return {"cu_seqlens": torch.tensor(borders(tokens, ends), dtype=torch.int32, device=generator.device)}


@kernel.reference
def reference(q: Any, k: Any, v: Any, cu_seqlens: Any, scale: float, causal: bool) -> Any:
    """Return attention within each sequence in fp64, head by head."""
    import torch

    out = torch.empty_like(q)
    for low, high in pairwise(cu_seqlens.long().tolist()):
        for head in range(q.shape[1]):
            keys, values = (x[low:high, head * k.shape[1] // q.shape[1]] for x in (k, v))
            scores = q[low:high, head] @ keys.T * scale
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
            out[low:high, head] = scores.softmax(-1) @ values
    return out


@kernel.tolerance
def allowed(want: Any, dtype: str, causal: bool, tokens: int, ends: int) -> Any:
    """Rounding of the output, and of weights before the second product, for normal inputs: six deviations.

    The weights of n keys have a sum of squares of about 8/n at most, and each is rounded on its own.
    """
    import torch

    unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
    lengths = [high - low for low, high in pairwise(borders(tokens, ends))]
    keys = [range(1, length + 1) if causal else [length] * length for length in lengths]
    counts = torch.tensor([*chain(*keys)], dtype=want.dtype, device=want.device)
    return want.abs() * unit + 4 * unit * (8.0 / counts).clamp_(max=1.0).sqrt_().reshape(-1, 1, 1)


@kernel.flops
def flops(tokens: int, ends: int, h: int, d: int, causal: bool) -> int:
    """Return operations of both products; half of them with a causal mask."""
    pairs = sum((high - low) ** 2 for low, high in pairwise(borders(tokens, ends)))
    return 4 * pairs * h * d // (2 if causal else 1)


@kernel.baseline("sdpa, cuDNN, one by one")
def cudnn(q: Any, k: Any, v: Any, scale: float, causal: bool, tokens: int, ends: int) -> Any:
    """Call PyTorch with cuDNN forced for each sequence: what there is without a package for lengths."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return one_by_one(q, k, v, scale, causal, tokens, ends)


@kernel.baseline("sdpa, one by one")
def one_by_one(q: Any, k: Any, v: Any, scale: float, causal: bool, tokens: int, ends: int) -> Any:
    """Call PyTorch, which chooses, for each sequence."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    out = torch.empty_like(q)
    for low, high in pairwise(borders(tokens, ends)):
        if low < high:
            each = (x[None, low:high].transpose(1, 2) for x in (q, k, v))
            part = scaled_dot_product_attention(*each, is_causal=causal, scale=scale, enable_gqa=True)
            out[low:high] = part[0].transpose(0, 1)
    return out
