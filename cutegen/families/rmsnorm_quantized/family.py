"""RMSNorm to e4m3 with a scale for each row, as a declared family.

``y = h / sqrt(mean(h^2) + eps) * weight``, ``h = x + residual``; ``scale = max |y| / 448`` of each row, at
least the smallest normal number of fp32; the result is ``y / scale``, rounded once. 448 is the largest e4m3
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, scalar, write
from cutegen.families.row_baselines import eager_and_compiled
from cutegen.families.row_knobs import RING_KNOBS
from cutegen.family import Baseline, Option, Size

if TYPE_CHECKING:
    import torch

__all__ = ["LARGEST", "LEAST_SCALE", "RMSNORM_QUANTIZED"]

#: The largest finite e4m3 number. Source: OCP FP8.
LARGEST = 448.0
#: The least scale: the smallest normal number of fp32, which a row of zeros gets.
LEAST_SCALE = 2.0**-126
#: Kernels load 16 bytes of x at a time and store as many elements: 8 bytes of fp8, of fp32 4.
_OUT_ALIGN_BYTES = 8
#: The second is large enough to change every scale, so that a kernel in which the first is compiled shows.
_EPS = (1e-6, 0.25)


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float
) -> dict[str, torch.Tensor]:
    h = x if residual is None else x + residual
    y = h * (h.square().mean(-1) + eps).rsqrt()[:, None]
    y = y if weight is None else y * weight
    scale = (y.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE)
    return {"out": y / scale[:, None], "scale": scale, "residual_out": h}


def _adjust(problem: DeclaredProblem, tensors: Mapping[str, Any], awkward: bool) -> None:
    """Let single elements stand out, and make one row zero."""
    if not awkward:
        return
    x = tensors["x"]
    x[1::3, problem.n // 2].mul_(200.0)
    for name in ("x", "residual"):
        if name in tensors:
            tensors[name][-1].zero_()


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return torch's own norm, and the division by the scale of each row."""
    import torch

    n, residual_out = problem.n, problem.residual_out

    def norm(tensors: Mapping[str, Any], scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
        x: torch.Tensor = tensors["x"]
        weight, residual = tensors.get("weight"), tensors.get("residual")
        h = x if residual is None else x + residual
        weight = None if weight is None else weight.to(h.dtype)
        y = torch.nn.functional.rms_norm(h, (n,), weight, scalars["eps"]).float()
        scale = (y.abs().amax(-1) / LARGEST).clamp_min(LEAST_SCALE)
        found = {"out": (y / scale[:, None]).to(torch.float8_e4m3fn), "scale": scale}
        if residual_out:
            found["residual_out"] = h
        return found

    return eager_and_compiled("rms_norm and quantise", norm)


RMSNORM_QUANTIZED = DeclaredFamily(
    "rmsnorm_quantized",
    "root-mean-square norm of rows to e4m3, with a scale for each row",
    sizes=(Size("m", "rows"), Size("n", "elements of a row", free=False)),
    options=(
        Option("dtype", "of x and residual", ("bf16", "fp16", "fp32"), "bf16"),
        Option("weight", "dtype of the weight", ("same", "fp32", "none"), "same"),
        Option("residual", "add a residual first"),
        Option("residual_out", "write the sum back"),
    ),
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("weight", "weight", ("n",), when="weight"),
        read("residual", "dtype", ("m", "n"), when="residual"),
        write("out", "e4m3", ("m", "n"), align_bytes=_OUT_ALIGN_BYTES),
        write("scale", "fp32", ("m",)),
        write("residual_out", "dtype", ("m", "n"), when="residual_out", may_alias=("residual",)),
        scalar("eps", "fp32", _EPS),
    ),
    reference=_reference,
    rows="m",
    adjust=_adjust,
    tail_rows=(37, 333),  # several rows, since each is made hard in another way
    baselines=_baselines,
    knobs=RING_KNOBS,
    examples=(
        "4096x4096 bf16",
        "16384x4096 bf16",
        "8192x8192 bf16 residual residual_out",
        "32768x128 bf16",
        "131072x64 fp16 weight=none",
        "4096x16384 fp32 weight=fp32",
        "4096x32768 bf16",
        "2048x65536 bf16 weight=fp32",
        "1024x131072 bf16",
        "1024x262144 fp32",
        "64x2048 bf16",
        "7x4097 bf16",
        "100000x17 fp16 weight=none",
        "1x4096 bf16",
        "64x7168 bf16 residual residual_out",
    ),
)
