"""RMSNorm as a declared family: ``y = h / sqrt(mean(h^2) + eps) * weight``, ``h = x + residual``, row by row.

Every output is rounded once: a row is normalised in fp32 from the sum that is not rounded, also where that
sum is stored as ``residual_out``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, scalar, write
from cutegen.family import Baseline, Inputs, Option, Size, Tensors

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

    def norm(
        x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float
    ) -> dict[str, torch.Tensor]:
        h = x if residual is None else x + residual
        found = {
            "out": torch.nn.functional.rms_norm(h, (n,), None if weight is None else weight.to(h.dtype), eps)
        }
        if residual_out:
            found["residual_out"] = h
        if rstd:
            found["rstd"] = (h.float().square().mean(-1) + eps).rsqrt()
        return found

    # Shapes that another problem compiled must not make this one's symbolic.
    torch._dynamo.reset()
    compiled = torch.compile(norm, dynamic=False)

    def called(function: object) -> Baseline:
        def call(inputs: Inputs, outputs: Tensors) -> Tensors:
            given = inputs.tensors
            found: Tensors = function(  # type: ignore[operator]
                given["x"], given.get("weight"), given.get("residual"), inputs.scalars["eps"]
            )
            return found

        return call

    return {"torch rms_norm": called(norm), "torch.compile of rms_norm": called(compiled)}


_KNOBS = {
    "threads_per_row": (
        "Threads of a CTA that share a row. Few leave more values, and more loads in flight, to each "
        "thread; many shorten a long row."
    ),
    "rows_per_cta": "Rows of a CTA at a time. More than one fills a CTA where rows are short.",
    "rows_per_thread": (
        "Rows that a thread works on at a time. More than one keeps more loads in flight where a thread has "
        "one or two accesses to a row."
    ),
    "cluster_n": (
        "CTAs of a cluster that share a row and exchange their sums through distributed shared memory. Pays "
        "for rows too long for the registers of one CTA, and for few rows."
    ),
    "prefetch_weight": (
        "Load the weight before the row's sum is known. Without it the load comes after, which saves "
        "registers."
    ),
    "row_in": (
        "Where a row waits until its sum is known: in registers, or in shared memory, from which it is read "
        "twice. Shared memory pays for rows of more than 64 KiB, where registers have few loads in flight."
    ),
    "turn": "Vectors of 16 bytes that a thread holds at a time where the row is in shared memory; else 1.",
    "pdl": (
        "Programmatic dependent launch: start up while the kernel before it in the stream ends, and let the "
        "kernel after it start up as soon as there is room (early) or behind the sums (late). Pays for short "
        "kernels that follow one another; off launches without it."
    ),
}

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
    knobs=_KNOBS,
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
