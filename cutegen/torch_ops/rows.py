"""Tensors of any rank as matrices of their rows."""

from __future__ import annotations

import math
from typing import Any

from cutegen.errors import OperandError
from cutegen.families.calls import require_tensor
from cutegen.torch_ops import gemm as state

__all__ = ["as_rows", "refuse_transforms", "require_rows"]


def require_rows(x: Any) -> None:
    """Do nothing if ``x`` is a tensor with rows.

    Raises:
        OperandError: It is none, has no dimensions, or a transform of ``torch.func`` is at work.
    """
    require_tensor("x", x)
    refuse_transforms("x")
    if x.dim() == 0:
        raise OperandError("x has no dimensions; it must have rows, (..., n)")


def refuse_transforms(name: str) -> None:
    """Do nothing unless a transform of ``torch.func`` is at work: only the GEMM has rules for them.

    Raises:
        OperandError: One is.
    """
    if state.is_transforming():
        raise OperandError(
            f"{name} is under a transform of torch.func, such as grad or vmap, for which only gemm, linear "
            "and scaled_gemm have rules; call this outside of it, or take gradients by autograd"
        )


def as_rows(name: str, tensor: Any) -> Any:
    """Return ``tensor`` as a matrix of its rows, without a copy; what is no tensor is returned as it is.

    Raises:
        OperandError: It has no dimensions, or its rows are not evenly spaced.
    """
    if not hasattr(tensor, "stride") or tensor.dim() == 2:
        return tensor
    if tensor.dim() == 0:
        raise OperandError(f"{name} has no dimensions; it must have rows, (..., n)")
    if tensor.shape[-1] == 0:
        return tensor.reshape(math.prod(tensor.shape[:-1]), 0)
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise OperandError(
            f"{name} has strides {tuple(tensor.stride())}, under which its rows are not evenly spaced; "
            f"pass {name}.contiguous()"
        ) from error
