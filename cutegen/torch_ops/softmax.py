"""``softmax`` on torch tensors, eager and under ``torch.compile``, with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutegen.families.softmax.family import SOFTMAX
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "softmax"]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[0])


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return ``y * (g - sum(g * y))`` of each row, by torch."""
    import torch

    (y,) = ctx.saved_tensors
    return torch.ops.aten._softmax_backward_data.default(grads[0], y, -1, y.dtype), None, None


_operator = DeclaredOperator(SOFTMAX, state.default_dispatcher, state.workspaces)


def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None, config: AnyConfig = None) -> torch.Tensor:
    """Return ``exp(x - max(x)) / sum(exp(x - max(x)))`` of each row.

    Arithmetic is in fp32 and the result is rounded once. The gradient is torch's own formula, which reads the
    rounded result. A row of nothing but -inf becomes NaN, as with torch.

    Args:
        x: (..., n) in bf16, fp16 or fp32 on a GPU; rows are contiguous, of up to 262144 elements.
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
    values = [as_rows("x", x), MAKE if out is None else as_rows("out", out)]
    if x.numel() == 0:
        nothing: torch.Tensor = _operator.of_nothing(values, (), (x,))[1]
        return out if out is not None else nothing.view(x.shape)
    chosen = as_config(config)
    run = _operator.traced if state.must_trace(x) or (out is None and x.requires_grad) else _operator
    y: torch.Tensor = run(values, (), chosen)[1]
    return out if out is not None else y.view(x.shape)


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register(_backward, _keep)
