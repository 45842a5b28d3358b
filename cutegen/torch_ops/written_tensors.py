"""Tell autograd which tensors of the caller's a kernel wrote: it sees no write that goes by an address."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["note_written"]


def note_written(tensor: torch.Tensor) -> None:
    """Count a write to ``tensor``, so that no gradient is computed from a value that it no longer holds.

    ``backward()`` of what saved the tensor before then raises, as after an operation of torch in place.
    """
    import torch

    if not tensor.is_inference():  # these count no writes, and autograd saves none of them
        torch.autograd.graph.increment_version(tensor)
