"""RMSNorm as a declared family: ``y = h / sqrt(mean(h^2) + eps) * weight``, ``h = x + residual``, row by row.

Every output is rounded once: a row is normalised in fp32 from the sum that is not rounded, also where that
sum is stored as ``residual_out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, scalar, write
from cutegen.families.row_baselines import eager_and_compiled
from cutegen.families.row_knobs import PREFETCH_WEIGHT, ROW_KNOBS
from cutegen.family import Baseline, Option, Size

if TYPE_CHECKING:
    import torch

__all__ = ["RMSNORM"]

#: The second is large enough to change every element, so that a kernel in which the first is compiled shows.
_EPS = (1e-6, 0.25)


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float
) -> dict[str, torch.Tensor]:
    h = x if residual is None else x + residual
    rstd = (h.square().mean(-1) + eps).rsqrt()
    y = h * rstd[:, None]
    return {"out": y if weight is None else y * weight, "residual_out": h, "rstd": rstd}


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return torch's own norm, behind an addition where there is a residual: eager, and compiled."""
    import torch

    n, residual_out, rstd = problem.n, problem.residual_out, problem.rstd

    def norm(tensors: Mapping[str, Any], scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
        x: torch.Tensor = tensors["x"]
        weight, residual = tensors.get("weight"), tensors.get("residual")
        h = x if residual is None else x + residual
        weight = None if weight is None else weight.to(h.dtype)
        found = {"out": torch.nn.functional.rms_norm(h, (n,), weight, scalars["eps"])}
        if residual_out:
            found["residual_out"] = h
        if rstd:
            found["rstd"] = (h.float().square().mean(-1) + scalars["eps"]).rsqrt()
        return found

    return eager_and_compiled("rms_norm", norm)


RMSNORM = DeclaredFamily(
    "rmsnorm",
    "root-mean-square norm of rows",
    sizes=(Size("m", "rows"), Size("n", "elements of a row", free=False)),
    options=(
        Option("dtype", "of x, residual and y", ("bf16", "fp16", "fp32"), "bf16"),
        Option("weight", "dtype of the weight", ("same", "fp32", "none"), "same"),
        Option("residual", "add a residual first"),
        Option("residual_out", "write the sum back"),
        Option("rstd", "write 1 / sqrt(mean + eps) of each row"),
    ),
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("weight", "weight", ("n",), when="weight"),
        read("residual", "dtype", ("m", "n"), when="residual"),
        write("out", "dtype", ("m", "n"), may_alias=("x",)),
        write("residual_out", "dtype", ("m", "n"), when="residual_out", may_alias=("residual",)),
        write("rstd", "fp32", ("m",), when="rstd"),
        scalar("eps", "fp32", _EPS),
    ),
    reference=_reference,
    rows="m",
    baselines=_baselines,
    knobs={**ROW_KNOBS, **PREFETCH_WEIGHT},
    examples=(
        "4096x4096 bf16",
        "16384x4096 bf16",
        "8192x8192 bf16 residual residual_out rstd",
        "32768x128 bf16",
        "131072x64 fp16 weight=none",
        "4096x16384 fp32 weight=fp32",
        "4096x32768 bf16",
        "2048x65536 bf16 weight=fp32",
        "1024x131072 bf16",
        "1024x262144 fp32",
        "7x4097 bf16",
        "100000x17 fp16 weight=none",
        "1x4096 bf16",
        "64x7168 bf16 residual residual_out",
    ),
)
