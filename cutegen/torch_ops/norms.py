"""``rms_norm`` on torch tensors, eager and under ``torch.compile``, with its gradient."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.dtypes import short_dtype
from cutegen.errors import OperandError
from cutegen.families.calls import require_number
from cutegen.families.rmsnorm.family import RMSNORM
from cutegen.families.rmsnorm_quantized.family import RMSNORM_QUANTIZED
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.autograd import autograd_records
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.norm_gradient import rms_norm_gradients
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "rms_norm"]

_operator = DeclaredOperator(RMSNORM, state.default_dispatcher, state.workspaces)
_quantized = DeclaredOperator(RMSNORM_QUANTIZED, state.default_dispatcher, state.workspaces)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | bool = False,
    return_rstd: bool = False,
    quantize: str | torch.dtype | None = None,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return ``h / sqrt(mean(h^2) + eps) * weight`` of each row, where ``h = x + residual``.

    Arithmetic is in fp32 and every output is rounded once. Differentiable, of second order too, but for calls
    with ``out``, a tensor as ``residual_out``, or ``quantize``. The gradient is torch's own kernel on the
    factors that are kept, where torch has one; elsewhere a formula in fp32.

    Args:
        x: (..., n) in bf16, fp16 or fp32 on a GPU; rows are contiguous.
        weight: (n,) in the dtype of ``x`` or in fp32; None for none.
        eps: Added to the mean of the squares.
        residual: Added to ``x`` first; shape and dtype of ``x``.
        out: Where the result goes; shape and dtype of ``x``. May be ``x`` itself, unless it is quantised.
        residual_out: Where ``h`` goes, in the dtype of ``x``: a tensor, which may be ``residual`` itself,
            or True for a new one.
        return_rstd: Also return ``1 / sqrt(mean(h^2) + eps)``, in fp32 with one value for each row. It has
            no gradients.
        quantize: ``e4m3`` (or torch's dtype) for a result in 8 bits: each row divided by its scale,
            ``max |row| / 448``, which is returned too, in fp32 with one value for each row. Without
            ``return_rstd``, and with ``out`` of that dtype.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Returns:
        The result. With ``quantize``, ``residual_out`` or ``return_rstd`` a tuple of the result, the scales,
        and these.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    plain = weight is not None and residual is None and out is None and residual_out is False
    plain = plain and quantize is None and config is None and not return_rstd
    if plain and (quick := _known(x, weight, eps)) is not None:
        return quick
    require_rows(x)
    shape = x.shape
    wants_sum = residual_out is not False
    if wants_sum and residual is None:
        raise OperandError("residual_out is given but residual is not; pass both")
    if quantize is not None:
        _require_quantized(quantize, return_rstd)
    scalar, chosen = require_number("eps", eps), as_config(config)
    records = autograd_records(x, weight, residual)
    if records:
        name = "x" if x.requires_grad else "weight" if autograd_records(weight) else "residual"
        _require_differentiable(name, out, residual_out, quantize)
    traced = state.must_trace(x)
    if records and not traced and x.numel():
        y, total, rstd = _function().apply(x, weight, residual, scalar, wants_sum, chosen)
        return _gathered(y, total if wants_sum else None, rstd if return_rstd else None)
    values: list[Any] = [
        as_rows("x", x),
        weight,
        None if residual is None else as_rows("residual", residual),
        MAKE if out is None else as_rows("out", out),
        None if not wants_sum else MAKE if residual_out is True else as_rows("residual_out", residual_out),
        MAKE if return_rstd or records else None,
    ]
    y, scale, total, rstd = _run(values, scalar, chosen, quantize is not None, traced)
    if plain and not traced and (plan := _operator.planned(values, ())) is not None:
        _operator.remember(_kind(x, weight), plan)
    y = out if out is not None else y.view(shape)
    sums = total.view(shape) if residual_out is True else residual_out if wants_sum else None
    factors = rstd.detach().view(shape[:-1]) if return_rstd else None
    return _gathered(y, None if scale is None else scale.view(shape[:-1]), sums, factors)


def _gathered(y: Any, *others: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the result, in a tuple with others where there are some."""
    found = [y, *(each for each in others if each is not None)]
    return y if len(found) == 1 else tuple(found)


def _run(
    values: list[Any], eps: float, config: Any, quantized: bool, traced: bool
) -> tuple[Any, Any, Any, Any]:
    """Return the result, the scales, the sums and ``rstd``, as rows; None for what is not asked for."""
    operator = _quantized if quantized else _operator
    run = operator.traced if traced else operator
    given = [*values[:4], MAKE, values[4]] if quantized else values
    if values[0].numel() == 0:
        found = operator.of_nothing(given, (), values[:3])
    else:
        found = run(given, (eps,), config)
    if quantized:
        _, _, _, y, scale, total = found
        return y, scale, total, None
    _, _, _, y, total, rstd = found
    return y, None, total, rstd


def _kind(x: Any, weight: Any) -> tuple[Any, ...]:
    at = x.data_ptr() & 15, weight.data_ptr() & 15
    return x.shape, x.stride(), x.dtype, weight.dtype, weight.stride(), x.get_device(), at


def _known(x: Any, weight: Any, eps: float) -> torch.Tensor | None:
    """Return the norm where a call of the kind was answered before; the path of models, which must stay
    short."""
    import torch

    if state.must_trace(x, weight) or autograd_records(x, weight):
        return None
    try:
        plan = _operator.fast.get(_kind(x, weight))
        if plan is None:
            return None
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if type(y) is not torch.Tensor:  # made by a mode
            return None
        plan.launch(rows, weight, y, float(eps))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # the long way tells why
    return y if rows is x else y.view(x.shape)


def _require_differentiable(
    leaf: str, out: torch.Tensor | None, residual_out: torch.Tensor | bool, quantize: str | torch.dtype | None
) -> None:
    """Raise if a call that autograd would have to record has no gradients."""
    given = {"out=": out is not None, "residual_out=": not isinstance(residual_out, bool)}
    given["quantize="] = quantize is not None
    for name in (name for name, is_given in given.items() if is_given):
        raise OperandError(
            f"{leaf} requires grad, but a call with {name} has no gradients; pass {leaf}.detach() or call "
            "under torch.no_grad()"
        )


def _require_quantized(quantize: str | torch.dtype, return_rstd: bool) -> None:
    if short_dtype(str(quantize)) != "e4m3":
        raise OperandError(f"quantize={quantize!r} is not valid; valid: e4m3, torch.float8_e4m3fn")
    if return_rstd:
        raise OperandError("return_rstd is not written beside quantize; leave out one of them")


@cache
def _function() -> Any:
    """Return the autograd function: made once, as its base class is torch's."""
    import torch

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Any, weight: Any, residual: Any, eps: float, wants_sum: bool, config: Any
        ) -> tuple[Any, ...]:
            rows = None if residual is None else as_rows("residual", residual)
            values = [as_rows("x", x), weight, rows, MAKE, MAKE if wants_sum else None, MAKE]
            *_, y, total, rstd = _operator(values, (eps,), config)
            y, total = y.view(x.shape), total.view(x.shape) if wants_sum else None
            rstd = rstd.view(x.shape[:-1])
            ctx.save_for_backward(*((total, None) if wants_sum else (x, residual)), weight, rstd)
            ctx.mark_non_differentiable(rstd)
            ctx.eps = eps
            return y, total, rstd

        @staticmethod
        def backward(ctx: Any, grad: Any, of_sum: Any, _: Any) -> tuple[Any, ...]:
            x, residual, weight, rstd = ctx.saved_tensors
            for_x, for_weight, for_residual, *_ = ctx.needs_input_grad
            wanted = for_x or for_residual, for_weight
            dh, dw = rms_norm_gradients(grad, of_sum, x, residual, weight, rstd, ctx.eps, wanted)
            return dh if for_x else None, dw, dh if for_residual else None, None, None, None

    return RmsNorm


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient of the registered operator needs."""
    x, weight, residual, eps, names, _ = inputs
    found = dict(zip(names, output, strict=True))
    total = found.get("residual_out")
    ctx.save_for_backward(*((x, residual) if total is None else (total, None)), weight, found.get("rstd"))
    ctx.eps, ctx.names = eps, list(names)


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the registered operator's arguments."""
    x, residual, weight, rstd = ctx.saved_tensors
    given = dict(zip(ctx.names, grads, strict=True))
    for_x, for_weight, for_residual, *_ = ctx.needs_input_grad
    wanted = for_x or for_residual, for_weight
    of_sum = given.get("residual_out")
    dh, dw = rms_norm_gradients(given["out"], of_sum, x, residual, weight, rstd, ctx.eps, wanted)
    return dh if for_x else None, dw, dh if for_residual else None, None, None, None


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register(_backward, _keep)
    _quantized.register()
