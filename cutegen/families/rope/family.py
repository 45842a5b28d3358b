"""Rotary position embedding as a declared family: pairs of elements of queries and keys are rotated.

``first, second = first * cos - second * sin, second * cos + first * sin`` for the pairs of every head, where
the tables hold a cosine and a sine for each pair of a token, or of a position that a token names. An RMSNorm
of each head may come before. Outputs are rounded once; they may be the inputs themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.compiled import compile_for_one_problem
from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, rounding_error, scalar, write
from cutegen.family import Baseline, Inputs, Option, Size, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["ROPE", "STYLES"]

STYLES = ("half", "interleaved")
_TOKENS, _POSITIONS = "table=tokens", "table=positions"
#: The second is large enough to change every element, so that a kernel in which the first is compiled shows.
_EPS = (1e-6, 0.25)
#: Two products and their sum in fp32, of inputs and tables that are normal in the check: of 2**31 values none
#: is expected above 6.5. A norm makes elements of at most sqrt(d), times a weight.
_LARGEST = 6.5


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str, inverse: bool
) -> torch.Tensor:
    """Return heads with their first elements rotated; the tables have a row for each token."""
    import torch

    pairs = cos.shape[-1]
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    whole, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if style == "interleaved":
        a, b = whole[..., ::2], whole[..., 1::2]
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = whole[..., :pairs], whole[..., pairs:]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([rotated, rest], -1)


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    cos_table: torch.Tensor | None,
    sin_table: torch.Tensor | None,
    positions: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    style: str,
    inverse: bool,
    eps: float = 0.0,
) -> dict[str, torch.Tensor]:
    if positions is not None:
        assert cos_table is not None and sin_table is not None
        rows = positions.long().clamp(0, cos_table.shape[0] - 1)
        cos, sin = cos_table[rows], sin_table[rows]
    assert cos is not None and sin is not None
    if q_weight is not None and k_weight is not None:
        q, k = _rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps)
    return {
        "q_out": _rotated(q, cos, sin, style, inverse),
        "k_out": _rotated(k, cos, sin, style, inverse),
    }


def _adjust(problem: DeclaredProblem, tensors: Tensors, awkward: bool) -> None:
    """Make what the tables hold cosines and sines, so that heads rotated again and again keep their length.

    On awkward sizes pairs of the tables have any length: models scale them.
    """
    cos, sin = (tensors[name] for name in tensors if name.startswith(("cos", "sin")))
    if awkward:
        return
    length = cos.float().hypot(sin.float()).clamp_(min=1e-30)
    cos.copy_(cos.float().div_(length))
    sin.copy_(sin.float().div_(length))


def _tolerance(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    largest = _LARGEST * (math.sqrt(problem.d) if problem.norm else 1.0)
    units = 4 + (math.log2(problem.d) + 8 if problem.norm else 0)
    allowed = rounding_error(str(problem.dtype), want)
    return allowed.add_(units * 2.0**-24 * 2 * _LARGEST * largest)


def _bytes(problem: DeclaredProblem) -> int:
    """Every tensor once, of tables as many rows as there are tokens."""
    spared = max(0, problem.p - problem.m) if problem.table == "positions" else 0
    dtype = str(problem.dtype if problem.table_dtype == "same" else problem.table_dtype)
    arguments = problem.declared.arguments(problem)
    every = sum(math.prod(a.shape) * DTYPE_BYTES[a.dtype] for a in arguments if a.shape)
    return int(every - 2 * spared * problem.pairs * DTYPE_BYTES[dtype])


def _expression(style: str, inverse: bool) -> Callable[..., dict[str, torch.Tensor]]:
    """Return what models write: in the dtype of q or, if ``wide``, in fp32."""
    import torch

    def expression(
        wide: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        weights: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> dict[str, torch.Tensor]:
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        given = q.dtype
        if wide:  # which costs a compiler nothing, and is right
            q, k = q.float(), k.float()
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        if weights is not None:
            norm, shape = torch.nn.functional.rms_norm, (q.shape[-1],)
            q, k = norm(q, shape, weights[0].to(q.dtype), eps), norm(k, shape, weights[1].to(q.dtype), eps)
        return {
            "q_out": _rotated(q, cos, sin, style, inverse).to(given),
            "k_out": _rotated(k, cos, sin, style, inverse).to(given),
        }

    return expression


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the expression in torch: eager in the dtype of q, as models write it, and compiled, in fp32."""
    expression = _expression(str(problem.style), bool(problem.inverse))

    def called(function: Callable[..., Tensors], wide: bool) -> Baseline:
        def call(inputs: Inputs, outputs: Tensors) -> Tensors:
            given = inputs.tensors
            tables = ("cos_table", "sin_table") if "positions" in given else ("cos", "sin")
            weights = (given["q_weight"], given["k_weight"]) if "q_weight" in given else None
            return function(
                wide,
                given["q"],
                given["k"],
                *(given[name] for name in tables),
                given.get("positions"),
                weights,
                inputs.scalars.get("eps", 0.0),
            )

        return call

    compiled = compile_for_one_problem(expression)
    return {"torch eager": called(expression, False), "torch.compile": called(compiled, True)}


_KNOBS = {
    "threads": "Threads of a CTA. Few start and end sooner; many leave less to the scheduler of CTAs.",
    "heads_per_thread": (
        "Heads of a token that a thread works on. Several keep more loads in flight and load the tables less "
        "often; one spreads few tokens over more threads."
    ),
    "pdl": (
        "Programmatic dependent launch: start up while the kernel before it in the stream ends, and let the "
        "kernel after it start up as soon as there is room (early). Pays for short kernels between others "
        "that do so, as in a model with cutegen's layers; behind others it costs 0.2 to 0.3 us. off launches "
        "without it."
    ),
}

ROPE = DeclaredFamily(
    "rope",
    "rotary position embedding of queries and keys",
    sizes=(
        Size("m", "tokens"),
        Size("hq", "heads of q", free=False),
        Size("hk", "heads of k", free=False),
        Size("d", "elements of a head", free=False),
        Size("pairs", "pairs of a head that are rotated", free=False),
        Size("p", "rows of the tables, 1 with table=tokens", default=1),
    ),
    options=(
        Option("dtype", "of q and k", ("bf16", "fp16", "fp32"), "bf16"),
        Option("style", "pairs half of the rotated elements apart, or side by side", STYLES, "half"),
        Option(
            "table", "a row of the tables for each token, or positions", ("tokens", "positions"), "tokens"
        ),
        Option("table_dtype", "of cosines and sines", ("fp32", "same"), "fp32"),
        Option("index", "dtype of positions", ("int64", "int32"), "int64"),
        Option("norm", "RMSNorm of each head first"),
        Option("inverse", "rotate the other way, as the gradient does"),
    ),
    arguments=(
        read("q", "dtype", ("m", "hq", "d")),
        read("k", "dtype", ("m", "hk", "d")),
        read("cos", "table_dtype", ("m", "pairs"), when=_TOKENS),
        read("sin", "table_dtype", ("m", "pairs"), when=_TOKENS),
        read("cos_table", "table_dtype", ("p", "pairs"), when=_POSITIONS),
        read("sin_table", "table_dtype", ("p", "pairs"), when=_POSITIONS),
        read("positions", "index", ("m",), when=_POSITIONS, below="p"),
        read("q_weight", "dtype", ("d",), when="norm"),
        read("k_weight", "dtype", ("d",), when="norm"),
        write("q_out", "dtype", ("m", "hq", "d"), may_alias=("q",)),
        write("k_out", "dtype", ("m", "hk", "d"), may_alias=("k",)),
        scalar("eps", "fp32", _EPS, when="norm"),
    ),
    reference=_reference,
    rows="m",
    tolerance=_tolerance,
    adjust=_adjust,
    baselines=_baselines,
    min_bytes=_bytes,
    repeat="bounded",
    knobs=_KNOBS,
    examples=(
        "8192x32x8x128x64x1 bf16",
        "8192x32x8x128x64x8192 bf16 table=positions",
        "4096x64x8x128x64x1 bf16 norm table_dtype=same",
        "2048x128x1x64x32x4096 bf16 style=interleaved table=positions index=int32",
        "2048x16x16x256x32x1 fp16",
        "1024x28x4x80x16x1 fp32 style=interleaved inverse",
        "64x32x8x128x64x131072 bf16 table=positions",
        "1x32x8x128x64x1 bf16",
        "77x7x3x50x13x1 bf16 norm",
    ),
)
