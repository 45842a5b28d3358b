"""Tell autograd which tensors of the caller's a kernel wrote: it sees no write that goes by an address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["write_counter"]


@cache
def write_counter() -> Callable[[Sequence[torch.Tensor]], None]:
    """Return what counts a write to each tensor of a sequence, so that no gradient comes from what it held.

    ``backward()`` of what saved a tensor before then raises, as after an operation of torch in place.
    Tensors of inference mode count no writes, and autograd saves none of them.
    """
    import torch

    count: Callable[[Sequence[torch.Tensor]], None] = torch._C._increment_version
    with torch.inference_mode():
        unseen = torch.empty(0, dtype=torch.float32, device="cpu")
    try:  # torch's own function takes twice as long, on a path of microseconds
        count((unseen,))
    except (RuntimeError, TypeError):
        return _one_by_one
    return count


def _one_by_one(tensors: Sequence[torch.Tensor]) -> None:
    import torch

    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
