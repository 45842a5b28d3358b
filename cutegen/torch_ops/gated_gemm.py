"""``gated_gemm`` on torch tensors, eager and under ``torch.compile``, with gradients."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import CutegenError, OperandError
from cutegen.families.calls import require_tensor
from cutegen.families.gated.family import ACTIVATIONS
from cutegen.families.gated_gemm.family import GATED_GEMM, WEIGHT_LAYOUTS
from cutegen.families.registry import has_space
from cutegen.torch_ops import gates
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.autograd import autograd_records
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gates import gate_gradients
from cutegen.torch_ops.gemm_gradient import linear_gradients
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["gated_gemm", "has_kernels", "prepare"]

#: Strides of a tensor map are below so many bytes. Source: CUDA driver API, cuTensorMapEncodeTiled.
_FARTHEST = 2**40


class _Operator(DeclaredOperator):
    """The operator of the family, which sees that one tensor map can hold both weights."""

    def _answer(self, values: Sequence[Any], *more: Any) -> list[Any]:
        _, _, gate, up, *_ = values
        near = gate is None or gate.device != up.device  # which is refused with other words
        apart = 1 if near else abs(gate.data_ptr() - up.data_ptr())
        if not 0 < apart < _FARTHEST:
            raise OperandError(
                f"w and up lie {apart} bytes apart; they must be two tensors, less than 2**40 bytes apart"
            )
        return super()._answer(values, *more)


_operator = _Operator(GATED_GEMM, state.default_dispatcher, state.workspaces)


def gated_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    activation: str = "silu",
    *,
    up: torch.Tensor | None = None,
    layout: str = "halves",
    out: torch.Tensor | None = None,
    return_pre: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``act(x @ w_gate.T) * (x @ w_up.T)`` from one kernel, of Hopper.

    Accumulation and the epilogue are in fp32 and every output is rounded once. Differentiable once: what the
    gradients need beside ``x`` and ``w`` is what ``return_pre`` returns, so a call that autograd records
    writes it too.

    Args:
        x: (..., k) in bf16 or fp16 on a GPU; k is a multiple of 8 and rows start at multiples of 16 bytes.
        w: The rows of both weights, (2 * n, k), as ``x``; or those of the gate, (n, k), if ``up`` is given.
        up: Shape, strides and dtype of ``w``, less than 2**40 bytes from it: what gates multiply; None if
            ``w`` has it.
        activation: ``silu``, ``gelu`` (exact), ``gelu_tanh`` or ``relu``.
        layout: Of ``w``: ``halves``, the gate's rows first, or ``interleaved``, with them in even rows. Of no
            meaning with ``up``.
        out: Where the result goes, (..., n) in the dtype of ``x``. A call with it has no gradients.
        return_pre: Also return ``x @ w.T``, (..., 2 * n) with columns as the rows of ``w``, or those of gates
            first.
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
    _require_weights(w, up)
    leading, columns = x.shape[:-1], w.shape[0] // (2 if up is None else 1)
    options, chosen = (activation, layout if up is None else "split"), as_config(config)
    rows, given = as_rows("x", x), MAKE if out is None else as_rows("out", out)
    leaves = (x, w) if up is None else (x, w, up)
    records = out is None and autograd_records(*leaves)
    values = [*_operands(rows, w, up), given, MAKE if return_pre or records else None]
    if x.numel() == 0 and w.numel() != 0:
        *_, y, pre = _operator.of_nothing(values, options, leaves)
    elif state.must_trace(*leaves):
        *_, y, pre = _operator.traced(values, (), chosen, options)
    elif records:
        y, pre = _function().apply(rows, w, up, chosen, options)
    else:
        *_, y, pre = _operator(values, (), chosen, options)
    y = out if out is not None else y.view((*leading, columns))
    return (y, pre.view((*leading, 2 * columns))) if return_pre else y


def has_kernels(device: torch.device) -> bool:
    """Return whether there are kernels of the family for a GPU; True where it is not known which it is."""
    dispatcher = state.default_dispatcher()
    try:
        return has_space(GATED_GEMM.name, dispatcher.arch(device.index or 0))
    except CutegenError:
        return True  # fake tensors without a GPU


def _require_weights(w: Any, up: Any) -> None:
    require_tensor("w", w)
    shape = tuple(w.shape)
    if w.dim() != 2 or (up is None and shape[0] % 2):
        wanted = "(2 * n, k)" if up is None else "(n, k), as up is"
        raise OperandError(f"w has shape {shape}; it must be {wanted}")
    if up is not None:
        require_tensor("up", up)
    if up is not None and up.shape != w.shape:
        raise OperandError(f"up has shape {tuple(up.shape)}; it must have that of w, {shape}")
    if up is not None and up.stride() != w.stride():
        raise OperandError(f"up has strides {up.stride()}; it must have those of w, {w.stride()}")


def _operands(rows: Any, w: Any, up: Any) -> list[Any]:
    """Return the inputs of the operator in their order."""
    return [rows, w, None, None] if up is None else [rows, None, w, up]


@cache
def _function() -> Any:
    """Return the autograd function: made once, as its base class is torch's."""
    import torch

    class GatedGemm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any, up: Any, config: Any, options: Any) -> tuple[Any, Any]:
            *_, y, pre = _operator([*_operands(x, w, up), MAKE, MAKE], (), config, options)
            ctx.save_for_backward(x, w, up, pre)
            ctx.set_materialize_grads(False)
            ctx.options = options
            return y, pre

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Any, of_pre: Any) -> tuple[Any, ...]:
            x, w, up, pre = ctx.saved_tensors
            found = _gradients(grad, of_pre, x, w, up, pre, ctx.options, ctx.needs_input_grad)
            return (*found, None, None)

    return GatedGemm


def _gradients(
    grad: Any,
    of_pre: Any,
    x: Any,
    w: Any,
    up: Any,
    pre: Any,
    options: tuple[str, str],
    wanted: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Return the gradients of ``x``, ``w`` and ``up``: of the gate, by its kernel, then of the GEMMs.

    Args:
        grad: Of the result, None if nothing depends on it.
        of_pre: Of ``x @ w.T`` as an output, likewise.
        x: (m, k).
        w: (2 * n, k), or (n, k) with ``up``.
        up: (n, k), or None.
        pre: ``x @ w.T``, that of ``up`` beside it.
        options: Activation and layout.
        wanted: Whether each gradient is; more is ignored.
    """
    activation, layout = options
    if grad is None and of_pre is None:
        return None, None, None
    if up is None:
        of_gate, _ = (None, None) if grad is None else gate_gradients(grad, pre, None, (activation, layout))
        return (*linear_gradients(state.gemm, _sum(of_gate, of_pre), x, w, (wanted[0], wanted[1])), None)
    n = w.shape[0]
    parts = (None, None) if of_pre is None else (of_pre[:, :n], of_pre[:, n:])
    if grad is not None:
        found = gate_gradients(grad, pre[:, :n], pre[:, n:], (activation, "split"))
        parts = (_sum(found[0], parts[0]), _sum(found[1], parts[1]))
    dx, dw = linear_gradients(state.gemm, parts[0], x, w, (wanted[0], wanted[1]))
    more, dup = linear_gradients(state.gemm, parts[1], x, up, (wanted[0], wanted[2]))
    return None if dx is None else dx + more, dw, dup


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two gradients, of which one may be none."""
    return one if other is None else other if one is None else one + other


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of the registered operator needs."""
    x, w, gate, up, activation, layout, names, _ = inputs
    ctx.save_for_backward(x, gate if w is None else w, up, dict(zip(names, output, strict=True)).get("pre"))
    ctx.options, ctx.names = (activation, layout), list(names)


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    x, w, up, pre = ctx.saved_tensors
    given, (for_x, for_w, for_gate, for_up, *_) = (
        dict(zip(ctx.names, grads, strict=True)),
        ctx.needs_input_grad,
    )
    if pre is None:  # whoever called the operator did not ask for it
        products = [state.gemm(x, matrix.mT) for matrix in (w, up) if matrix is not None]
        pre = products[0] if up is None else _beside(products)
    wanted = (for_x, for_w or for_gate, for_up)
    dx, dw, dup = _gradients(given.get("out"), given.get("pre"), x, w, up, pre, ctx.options, wanted)
    return (dx, *((dw, None) if up is None else (None, dw)), dup, *[None] * 4)


def _beside(products: list[Any]) -> Any:
    import torch

    return torch.cat(products, -1)


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
    gates.prepare()  # its backward kernel is the first half of ours
    _operator.register(_backward, _keep)
