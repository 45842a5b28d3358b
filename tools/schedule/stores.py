"""Store buffers: warps write one together, and one of them starts the TMA store that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.schedule.protocol import Board, Fence, Finish, Script, Store, Write

__all__ = ["RING", "TAIL", "Stores", "StoringWarp"]

RING, TAIL = "ring", "tail"
"""A piece takes the next buffer of the ring, or the single buffer of a narrower last piece."""


@dataclass(frozen=True)
class Stores:
    """The store buffers that some warps share.

    Attributes:
        ring: Buffers used in turn.
        narrow: The buffer of the last, narrower piece; -1 if there is none.
        pieces: What is stored of one tile, in order: :data:`RING` or :data:`TAIL`; empty without buffers.
        barrier: A named barrier of these warps.
    """

    ring: tuple[int, ...]
    narrow: int
    pieces: tuple[str, ...]
    barrier: int

    @classmethod
    def make(
        cls, board: Board, owner: str, block: int, count: int, pieces: Sequence[str], warps: int
    ) -> Stores:
        """Add the barrier of some warps to the board, and their buffers if they store through any."""
        barrier = board.barrier(f"barrier of {owner}", block, warps)
        if not pieces:
            return cls((), -1, (), barrier)
        ring = tuple(board.buffer(f"store buffer {i} of {owner}", block, warps, 0) for i in range(count))
        narrow = board.buffer(f"narrow store buffer of {owner}", block, warps, 0) if TAIL in pieces else -1
        return cls(ring, narrow, tuple(pieces), barrier)


class StoringWarp:
    """Writes the steps in which one warp stores; warp 0 starts the stores and waits for them."""

    def __init__(self, script: Script, stores: Stores, warp: int) -> None:
        self._script = script
        self._stores = stores
        self._warp = warp
        self._next = 0
        self._flying: list[int] = []

    def piece(self, piece: str) -> None:
        """Store one piece: when its buffer is written, at most one store per other buffer is on its way."""
        script, ring, share = self._script, self._stores.ring, 1 << self._warp
        buffer = self._stores.narrow
        if piece == RING:
            buffer = ring[self._next]
            self._next = (self._next + 1) % len(ring)
        if self._warp == 0:
            self._wait_for_all_but(len(ring) - 1)
        script.sync(self._stores.barrier)
        script.add(Write(buffer, share), Fence(buffer, share))
        script.sync(self._stores.barrier)
        if self._warp == 0:
            script.add(Store(buffer))
            self._flying.append(buffer)

    def tile(self) -> None:
        """Store all pieces of a tile."""
        for piece in self._stores.pieces:
            self.piece(piece)

    def end(self) -> None:
        """Wait for all stores, so that the buffers outlive them."""
        if self._warp == 0:
            self._wait_for_all_but(0)

    def _wait_for_all_but(self, latest: int) -> None:
        count = max(0, len(self._flying) - latest)
        ended, self._flying = self._flying[:count], self._flying[count:]
        if ended:
            self._script.add(Finish(tuple(ended)))
