"""``gated_gemm`` on torch tensors, eager and under ``torch.compile``, with gradients."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError
from cutegen.families.gated.family import ACTIVATIONS
from cutegen.families.gated_gemm.family import GATED_GEMM, WEIGHT_LAYOUTS
from cutegen.torch_ops import gates
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import MAKE, DeclaredOperator
from cutegen.torch_ops.gates import gate_gradients
from cutegen.torch_ops.gemm_gradient import linear_gradients
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    import torch

__all__ = ["gated_gemm", "prepare"]

_operator = DeclaredOperator(GATED_GEMM, state.default_dispatcher, state.workspaces)


def gated_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    activation: str = "silu",
    *,
    layout: str = "halves",
    out: torch.Tensor | None = None,
    return_pre: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``act(x @ w_gate.T) * (x @ w_up.T)`` from one kernel, of Hopper.

    Sums and the epilogue are in fp32 and every output is rounded once. Differentiable: what the gradients
    need beside ``x`` and ``w`` is what ``return_pre`` returns, so a call that autograd records writes it too.

    Args:
        x: (..., k) in bf16 or fp16 on a GPU; k is a multiple of 8 and rows start at multiples of 16 bytes.
        w: The rows of both weights, (2 * n, k), as ``x``.
        activation: ``silu``, ``gelu`` (exact), ``gelu_tanh`` or ``relu``.
        layout: Of ``w``: ``halves``, the gate's rows first, or ``interleaved``, with them in even rows.
        out: Where the result goes, (..., n) in the dtype of ``x``. A call with it has no gradients.
        return_pre: Also return ``x @ w.T``, (..., 2 * n) with columns as the rows of ``w``.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Returns:
        The result; with ``return_pre`` a tuple of it and ``x @ w.T``.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    require_rows(x)
    if activation not in ACTIVATIONS:
        raise OperandError(f"activation={activation!r} is not valid; valid: {', '.join(ACTIVATIONS)}")
    if layout not in WEIGHT_LAYOUTS:
        raise OperandError(f"layout={layout!r} is not valid; valid: {', '.join(WEIGHT_LAYOUTS)}")
    if getattr(w, "dim", lambda: 0)() != 2 or w.shape[0] % 2:
        raise OperandError(f"w has shape {tuple(getattr(w, 'shape', ()))}; it must be (2 * n, k)")
    leading, columns = x.shape[:-1], w.shape[0] // 2
    options, chosen = (activation, layout), None if config is None else as_config(config)
    rows, given = as_rows("x", x), MAKE if out is None else as_rows("out", out)
    records = out is None and state.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    values: list[Any] = [rows, w, given, MAKE if return_pre or records else None]
    if x.numel() == 0 and w.numel() != 0 and x.shape[-1] == w.shape[1]:
        *_, y, pre = _operator.of_nothing(values)
    elif state.must_trace(x, w):
        *_, y, pre = _operator.traced(values, (), chosen, options)
    elif records:
        y, pre = _function().apply(rows, w, chosen, options)
    else:
        *_, y, pre = _operator(values, (), chosen, options)
    y = out if out is not None else y.view((*leading, columns))
    return (y, pre.view((*leading, 2 * columns))) if return_pre else y


@cache
def _function() -> Any:
    """Return the autograd function: made once, as its base class is torch's."""
    import torch

    class GatedGemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, config: Any, options: Any) -> tuple[Any, Any]:
            *_, y, pre = _operator([x, w, MAKE, MAKE], (), config, options)
            ctx.save_for_backward(x, w, pre)
            ctx.set_materialize_grads(False)
            ctx.options = options
            return y, pre

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Any, of_pre: Any) -> tuple[Any, ...]:
            x, w, pre = ctx.saved_tensors
            found = _gradients(grad, of_pre, x, w, pre, ctx.options, ctx.needs_input_grad)
            return (*found, None, None)

    return GatedGemm


def _gradients(
    grad: Any, of_pre: Any, x: Any, w: Any, pre: Any, options: tuple[str, str], wanted: tuple[bool, ...]
) -> tuple[Any, Any]:
    """Return the gradients of the matrices ``x`` and ``w``: of the gate, by its kernel, then of the product.

    Args:
        grad: Of the result, None if nothing depends on it.
        of_pre: Of ``x @ w.T`` as an output, likewise.
        x: (m, k).
        w: (2 * n, k).
        pre: ``x @ w.T``.
        options: Activation and layout.
        wanted: Whether each gradient is; more is ignored.
    """
    if grad is not None:
        of_gate, _ = gate_gradients(grad, pre, None, options)
        of_pre = of_gate if of_pre is None else of_gate + of_pre
    if of_pre is None:
        return None, None
    return linear_gradients(state.gemm, of_pre, x, w, (wanted[0], wanted[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of the registered operator needs."""
    x, w, activation, layout, names, _ = inputs
    ctx.save_for_backward(x, w, dict(zip(names, output, strict=True)).get("pre"))
    ctx.options, ctx.names = (activation, layout), list(names)


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    x, w, pre = ctx.saved_tensors
    given = dict(zip(ctx.names, grads, strict=True))
    pre = state.gemm(x, w.mT) if pre is None else pre  # whoever called the operator did not ask for it
    found = _gradients(given.get("out"), given.get("pre"), x, w, pre, ctx.options, ctx.needs_input_grad)
    return (*found, *[None] * 4)


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
    gates.prepare()  # its backward kernel is the first half of ours
    _operator.register(_backward, _keep)
