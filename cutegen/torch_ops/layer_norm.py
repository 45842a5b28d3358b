"""``layer_norm`` on torch tensors, eager and under ``torch.compile``, with its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutegen.families.calls import require_number
from cutegen.families.layernorm.family import LAYERNORM
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.autograd import autograd_records
from cutegen.torch_ops.family_operator import DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.operator_values import MAKE
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    import torch

__all__ = ["layer_norm", "prepare"]

_operator = DeclaredOperator(LAYERNORM, state.default_dispatcher, state.workspaces)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    return_stats: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` of each row.

    Experimental: its kernels passed all tests on an H200. ``docs/pytorch.md`` says which shapes were timed,
    and which of them are slower than what they were compared with.

    The variance is about the mean, divided by n, and never a difference of large numbers. Arithmetic is in
    fp32 and every output is rounded once. Differentiable, of second order too: the gradient is torch's own
    kernel, on means and factors that are kept.

    Args:
        x: (..., n) in bf16, fp16 or fp32 on a GPU; rows are contiguous, of up to 262144 elements.
        weight: (n,) in the dtype of ``x`` or in fp32; None for none.
        bias: As ``weight``.
        eps: Added to the variance.
        out: Where the result goes; shape and dtype of ``x``. May be ``x`` itself. Without gradients.
        return_stats: Also return the means and ``1 / sqrt(var(x) + eps)``, in fp32 with one value for each
            row. They have no gradients.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Returns:
        The result; with ``return_stats`` a tuple of the result, the means and the factors.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    require_rows(x)
    records = out is None and autograd_records(x, weight, bias)
    stats = MAKE if return_stats or records else None
    values = [as_rows("x", x), weight, bias, MAKE if out is None else as_rows("out", out), stats, stats]
    scalars = (require_number("eps", eps),)
    chosen = as_config(config)
    if x.numel() == 0:
        *_, y, mean, rstd = _operator.of_nothing(values, (), (x, weight, bias))
    else:
        run = _operator.traced if records or state.must_trace(x) else _operator
        *_, y, mean, rstd = run(values, scalars, chosen)
    y = out if out is not None else y.view(x.shape)
    if not return_stats:
        return y
    return y, mean.detach().view(x.shape[:-1]), rstd.detach().view(x.shape[:-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, eps, names, _ = inputs
    found = dict(zip(names, output, strict=True))
    ctx.save_for_backward(x, weight, bias, found.get("mean"), found.get("rstd"))
    ctx.eps, ctx.at = eps, list(names).index("out")


def _backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Return the gradients by torch; in fp32 if the weight is in another dtype than x."""
    import torch

    x, weight, bias, mean, rstd = ctx.saved_tensors
    wanted = [at < 3 and needed for at, needed in enumerate(ctx.needs_input_grad[:3])]
    dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
    wide = any(dtype not in (None, x.dtype) for dtype in dtypes)
    grad, x, weight, bias = (
        t.float() if wide and t is not None else t for t in (grads[ctx.at], x, weight, bias)
    )
    if mean is None or rstd is None:
        _, mean, rstd = torch.native_layer_norm(x, x.shape[1:], weight, bias, ctx.eps)
    backward = torch.ops.aten.native_layer_norm_backward.default
    shape = [x.shape[1]]
    # Its own derivative, for gradients of second order, takes both as what follows from x.
    mean, rstd = mean.detach().view(-1, 1), rstd.detach().view(-1, 1)
    found = backward(grad.contiguous(), x, shape, mean, rstd, weight, bias, wanted)
    cast = (None if g is None or not w else g.to(d) for g, w, d in zip(found, wanted, dtypes, strict=True))
    return (*cast, None, None, None)


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register(_backward, _keep)
