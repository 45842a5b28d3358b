"""The kernel that runs before each launch of a context; its own time is measured and subtracted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cutegen.measure.poisoned_output import as_integers
from cutegen.measure.sizing import plan_copies

if TYPE_CHECKING:
    import torch

__all__ = ["Predecessor", "add_nothing"]


def add_nothing(tensor: torch.Tensor) -> Callable[[], None]:
    """Return a call that adds 0 to a tensor of integers, by a kernel of torch."""

    def call() -> None:
        tensor.add_(0)

    return call


class Predecessor:
    """Reads and writes each of ``written`` in turn, element by element, without changing a bit.

    The tensors are taken as integers, to which 0 is added: that works for every dtype, whatever its values.

    Args:
        written: What the kernel before a launch writes, one tensor for each set of operands.
        l2_bytes: Size of the L2 cache.
        rewrite: Makes the call that reads and writes one of them.
    """

    def __init__(
        self,
        written: Sequence[torch.Tensor],
        l2_bytes: int,
        rewrite: Callable[[torch.Tensor], Callable[[], None]] = add_nothing,
    ) -> None:
        self._rewrite = rewrite
        self._written = [as_integers(tensor) for tensor in written]
        self._l2_bytes = l2_bytes
        self._copies: list[torch.Tensor] = []

    @classmethod
    def of_nothing(cls, device: torch.device) -> Predecessor:
        """Return the predecessor of the context ``alone``, which touches one element of no operand."""
        import torch

        return cls([torch.zeros(1, dtype=torch.int32, device=device)], 0)

    def calls(self, count: int) -> list[Callable[[], None]]:
        """Return what runs before each of ``count`` launches over operands in rotation."""
        return [self._rewrite(self._written[i % len(self._written)]) for i in range(count)]

    def own_calls(self, count: int) -> list[Callable[[], None]]:
        """Return ``count`` calls to be timed on their own.

        They rotate through tensors that span the L2 cache, since between two launches the other operands
        have evicted what the kernel reads.
        """
        if not self._copies:
            first = self._written[0]
            copies = plan_copies(first.numel() * first.element_size(), self._l2_bytes, len(self._written))
            self._copies = list(first.new_zeros((copies, first.numel())))
        return [self._rewrite(self._copies[i % len(self._copies)]) for i in range(count)]
