"""Cross-entropy as a declared family: ``loss = lse - x[target]``, ``lse = log(sum(exp(x)))``, row by row.

With smoothing ``s`` the target's logit counts for ``1 - s`` and the mean of all logits for ``s``; ``z_loss``
adds ``z_loss * lse^2``. Rows whose target is ``ignore_index`` have neither loss nor gradient. On request the
gradient of each loss times ``row_scale`` of its row is written, which may take the place of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, scalar, write
from cutegen.families.row_baselines import eager_and_compiled
from cutegen.families.row_knobs import ROW_KNOBS
from cutegen.family import Baseline, Option, Size

if TYPE_CHECKING:
    import torch

__all__ = ["CROSS_ENTROPY"]

#: What powers of two and the logarithm cost, in units of what a sum in fp32 may: 12 powers and a logarithm
#: with a relative error of 2**-22 each are 52 of 2**-24, of which a sum along a row of any length gets at
#: least 8; the three roundings of each argument add at most 3 * ln(n) of them. Source: PTX ISA, ex2, lg2.
_POWERS = 52 / 8
_ARGUMENT = 3 / 8
#: The second ignores other rows.
_IGNORE = (-100, 3)


def _reference(
    x: torch.Tensor,
    target: torch.Tensor,
    row_scale: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    smoothing: bool,
) -> dict[str, torch.Tensor]:
    """Return the outputs, and what their differences are made of.

    A label that is no column is no index either, which would end every later call on a GPU: the loss of its
    row is NaN, and its gradient that of a target that is not there.
    """
    import torch

    n, labels = x.shape[-1], target.long()
    s = label_smoothing if smoothing else 0.0
    counts = labels != ignore_index
    is_column = (labels >= 0) & (labels < n)
    lse = x.logsumexp(-1)
    at = torch.where(is_column, labels, 0)[:, None]
    logit = torch.where(is_column | ~counts, x.gather(-1, at)[:, 0], torch.nan)
    mean, sizes = (x.mean(-1), x.abs().mean(-1)) if smoothing else (0.0 * lse, 0.0 * lse)
    steep = 1 + 2 * z_loss * lse
    loss = lse - (1 - s) * logit - s * mean + z_loss * lse.square()
    near = _POWERS + _ARGUMENT * math.log(max(2, n)) + lse.abs()
    terms = near * (1 + 2 * z_loss * lse.abs()) + logit.abs() + s * sizes + z_loss * lse.square()
    found = {"loss": torch.where(counts, loss, 0.0), "loss terms": terms, "lse": lse, "lse terms": near}
    if row_scale is not None:
        scale = torch.where(counts, row_scale, 0.0)[:, None]
        away = (lse[:, None] - x).clamp_max(1e4)
        even = (-away).exp() * steep[:, None]
        hit = torch.zeros_like(x).scatter_(-1, at, (1 - s) * is_column[:, None].to(x.dtype))
        found["grad"] = (even - s / n - hit) * scale
        errors = _POWERS + _ARGUMENT * (away.abs() + math.log(max(2, n)))
        found["grad terms"] = (even.abs() * errors + s / n + hit) * scale.abs() + 2.0**-100
    return found


def _adjust(problem: DeclaredProblem, tensors: Mapping[str, Any], awkward: bool) -> None:
    """Spread labels over the columns and ignore some rows; then logits over some hundred, and mask some."""
    import torch

    x, target = tensors["x"], tensors["target"]
    m, n = x.shape
    rows = torch.arange(m, device=x.device)
    target.copy_((rows * 7919 + 13) % n)
    if not awkward:
        target[::9] = _IGNORE[0]
        return
    target[1::5] = _IGNORE[1] if n > _IGNORE[1] else 0
    x.mul_(40.0)
    kept = x[rows, target].clone()
    if not problem.smoothing:  # the mean of a row with -inf is none
        x[1::2, 1::3] = -math.inf
        x[2::4, n // 16 + 1 :] = -math.inf
    x[rows, target] = kept


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return torch's own loss, and the gradient that its autograd computes from there."""
    import torch

    lse, gradient, smoothing = problem.lse, problem.gradient, problem.smoothing

    def loss(tensors: Mapping[str, Any], scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
        x, target = tensors["x"], tensors["target"]
        s, z = scalars["label_smoothing"] if smoothing else 0.0, scalars["z_loss"]
        ignored = int(scalars["ignore_index"])
        log_p = torch.log_softmax(x.float(), -1)
        log_sum = x.float().logsumexp(-1) if lse or z else None
        rows = torch.nn.functional.nll_loss(log_p, target, ignore_index=ignored, reduction="none")
        if s:
            rows = (1 - s) * rows - s * log_p.mean(-1)
        if z and log_sum is not None:
            rows = rows + z * log_sum.square()
        counts = target != ignored
        found = {"loss": torch.where(counts, rows, 0.0)}
        if lse and log_sum is not None:
            found["lse"] = log_sum
        if gradient:
            scale = torch.where(counts, tensors["row_scale"], 0.0)[:, None]
            p = log_p.exp()
            steep = 1 + 2 * z * log_sum[:, None] if z and log_sum is not None else 1.0
            dx = p * steep - s / x.shape[1]
            hit = torch.where(counts, target, 0)[:, None]
            column = torch.arange(x.shape[1], device=x.device)[None]
            found["grad"] = (torch.where(column == hit, dx - (1 - s), dx) * scale).to(x.dtype)
        return found

    return eager_and_compiled("cross_entropy", loss)


CROSS_ENTROPY = DeclaredFamily(
    "cross_entropy",
    "cross-entropy of rows, and its gradient",
    sizes=(Size("m", "rows"), Size("n", "columns: the vocabulary", free=False)),
    options=(
        Option("dtype", "of x and its gradient", ("bf16", "fp16", "fp32"), "bf16"),
        Option("lse", "write log(sum(exp(x))) of each row"),
        Option("gradient", "write the gradient of each loss times row_scale"),
        Option("smoothing", "the mean of all logits counts for label_smoothing"),
    ),
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("target", "int64", ("m",)),
        read("row_scale", "fp32", ("m",), when="gradient"),
        write("loss", "fp32", ("m",)),
        write("lse", "fp32", ("m",), when="lse"),
        write("grad", "dtype", ("m", "n"), when="gradient", may_alias=("x",)),
        scalar("ignore_index", "int32", _IGNORE),
        scalar("label_smoothing", "fp32", (0.1, 0.3)),
        scalar("z_loss", "fp32", (0.0, 0.01)),
    ),
    reference=_reference,
    rows="m",
    adjust=_adjust,
    tail_rows=(37, 333),  # several rows, since each is made hard in another way
    baselines=_baselines,
    knobs=ROW_KNOBS,
    examples=(
        "4096x32000 bf16",
        "8192x128256 bf16 gradient",
        "4096x151936 bf16 lse",
        "2048x262144 bf16 gradient smoothing",
        "16384x4096 bf16 smoothing",
        "32768x128 bf16",
        "131072x64 fp16 gradient",
        "4096x16384 fp32 gradient lse",
        "1024x262144 fp32",
        "64x2048 bf16 gradient",
        "7x4097 bf16 gradient smoothing",
        "100000x17 fp16",
        "1x128256 bf16",
        "64x7168 bf16 lse smoothing",
    ),
)
