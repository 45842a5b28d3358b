"""``rms_norm`` on torch tensors, eager and under ``torch.compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutegen.errors import OperandError
from cutegen.families.rmsnorm.family import RMSNORM
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.family_operator import MAKE, DeclaredOperator
from cutegen.torch_ops.gemm_plan import AnyConfig, as_config
from cutegen.torch_ops.rows import as_rows, require_rows

if TYPE_CHECKING:
    import torch

__all__ = ["prepare", "rms_norm"]

_operator = DeclaredOperator(RMSNORM, state.default_dispatcher, state.workspaces)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | bool = False,
    return_rstd: bool = False,
    config: AnyConfig = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return ``h / sqrt(mean(h^2) + eps) * weight`` of each row, where ``h = x + residual``.

    Arithmetic is in fp32 and every output is rounded once. There are no gradients.

    Args:
        x: (..., n) in bf16, fp16 or fp32 on a GPU; rows are contiguous.
        weight: (n,) in the dtype of ``x`` or in fp32; None for none.
        eps: Added to the mean of the squares.
        residual: Added to ``x`` first; shape and dtype of ``x``.
        out: Where the result goes; shape and dtype of ``x``. May be ``x`` itself.
        residual_out: Where ``h`` goes, in the dtype of ``x``: a tensor, which may be ``residual`` itself,
            or True for a new one.
        return_rstd: Also return ``1 / sqrt(mean(h^2) + eps)``, in fp32 with one value for each row.
        config: Overrides the choice of kernel: a complete config, or its text ``knob=value ...``.

    Returns:
        The result. If ``residual_out`` or ``return_rstd`` is given, a tuple of the result and of these.

    Raises:
        OperandError: A tensor cannot be an operand; the message names it and what would be valid.
        LaunchError: There is no kernel to launch, or it failed to.
        CutegenError: As :func:`cutegen.gemm`.
    """
    require_rows(x)
    shape = x.shape
    wants_sum = residual_out is not False
    if wants_sum and residual is None:
        raise OperandError("residual_out is given but residual is not; pass both")
    if x.numel() == 0:
        return _of_nothing(x, out, residual_out, return_rstd)
    values = [
        as_rows("x", x),
        weight,
        None if residual is None else as_rows("residual", residual),
        MAKE if out is None else as_rows("out", out),
        None if not wants_sum else MAKE if residual_out is True else as_rows("residual_out", residual_out),
        MAKE if return_rstd else None,
    ]
    chosen = None if config is None else as_config(config)
    run = _operator.traced if state.must_trace(x) else _operator
    _, _, _, y, total, rstd = run(values, (float(eps),), chosen)
    y = out if out is not None else y.view(shape)
    if not wants_sum and not return_rstd:
        return y
    found = [y]
    if wants_sum:
        found.append(total.view(shape) if residual_out is True else residual_out)
    if return_rstd:
        found.append(rstd.view(shape[:-1]))
    return tuple(found)


def _of_nothing(
    x: torch.Tensor, out: torch.Tensor | None, residual_out: torch.Tensor | bool, return_rstd: bool
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return empty results for an ``x`` without elements."""
    import torch

    y = torch.empty_like(x) if out is None else out
    found = [y]
    if residual_out is not False:
        found.append(torch.empty_like(x) if residual_out is True else residual_out)
    if return_rstd:
        found.append(torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
    return found[0] if len(found) == 1 else tuple(found)


def prepare() -> None:
    """Import torch and register the operator with it; again does nothing."""
    state.prepare()
    _operator.register()
