"""Whether autograd would record a call."""

from __future__ import annotations

from typing import Any

from cutegen.torch_ops import gemm as state

__all__ = ["autograd_records"]


def autograd_records(*tensors: Any) -> bool:
    """Return whether autograd records a call with these tensors, some of which may be None.

    For operators that are prepared: :func:`cutegen.torch_ops.gemm.prepare` has run.
    """
    return any(getattr(t, "requires_grad", False) for t in tensors) and state.is_grad_enabled()
