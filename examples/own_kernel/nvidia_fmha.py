"""NVIDIA's Hopper attention, an example of CUTLASS, as it is; tools/fetch_foreign.py gets the files.

    python tools/fetch_foreign.py foreign && export PYTHONPATH=foreign
    python -m cutegen.tune --kernel nvidia_fmha.py --shape 4x4096x4096x32x8x128 --options causal

It needs neither torch nor a GPU where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "nvidia_fmha",
    "NVIDIA's Hopper attention forward",
    entry="nvidia_fmha_launch:attention",
    # batch, queries, keys, heads of queries, heads of keys and values, head size
    sizes={"b": free, "s": free, "t": free, "h": fixed, "g": fixed, "d": fixed},
    options={"dtype": ("fp16", "bf16"), "causal": False},
    arguments=(
        read("q", "dtype", ("b", "s", "h", "d")),
        read("k", "dtype", ("b", "t", "g", "d")),
        read("v", "dtype", ("b", "t", "g", "d")),
        write("o", "dtype", ("b", "s", "h", "d")),
        write("lse", "fp32", ("b", "s", "h")),
        scalar("scale", "fp32", (0.088, 0.05)),
    ),
    knobs={
        "tile_n": (32, 64, 96, 128, 160, 192, 256),
        "persistent": (False, True),
        "residual": (True, False),
    },
    default=lambda t, d, causal: {
        "tile_n": 128 if d < 256 else 64,  # the example's command line has 128, which does not fit 256
        "persistent": False,
        "residual": not causal and t % (128 if d < 256 else 64) != 0,
    },
    construct="h // g, g, d, tile_n, persistent, residual, causal",
    rows="b",
    tails=({"b": 3, "s": 200, "t": 200}, {"b": 3, "s": 256, "t": 256}),
    examples=("4x4096x4096x32x8x128 bf16 causal", "2x300x300x16x16x64 fp16", "1x1024x1024x16x2x256 bf16"),
)


@kernel.rule
def fits_shared_memory(d: int, tile_n: int, persistent: bool) -> bool:
    """Two tiles of queries, five of keys or values and, if persistent, 16 KB of output fit into 227 KB."""
    return 2 * (2 * 64 * d + 5 * tile_n * d) + (16384 if persistent else 0) + 1024 <= 227 * 1024


@kernel.rule
def causal_is_square(s: int, t: int, causal: bool) -> bool:
    """Query i sees keys up to i here; other libraries count from the last key, so lengths must agree."""
    return s == t or not causal


@kernel.rule
def last_keys_are_masked(t: int, tile_n: int, residual: bool, causal: bool) -> bool:
    """Without residual masking, keys past the last would count, so tile_n must divide their number."""
    return residual or causal or t % tile_n == 0


@kernel.rule
def causal_masks_itself(residual: bool, causal: bool) -> bool:
    """The example has one kind of mask at a time; the causal one also covers the last keys."""
    return not (residual and causal)


@kernel.reference
def reference(q: Any, k: Any, v: Any, scale: float, causal: bool) -> dict[str, Any]:
    """Return attention and the logarithms of the sums of exponentials in fp64, head by head."""
    import torch

    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    group = q.shape[2] // k.shape[2]
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            scores = q[batch, :, head] @ k[batch, :, head // group].T * scale
            if causal:
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), float("-inf"))
            lse[batch, :, head] = scores.logsumexp(-1)
            out[batch, :, head] = scores.softmax(-1) @ v[batch, :, head // group]
    return {"o": out, "lse": lse}


@kernel.tolerance
def allowed(output: str, want: Any, dtype: str, causal: bool, t: int) -> Any:
    """Rounding of the output, and of weights before the second product, for normal inputs: six deviations.

    The weights of n keys have a sum of squares of about 8/n at most, and each is rounded on its own.
    """
    import torch

    if output == "lse":
        return want.abs() * 2.0**-20 + 2.0**-18
    unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
    keys = torch.arange(1, want.shape[1] + 1, device=want.device) if causal else torch.tensor(float(t))
    weights = (8.0 / keys.double()).clamp(max=1.0).sqrt().reshape(1, -1, 1, 1).to(want.device)
    return want.abs() * unit + 4 * unit * weights


@kernel.flops
def flops(b: int, s: int, t: int, h: int, d: int, causal: bool) -> int:
    """Return operations of both products; half of them with a causal mask."""
    return 4 * b * h * s * t * d // (2 if causal else 1)


@kernel.baseline("sdpa, cuDNN")
def cudnn(q: Any, k: Any, v: Any, scale: float, causal: bool) -> dict[str, Any]:
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
    return {"o": out.transpose(1, 2)}


@kernel.baseline("sdpa")
def sdpa(q: Any, k: Any, v: Any, scale: float, causal: bool) -> dict[str, Any]:
    """Call PyTorch, which chooses."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return {"o": out.transpose(1, 2)}
