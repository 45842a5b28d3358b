"""``gated`` and its names on torch tensors, eager and under ``torch.compile``, with gradients."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError
from cutegen.families.calls import require_tensor
from cutegen.families.gated.family import ACTIVATIONS, GATED, GATED_BACKWARD, LAYOUTS
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.autograd import autograd_records
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, refuse_transforms
from cutegen.torch_ops.stacked_gradients import or_stacked, wide

if TYPE_CHECKING:
    import torch

    from cutegen.space import Config

__all__ = ["gate_gradients", "gated", "geglu", "prepare", "reglu", "swiglu"]

_forward = DeclaredOperator(GATED, state.default_dispatcher, state.workspaces)
_backward = DeclaredOperator(GATED_BACKWARD, state.default_dispatcher, state.workspaces)


def gated(
    x: torch.Tensor,
    up: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    layout: str = "halves",
    out: torch.Tensor | None = None,
    config: AnyConfig = None,
) -> torch.Tensor:
    """Return ``act(gate) * up``, element by element.

    Arithmetic is in fp32 and the result is rounded once. Differentiable once; the gradient needs ``x`` and
    ``up``, from which the activation is computed again.

    Args:
        x: Gate and up in one tensor, (..., 2 * n) in bf16, fp16 or fp32 on a GPU; or the gate, (..., n), if
            ``up`` is given. Rows are contiguous.
        up: Shape and dtype of ``x``; None if ``x`` holds it.
        activation: ``silu``, ``gelu`` (exact), ``gelu_tanh`` or ``relu``.
        layout: How ``x`` holds both: ``halves``, the gate first, or ``interleaved``, with the gate in even
            columns. Of no meaning with ``up``.
        out: Where the result goes, (..., n) in the dtype of ``x``; may be ``x`` or ``up`` itself if ``up`` is
            given. A call with it has no gradients.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    plain = out is None and config is None
    if plain and (result := _known(x, up, activation, layout)) is not None:
        return result
    _require(x, up, activation, layout)
    columns = x.shape[-1] if up is not None else x.shape[-1] // 2
    chosen = as_config(config)
    options = (activation, "split" if up is not None else layout)
    rows, ups = as_rows("x" if up is None else "gate", x), None if up is None else as_rows("up", up)
    given = None if out is None else as_rows("out", out)
    if x.numel() == 0:
        values = _values(rows, ups, MAKE if given is None else given)
        found = _forward.of_nothing(values, options, (x, up))[-1]
    elif state.must_trace(x):
        found = _run(_forward.traced, rows, ups, given, chosen, options)
    elif out is None and autograd_records(x, up):
        found = _function().apply(rows, ups, chosen, options)
    else:
        found = _run(_forward, rows, ups, given, chosen, options)
        if plain and (plan := _forward.planned(_values(rows, ups, MAKE), options)) is not None:
            _forward.remember(_kind(x, up, activation, layout), plan)
    return found.view((*x.shape[:-1], columns)) if out is None else out


def swiglu(x: torch.Tensor, up: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Return ``silu(gate) * up``; arguments and errors as :func:`gated`."""
    return gated(x, up, "silu", **options)


def geglu(
    x: torch.Tensor, up: torch.Tensor | None = None, *, approximate: str = "none", **options: Any
) -> torch.Tensor:
    """Return ``gelu(gate) * up``; other arguments and errors as :func:`gated`.

    Args:
        x: As for :func:`gated`.
        up: As for :func:`gated`.
        approximate: ``none`` for the exact gelu, ``tanh`` for its approximation, as torch calls them.
        options: As for :func:`gated`.
    """
    if approximate not in ("none", "tanh"):
        raise OperandError(f"approximate={approximate!r} is not valid; valid: none, tanh")
    return gated(x, up, "gelu_tanh" if approximate == "tanh" else "gelu", **options)


def reglu(x: torch.Tensor, up: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Return ``relu(gate) * up``; arguments and errors as :func:`gated`."""
    return gated(x, up, "relu", **options)


def _require(x: Any, up: Any, activation: str, layout: str) -> None:
    require_tensor("x", x)
    refuse_transforms("x")
    if up is not None:
        require_tensor("up", up)
    if x.dim() == 0:
        raise OperandError("x has no dimensions; it must have rows, (..., 2n), or (..., n) with up")
    if activation not in ACTIVATIONS:
        raise OperandError(f"activation={activation!r} is not valid; valid: {', '.join(ACTIVATIONS)}")
    if up is None and layout not in LAYOUTS[:2]:
        raise OperandError(f"layout={layout!r} is not valid without up; valid: {', '.join(LAYOUTS[:2])}")
    if up is None and x.shape[-1] % 2:
        raise OperandError(f"x has shape {tuple(x.shape)}; without up its rows must have an even length")
    if up is not None and up.shape != x.shape:
        raise OperandError(f"up has shape {tuple(up.shape)}; it must have that of x, {tuple(x.shape)}")


def _run(
    run: Any, x: Any, up: Any, out: Any, config: Config | None, options: tuple[str, ...]
) -> torch.Tensor:
    """Return the result of matrices."""
    result: torch.Tensor = run(_values(x, up, MAKE if out is None else out), (), config, options)[-1]
    return result


def _values(x: Any, up: Any, out: Any) -> list[Any]:
    return [x, None, None, out] if up is None else [None, x, up, out]


def _kind(x: Any, up: Any, activation: str, layout: str) -> tuple[Any, ...]:
    other = None if up is None else (up.shape, up.stride(), up.dtype, up.data_ptr() & 15)
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, activation, layout, other


def _known(x: Any, up: Any, activation: str, layout: str) -> torch.Tensor | None:
    """Return the result where a call of the kind was answered before; the path of models, which must stay
    short."""
    import torch

    try:
        if state.must_trace(x) or (up is not None and state.must_trace(up)) or autograd_records(x, up):
            return None
        plan = _forward.fast.get(_kind(x, up, activation, layout))
        if plan is None:
            return None
        shape = x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2)
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        found = torch.empty((rows.shape[0], shape[-1]), dtype=x.dtype, device=x.device)
        if type(found) is not torch.Tensor:  # made by a mode
            return None
        if up is None:
            plan.launch(rows, found)
        else:
            plan.launch(rows, up if up.dim() == 2 else up.view(-1, up.shape[-1]), found)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # the long way tells why
    return found if rows is x else found.view(shape)


def gate_gradients(grad: Any, x: Any, up: Any, options: tuple[str, ...]) -> tuple[Any, Any]:
    """Return the gradients of the matrices that hold gate and up; the second is None if one holds both.

    Args:
        grad: Of the result, a matrix.
        x: The matrix of gate and up, or of the gate alone.
        up: The matrix of what is multiplied, None if ``x`` holds it.
        options: Activation and layout.
    """
    import torch

    if x.numel() == 0:
        return torch.empty_like(x), None if up is None else torch.empty_like(up)

    def stacked() -> tuple[Any, Any]:
        x32, up32 = wide(x, up)
        ones = x32.new_ones(x.shape if up is not None else (x.shape[0], x.shape[1] // 2))
        dx, dup = _by_kernel(ones, x32, up32, options)
        grads = _beside(grad.float(), options[1]) if up is None else grad.float()
        return (grads * dx).to(x.dtype), None if up is None else (grads * dup).to(x.dtype)

    return or_stacked(lambda: _by_kernel(grad, x, up, options), stacked, grad)


def _beside(grad: Any, layout: str) -> Any:
    """Return the gradient of products as that of each of their factors, which lie in one matrix."""
    import torch

    if layout == "halves":
        return torch.cat((grad, grad), -1)
    return torch.stack((grad, grad), -1).view(grad.shape[0], -1)


def _by_kernel(grad: Any, x: Any, up: Any, options: tuple[str, ...]) -> tuple[Any, Any]:
    grad = grad if grad.stride(-1) == 1 and grad.stride(0) >= grad.shape[1] else grad.contiguous()
    values = [grad, x, None, None, MAKE, None, None] if up is None else [grad, None, x, up, None, MAKE, MAKE]
    run = _backward.traced if state.must_trace(grad) else _backward
    *_, dx, dgate, dup = run(values, (), None, options)
    return (dx, None) if up is None else (dgate, dup)


@cache
def _function() -> Any:
    """Return the autograd function: made once, as its base class is torch's."""
    import torch

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, up: Any, config: Any, options: Any) -> torch.Tensor:
            ctx.save_for_backward(x, up)
            ctx.options = options
            return _run(_forward, x, up, None, config, options)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            x, up = ctx.saved_tensors
            return (*gate_gradients(grad, x, up, ctx.options), None, None)

    return Gated


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of the registered operator needs."""
    x, gate, up, activation, layout, *_ = inputs
    ctx.save_for_backward(gate if x is None else x, up)
    ctx.options = (activation, layout)


def _backward_of_operator(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    x, up = ctx.saved_tensors
    dx, dup = gate_gradients(grads[0], x, up, ctx.options)
    return (dx, None, None, *[None] * 4) if up is None else (None, dx, dup, *[None] * 4)


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    state.prepare()
    _forward.register(_backward_of_operator, _setup)
    _backward.register()
