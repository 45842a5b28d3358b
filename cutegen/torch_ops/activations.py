"""``activate`` on torch tensors, eager and under ``torch.compile``, with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError
from cutegen.families.activation.family import ACTIVATION, ACTIVATION_BACKWARD
from cutegen.families.pointwise import ACTIVATIONS
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, require_rows
from cutegen.torch_ops.stacked_gradients import or_stacked, wide

if TYPE_CHECKING:
    import torch

__all__ = ["activate", "prepare"]

_forward = DeclaredOperator(ACTIVATION, state.default_dispatcher, state.workspaces)
_backward = DeclaredOperator(ACTIVATION_BACKWARD, state.default_dispatcher, state.workspaces)


def activate(
    x: torch.Tensor, activation: str, *, out: torch.Tensor | None = None, config: AnyConfig = None
) -> torch.Tensor:
    """Return an activation of every element.

    ``torch.compile`` fuses an activation with what is around it; this is for eager programs, and for
    activations that stand alone.

    Arithmetic is in fp32 and the result is rounded once. Differentiable once; the gradient needs ``x``.

    Args:
        x: (..., n) in bf16, fp16 or fp32 on a GPU; rows are contiguous.
        activation: ``silu``, ``gelu`` (exact), ``gelu_tanh``, ``relu`` or ``relu_squared``.
        out: Where the result goes; shape and dtype of ``x``. May be ``x`` itself. Without gradients.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Returns:
        The result, in shape and dtype of ``x``.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    require_rows(x)
    if activation not in ACTIVATIONS:
        raise OperandError(f"activation={activation!r} is not valid; valid: {', '.join(ACTIVATIONS)}")
    values = [as_rows("x", x), MAKE if out is None else as_rows("out", out)]
    if x.numel() == 0:
        nothing: torch.Tensor = _forward.of_nothing(values, (activation,), (x,))[1]
        return out if out is not None else nothing.view(x.shape)
    chosen = as_config(config)
    run = _forward.traced if state.must_trace(x) or (out is None and x.requires_grad) else _forward
    found: torch.Tensor = run(values, (), chosen, (activation,))[1]
    return out if out is not None else found.view(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.activation = inputs[1]


def _gradient(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    (x,) = ctx.saved_tensors
    grad, activation = grads[0], ctx.activation

    def stacked() -> Any:
        (x32,) = wide(x)
        return (grad.float() * _times_slope(x32.new_ones(x.shape), x32, activation)).to(x.dtype)

    return or_stacked(lambda: _times_slope(grad, x, activation), stacked, grad), None, None, None


def _times_slope(grad: Any, x: Any, activation: str) -> Any:
    grad = grad if grad.stride(-1) == 1 and grad.stride(0) >= grad.shape[1] else grad.contiguous()
    return _backward.traced([grad, x, MAKE], (), None, (activation,))[2]


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
    _forward.register(_gradient, _keep)
    _backward.register()
