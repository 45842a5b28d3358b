"""LayerNorm as a declared family: ``y = (x - mean) / sqrt(var + eps) * weight + bias``, row by row.

``var`` is the mean of ``(x - mean)^2``, as in torch. Arithmetic is in fp32, and every output is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, scalar, write
from cutegen.families.row_baselines import eager_and_compiled
from cutegen.families.row_knobs import RING_KNOBS, RING_PREFETCH_WEIGHT
from cutegen.family import Baseline, Option, Size

if TYPE_CHECKING:
    import torch

__all__ = ["LAYERNORM"]

#: The second is large enough to change every element, so that a kernel in which the first is compiled shows.
_EPS = (1e-5, 0.25)


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> dict[str, torch.Tensor]:
    """Return the outputs, and what their differences are made of."""
    mean = x.mean(-1)
    away = x - mean[:, None]
    rstd = (away.square().mean(-1) + eps).rsqrt()
    sizes = x.abs().mean(-1)
    y, terms = away * rstd[:, None], (sizes * rstd)[:, None].expand_as(x)
    if weight is not None:
        y, terms = y * weight, terms * weight.abs()
    if bias is not None:
        y, terms = y + bias, terms + bias.abs()
    return {"out": y, "out terms": terms, "mean": mean, "mean terms": sizes, "rstd": rstd}


def _adjust(problem: DeclaredProblem, tensors: Mapping[str, Any], awkward: bool) -> None:
    """Move rows away from zero, and let single elements stand out as in the layers of a language model."""
    if not awkward:
        return
    x = tensors["x"]
    x[::2].add_(30.0)
    x[1::3, problem.n // 2].mul_(200.0)


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return torch's own norm, with a weight and a bias in the dtype of x."""
    import torch

    n, stats = problem.n, problem.stats

    def norm(tensors: Mapping[str, Any], scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
        x: torch.Tensor = tensors["x"]
        weight, bias = (tensors[name].to(x.dtype) if name in tensors else None for name in ("weight", "bias"))
        out, mean, rstd = torch.native_layer_norm(x, (n,), weight, bias, scalars["eps"])
        return {"out": out, "mean": mean.view(-1), "rstd": rstd.view(-1)} if stats else {"out": out}

    return eager_and_compiled("layer_norm", norm)


LAYERNORM = DeclaredFamily(
    "layernorm",
    "layer norm of rows",
    sizes=(Size("m", "rows"), Size("n", "elements of a row", free=False)),
    options=(
        Option("dtype", "of x and y", ("bf16", "fp16", "fp32"), "bf16"),
        Option("weight", "dtype of the weight", ("same", "fp32", "none"), "same"),
        Option("bias", "dtype of the bias", ("same", "fp32", "none"), "same"),
        Option("stats", "write mean and 1 / sqrt(var + eps) of each row"),
    ),
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("weight", "weight", ("n",), when="weight"),
        read("bias", "bias", ("n",), when="bias"),
        write("out", "dtype", ("m", "n"), may_alias=("x",)),
        write("mean", "fp32", ("m",), when="stats"),
        write("rstd", "fp32", ("m",), when="stats"),
        scalar("eps", "fp32", _EPS),
    ),
    reference=_reference,
    rows="m",
    adjust=_adjust,
    tail_rows=(37, 333),  # several rows, since each is made hard in another way
    baselines=_baselines,
    knobs={**RING_KNOBS, **RING_PREFETCH_WEIGHT},
    examples=(
        "4096x4096 bf16",
        "16384x4096 bf16 stats",
        "8192x8192 bf16",
        "32768x128 bf16",
        "131072x64 fp16 weight=none bias=none",
        "4096x16384 fp32",
        "4096x32768 bf16 weight=fp32 bias=fp32",
        "2048x65536 bf16 bias=none",
        "1024x131072 bf16",
        "1024x262144 fp32",
        "64x2048 bf16",
        "7x4097 bf16 stats",
        "100000x17 fp16 weight=none",
        "1x4096 bf16",
        "64x7168 bf16 weight=fp32 bias=fp32 stats",
    ),
)
