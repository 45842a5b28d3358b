"""Several gradients at once, as vectorised Jacobians and ``is_grads_batched=True`` ask for.

Tensors that stand for several have no memory that a kernel could read, and torch has rules for its own
operators only. So kernels compute what gradients are multiplied with, and torch multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cutegen.errors import CutegenError

__all__ = ["are_stacked", "or_stacked", "wide"]

_T = TypeVar("_T")


def are_stacked(*tensors: Any) -> bool:
    """Return whether a tensor stands for several gradients at once."""
    import torch

    asked = getattr(getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", None)
    return asked is not None and any(map(asked, tensors))


def or_stacked(run: Callable[[], _T], stacked: Callable[[], _T], *grads: Any) -> _T:
    """Return ``run()``, or ``stacked()`` where that fails because one of ``grads`` stands for several.

    So nothing is asked where gradients are single.
    """
    try:
        return run()
    except (CutegenError, RuntimeError):
        if not are_stacked(*grads):
            raise
    return stacked()


def wide(*tensors: Any) -> list[Any]:
    """Return tensors in fp32, so that a factor that a kernel computes from them is not rounded to less."""
    return [None if tensor is None else tensor.float() for tensor in tensors]
