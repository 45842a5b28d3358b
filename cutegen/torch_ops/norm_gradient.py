"""The gradient of RMSNorm by torch: its own kernel where it has one, else a formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["rms_norm_gradients"]


def rms_norm_gradients(
    grad: torch.Tensor | None,
    of_sum: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    rstd: torch.Tensor | None,
    eps: float,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``h = x + residual`` and of the weight, in their dtypes.

    Args:
        grad: Of the result, (..., n).
        of_sum: Of ``h``, where it was an output.
        x: (..., n), or ``h`` itself without a residual.
        residual: Like ``x``.
        weight: (n,), or none.
        rstd: The factor of each row in fp32; computed again where it was not kept.
        eps: Added to the mean of the squares.
        wanted: Whether each gradient is.
    """
    import torch

    if grad is None:
        return of_sum, None
    h = x if residual is None else x + residual
    dh, dw = None, None
    twice = torch.is_grad_enabled()  # whoever differentiates again needs the factors as a function of h
    if h.is_cuda and rstd is not None and not twice and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        dh, dw = _by_kernel(grad, h, weight, rstd, [wanted[0], wanted[1] and weight is not None])
    else:
        dh, dw = _by_formula(grad, h, weight, None if twice else rstd, eps)
    if dh is not None and of_sum is not None:
        dh = dh + of_sum
    return dh if wanted[0] else None, dw if wanted[1] else None


def _by_kernel(grad: Any, h: Any, weight: Any, rstd: Any, wanted: list[bool]) -> tuple[Any, Any]:
    """Return the gradients by torch's kernel, which takes one dtype: in fp32 if the weight has another."""
    import torch

    dtypes = h.dtype, None if weight is None else weight.dtype
    if dtypes[1] not in (None, h.dtype):
        grad, h, weight = grad.float(), h.float(), weight.float()
    backward = torch.ops.aten._fused_rms_norm_backward.default
    shape = [h.shape[-1]]
    dh, dw = backward(grad.contiguous(), h, shape, rstd.unsqueeze(-1), weight, wanted)
    return (dh.to(dtypes[0]) if wanted[0] else None), (dw.to(dtypes[1]) if wanted[1] else None)


def _by_formula(grad: Any, h: Any, weight: Any, rstd: Any, eps: float) -> tuple[Any, Any]:
    """Return the gradients by torch's arithmetic in fp32, which may be differentiated again."""
    wide = h.float()
    factor = (wide.square().mean(-1) + eps).rsqrt() if rstd is None else rstd
    normed, g = wide * factor.unsqueeze(-1), grad.float()
    of_normed = g if weight is None else g * weight.float()
    dh = (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * factor.unsqueeze(-1)
    dw = None if weight is None else (g * normed).reshape(-1, h.shape[-1]).sum(0).to(weight.dtype)
    return dh.to(h.dtype), dw
