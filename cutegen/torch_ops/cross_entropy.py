"""``cross_entropy`` on torch tensors, eager and under ``torch.compile``, with its gradient."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.errors import OperandError
from cutegen.families.calls import require_number, require_tensor
from cutegen.families.cross_entropy.family import CROSS_ENTROPY
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.autograd import autograd_records
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, require_rows
from cutegen.torch_ops.stacked_gradients import or_stacked, wide

if TYPE_CHECKING:
    import torch

    from cutegen.space import Config

__all__ = ["cross_entropy", "prepare"]

REDUCTIONS = ("mean", "sum", "none")
_operator = DeclaredOperator(CROSS_ENTROPY, state.default_dispatcher, state.workspaces)


class _Settings(NamedTuple):
    """The numbers of a call."""

    ignore_index: int
    label_smoothing: float
    z_loss: float

    @property
    def options(self) -> tuple[bool, ...]:
        return (self.label_smoothing != 0,)


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    return_lse: bool = False,
    inplace_backward: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the cross-entropy of logits: ``lse - x[target]`` of each row, ``lse = log(sum(exp(x)))``.

    Arithmetic is in fp32, whatever the dtype of ``x``. Forward, the logits are read once and nothing of their
    size is written; backward, a second kernel reads them and writes their gradient. Differentiable once.

    Args:
        x: Logits, (..., n) in bf16, fp16 or fp32 on a GPU; rows are contiguous, of up to 262144 elements.
        target: The column of each row, int64 in the shape of ``x`` without its last dimension. One that is no
            column and not ``ignore_index`` makes its loss NaN; nothing is read for it.
        ignore_index: Rows of this target have no loss and no gradient, and do not count for a mean.
        label_smoothing: Weight of the mean of all logits, from 0 to 1; the target's logit has the rest.
        z_loss: Weight of ``lse^2``, which is added.
        reduction: ``mean``, ``sum``, or ``none`` for one loss for each row.
        return_lse: Also return ``lse``, in fp32 with one value for each row, without a gradient.
        inplace_backward: The gradient takes the place of ``x``, whose values are then lost. Not under
            ``torch.compile``, which plans memory itself.
        config: Overrides the choice of the forward kernel: a complete config, or its text
            ``knob=value ...``.

    Returns:
        The loss in fp32; with ``return_lse`` a tuple of it and ``lse``.

    Raises:
        OperandError: An argument cannot be; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    _require(x, target, ignore_index, label_smoothing, reduction)
    settings = _Settings(int(ignore_index), float(label_smoothing), require_number("z_loss", z_loss))
    shape = x.shape[:-1]
    rows, labels = as_rows("x", x), target.reshape(-1)
    chosen = as_config(config)
    if x.numel() == 0:
        _operator.of_nothing([rows, labels, None, MAKE, MAKE, None], settings.options)
        losses, lse = _of_nothing(rows)
    elif state.must_trace(x, labels):
        losses, lse = _forward(_operator.traced, rows, labels, settings, chosen)
    else:
        labels = labels if labels.data_ptr() % 16 == 0 else labels.clone()
        if autograd_records(x):
            losses, lse = _function().apply(rows, labels, settings, chosen, inplace_backward)
        else:
            losses, lse = _forward(_operator, rows, labels, settings, chosen)
    loss = _reduced(losses, labels, settings.ignore_index, reduction, shape)
    return (loss, lse.detach().view(shape)) if return_lse else loss


def _require(x: Any, target: Any, ignore_index: int, label_smoothing: float, reduction: str) -> None:
    require_rows(x)
    require_tensor("target", target)
    if target.shape != x.shape[:-1]:
        raise OperandError(
            f"target has shape {tuple(target.shape)}; it must be that of x without its last dimension, "
            f"{tuple(x.shape[:-1])}"
        )
    if reduction not in REDUCTIONS:
        raise OperandError(f"reduction={reduction!r} is not valid; valid: {', '.join(REDUCTIONS)}")
    if not 0 <= require_number("label_smoothing", label_smoothing) <= 1:
        raise OperandError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    if not hasattr(ignore_index, "__index__") or not -(2**31) <= ignore_index < 2**31:
        raise OperandError(f"ignore_index={ignore_index} must be an integer of 32 bits")


def _of_nothing(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of rows without elements: none, or log(0) less nothing."""
    lse = rows.float().logsumexp(-1) if rows.shape[0] else rows.sum(-1).float()
    return lse, lse


def _reduced(
    losses: torch.Tensor, labels: torch.Tensor, ignore_index: int, reduction: str, shape: Any
) -> torch.Tensor:
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()


def _forward(run: Any, x: Any, labels: Any, settings: _Settings, config: Config | None) -> tuple[Any, Any]:
    values = [x, labels, None, MAKE, MAKE, None]
    *_, losses, lse, _ = run(values, tuple(settings), config, settings.options)
    return losses, lse


def _gradient(run: Any, x: Any, labels: Any, grad: Any, settings: _Settings, target: Any) -> Any:
    """Return the gradient of the logits; ``target`` says where it goes, unless it stands for several."""

    def single(grad: Any, x: Any, target: Any) -> Any:
        values = [x, labels, grad.float().contiguous(), MAKE, None, target]
        return run(values, tuple(settings), None, settings.options)[-1]

    def stacked() -> Any:
        (x32,) = wide(x)
        return (grad.float().unsqueeze(-1) * single(x32.new_ones(x.shape[0]), x32, MAKE)).to(x.dtype)

    return or_stacked(lambda: single(grad, x, target), stacked, grad)


@cache
def _function() -> Any:
    """Return the autograd function: made once, as its base class is torch's."""
    import torch

    class CrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Any, labels: Any, settings: Any, config: Any, inplace: bool
        ) -> tuple[Any, Any]:
            losses, lse = _forward(_operator, x, labels, settings, config)
            ctx.save_for_backward(x, labels)
            ctx.settings, ctx.inplace = settings, inplace
            ctx.mark_non_differentiable(lse)
            return losses, lse

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
            x, labels = ctx.saved_tensors
            traced = state.must_trace(grad)
            target = x if ctx.inplace and not traced else MAKE
            run = _operator.traced if traced else _operator
            return _gradient(run, x, labels, grad, ctx.settings, target), None, None, None, None

    return CrossEntropy


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of the registered operator needs."""
    x, labels, _, *numbers, _, names, _ = inputs
    ctx.save_for_backward(x, labels)
    ctx.settings, ctx.at = _Settings(*numbers), list(names).index("loss")


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    x, labels = ctx.saved_tensors
    dx = _gradient(_operator.traced, x, labels, grads[ctx.at], ctx.settings, MAKE)
    return (dx, *[None] * 8)


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register(_backward, _keep)
