"""What can be wrong with a protocol, in words."""

from __future__ import annotations

from dataclasses import dataclass

from tools.schedule.protocol import Place

__all__ = ["KINDS", "BrokenProtocolError", "Violation", "words"]

#: What can be wrong, by name.
KINDS = {
    "deadlock": "nobody can move and somebody has not finished",
    "overrun": "a barrier is in another phase than the one that an arrival or a wait is meant for",
    "stale_wait": "a wait passes because an older phase has the same parity",
    "remote_wait": "a warp waits for an mbarrier of another block (PTX ISA, mbarrier.try_wait: only its own)",
    "unfilled_read": "a buffer is read that does not hold what the reader wants",
    "overwrite": "a buffer is written while, or before, its contents are read",
    "early_release": "a buffer is given back by a warp that still reads it",
    "unfenced": "a TMA store reads what was not made visible to it",
    "dead_block": "a signal or a load goes to a block that has ended",
    "busy_exit": "a block ends, or frees memory, while that is still read",
    "lost": "all have finished and something that was loaded, computed or written is of no use to anybody",
    "leak": "all have finished and accumulators are allocated still",
    "uninitialised": "a barrier or an accumulator is used before it is there",
}


@dataclass(frozen=True)
class Violation:
    """What went wrong first.

    Attributes:
        kind: One of :data:`KINDS`.
        actor: Which warp, or which asynchronous unit.
        tile: The unit of work it was at, counted from 0; -1 outside of any.
        k_step: The k tile in it, -1 outside of any.
        text: The story.
    """

    kind: str
    actor: str
    tile: int
    k_step: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.actor}{words((self.tile, self.k_step))}: {self.text}"


class BrokenProtocolError(Exception):
    """A step that breaks the protocol; ``violation`` says how."""

    def __init__(self, violation: Violation) -> None:
        self.violation = violation
        super().__init__(str(violation))


def words(place: Place) -> str:
    """Return `` at tile 3, k step 5``."""
    tile, k = place
    return "" if tile < 0 else f" at tile {tile}" if k < 0 else f" at tile {tile}, k step {k}"
