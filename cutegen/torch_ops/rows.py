"""Tensors of any rank as matrices of their rows."""

from __future__ import annotations

from typing import Any

from cutegen.errors import OperandError
from cutegen.families.calls import require_tensor

__all__ = ["as_rows", "require_rows"]


def require_rows(x: Any) -> None:
    """Do nothing if ``x`` is a tensor with rows.

    Raises:
        OperandError: It is none, or has no dimensions.
    """
    require_tensor("x", x)
    if x.dim() == 0:
        raise OperandError("x has no dimensions; it must have rows, (..., n)")


def as_rows(name: str, tensor: Any) -> Any:
    """Return ``tensor`` as a matrix of its rows, without a copy; what is no tensor is returned as it is.

    Raises:
        OperandError: It has no dimensions, or its rows are not evenly spaced.
    """
    if not hasattr(tensor, "stride") or tensor.dim() == 2:
        return tensor
    if tensor.dim() == 0:
        raise OperandError(f"{name} has no dimensions; it must have rows, (..., n)")
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise OperandError(
            f"{name} has strides {tuple(tensor.stride())}, under which its rows are not evenly spaced; "
            f"pass {name}.contiguous()"
        ) from error
