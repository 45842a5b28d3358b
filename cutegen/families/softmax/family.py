"""Softmax as a declared family: ``y = exp(x - max(x)) / sum(exp(x - max(x)))``, row by row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, rounding_error, write
from cutegen.families.row_baselines import eager_and_compiled
from cutegen.families.row_knobs import ROW_KNOBS
from cutegen.family import Baseline, Option, Size

if TYPE_CHECKING:
    import torch

__all__ = ["SOFTMAX"]

#: Relative error of ex2.approx.ftz.f32, and the least that it and a product return instead of zero.
#: Source: PTX ISA, ex2.
_EXP2_ERROR, _FLUSHED = 2.0**-22, 2.0**-126
#: Powers of two that are multiplied on the way to a result: two in the numerator; in the sum two and one for
#: every turn in which a thread meets a larger value, of which the space leaves at most eight.
_POWERS = 12
#: Half a unit in the last place of fp32.
_UNIT = 2.0**-24


def _reference(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"out": x.softmax(-1)}


def _tolerance(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    """Rounding, the sum, its reciprocal, the powers of two, and the three roundings of the argument of each.

    The argument is max(x) - x, which is at most -ln(y); averaged over the sum it is at most ln(n).
    """
    arguments = want.clamp_min(1e-300).log_().neg_().add_(math.log(problem.n))
    units = arguments.mul_(3).add_(math.log2(problem.n) + 9).mul_(_UNIT).add_(_POWERS * _EXP2_ERROR)
    return rounding_error(problem.dtype, want).add_(units.mul_(want)).add_(_FLUSHED)


def _adjust(problem: DeclaredProblem, tensors: Mapping[str, Any], awkward: bool) -> None:
    """Spread logits over some hundred, and mask single ones and all but the start of rows."""
    if not awkward:
        return
    x = tensors["x"]
    x.mul_(40.0)
    x[1::2, 1::3] = -math.inf
    x[2::4, problem.n // 16 + 1 :] = -math.inf


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    return eager_and_compiled("softmax", lambda tensors, scalars: {"out": tensors["x"].softmax(-1)})


SOFTMAX = DeclaredFamily(
    "softmax",
    "softmax of rows",
    sizes=(Size("m", "rows"), Size("n", "elements of a row", free=False)),
    options=(Option("dtype", "of x and y", ("bf16", "fp16", "fp32"), "bf16"),),
    arguments=(
        read("x", "dtype", ("m", "n")),
        write("out", "dtype", ("m", "n"), may_alias=("x",)),
    ),
    reference=_reference,
    rows="m",
    tolerance=_tolerance,
    adjust=_adjust,
    tail_rows=(37, 333),  # several rows, since each is made hard in another way
    baselines=_baselines,
    knobs=ROW_KNOBS,
    examples=(
        "4096x4096 bf16",
        "16384x4096 bf16",
        "8192x8192 fp16",
        "32768x128 bf16",
        "131072x64 fp16",
        "4096x16384 fp32",
        "4096x32768 bf16",
        "2048x65536 bf16",
        "1024x131072 bf16",
        "1024x262144 fp32",
        "64x2048 bf16",
        "7x4097 bf16",
        "100000x17 fp16",
        "1x4096 bf16",
        "64x7168 bf16",
    ),
)
