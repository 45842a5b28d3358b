"""What the roles of a kernel do to each other, as data: barriers, buffers, and one list of steps per warp.

Only what synchronises is here; a kernel's arithmetic is one step that reads a stage. A cluster of thread
blocks is the whole world: blocks of different clusters share no barrier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

__all__ = [
    "Alloc",
    "Arrive",
    "Barrier",
    "Board",
    "Buffer",
    "Cluster",
    "Commit",
    "Expect",
    "Fence",
    "Finish",
    "Free",
    "Init",
    "Join",
    "Load",
    "Meet",
    "Multiply",
    "Part",
    "Place",
    "Program",
    "Read",
    "Script",
    "Step",
    "Store",
    "Wait",
    "Write",
]


@dataclass(frozen=True, slots=True)
class Wait:
    """Block until ``phase`` of an mbarrier is complete. The hardware compares the phase's parity only."""

    barrier: int
    phase: int


@dataclass(frozen=True, slots=True)
class Arrive:
    """Arrive once at each of some mbarriers, in ``phase`` of all, to give back the buffers ``frees``."""

    barriers: tuple[int, ...]
    phase: int
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Expect:
    """Arrive at an mbarrier and make its phase wait for so many bytes."""

    barrier: int
    phase: int
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a TMA load on its way: it fills bit ``part`` of a buffer and counts at a barrier."""

    buffer: int
    part: int
    item: int
    barrier: int
    phase: int
    size: int


@dataclass(frozen=True, slots=True)
class Load:
    """Start a TMA load; its parts arrive later, each on its own."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Start to read buffers, which must hold all of ``item``; ends with :class:`Finish`."""

    buffers: tuple[int, ...]
    item: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until this warp's reads of buffers are done."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Multiply:
    """Queue an MMA that reads buffers and, in order of the queue, adds to accumulators."""

    buffers: tuple[int, ...]
    item: int
    sums: tuple[int, ...]
    tile: int
    first: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """Queue an arrival that happens after all MMAs before it; accumulators ``fills`` are then complete."""

    barriers: tuple[int, ...]
    phase: int
    fills: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Meet:
    """Arrive at a named (or the cluster's) barrier without waiting."""

    barrier: int


@dataclass(frozen=True, slots=True)
class Join:
    """Block until the named barrier at which this warp arrived last has been completed."""

    barrier: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write this warp's share ``part`` of a store buffer."""

    buffer: int
    part: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Make this warp's share of a store buffer visible to TMA."""

    buffer: int
    part: int


@dataclass(frozen=True, slots=True)
class Store:
    """Start a TMA store that reads a store buffer until :class:`Finish`."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Init:
    """Initialise the mbarriers of this warp's block."""


@dataclass(frozen=True, slots=True)
class Alloc:
    """Allocate accumulators."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """Free accumulators."""

    buffers: tuple[int, ...]


Step: TypeAlias = (
    Wait
    | Arrive
    | Expect
    | Load
    | Read
    | Finish
    | Multiply
    | Commit
    | Meet
    | Join
    | Write
    | Fence
    | Store
    | Init
    | Alloc
    | Free
)
Place: TypeAlias = tuple[int, int]
"""Tile and k step of a step of a program, -1 where there is none."""


@dataclass(frozen=True)
class Barrier:
    """A barrier that is complete after ``count`` arrivals; ``block`` is -1 for the cluster's own."""

    name: str
    block: int
    count: int

    def __str__(self) -> str:
        return self.name if self.block < 0 else f"{self.name} of block {self.block}"


@dataclass(frozen=True)
class Buffer:
    """Memory of one block that is filled in parts (``parts`` has a bit for each) and read by some warps.

    Attributes:
        name: What reports call it.
        block: Whose it is.
        parts: Bits that make it full.
        readers: Warps that must have read an item before the next may be written.
        allocated: Whether it is there from the start (shared memory) or allocated (tensor memory).
    """

    name: str
    block: int
    parts: int
    readers: int
    allocated: bool = True

    def __str__(self) -> str:
        return f"{self.name} of block {self.block}"


@dataclass(frozen=True)
class Program:
    """The steps of one warp, each with the tile and the k step that it belongs to."""

    name: str
    block: int
    steps: tuple[Step, ...]
    places: tuple[Place, ...]

    def __str__(self) -> str:
        return f"{self.name} of block {self.block}"

    def edited(self, steps: Sequence[tuple[Step, Place]]) -> Program:
        """Return the same warp with other steps."""
        return replace(self, steps=tuple(s for s, _ in steps), places=tuple(p for _, p in steps))

    def pairs(self) -> Iterator[tuple[Step, Place]]:
        """Yield each step with its place."""
        return zip(self.steps, self.places, strict=True)


@dataclass(frozen=True)
class Cluster:
    """Everything that the blocks of one cluster share, and what their warps do."""

    blocks: int
    barriers: tuple[Barrier, ...]
    buffers: tuple[Buffer, ...]
    programs: tuple[Program, ...]


@dataclass
class Board:
    """A cluster in the making."""

    blocks: int
    barriers: list[Barrier] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)

    def ring(self, name: str, block: int, stages: int, count: int) -> tuple[int, ...]:
        """Add one mbarrier per stage."""
        return tuple(self.barrier(f"{name}[{stage}]", block, count) for stage in range(stages))

    def barrier(self, name: str, block: int, count: int) -> int:
        """Add a barrier and return its number."""
        self.barriers.append(Barrier(name, block, count))
        return len(self.barriers) - 1

    def buffer(self, name: str, block: int, parts: int, readers: int, allocated: bool = True) -> int:
        """Add a buffer of so many parts and return its number."""
        self.buffers.append(Buffer(name, block, (1 << parts) - 1, readers, allocated))
        return len(self.buffers) - 1

    def finished(self) -> Cluster:
        """Return the cluster."""
        return Cluster(self.blocks, tuple(self.barriers), tuple(self.buffers), tuple(self.programs))


class Script:
    """Writes the steps of one warp."""

    def __init__(self, board: Board, name: str, block: int) -> None:
        self._board = board
        self._name = name
        self._block = block
        self._steps: list[Step] = []
        self._places: list[Place] = []
        self._place: Place = (-1, -1)

    def at(self, tile: int, k: int = -1) -> None:
        """Say where the following steps belong."""
        self._place = (tile, k)

    def add(self, *steps: Step) -> None:
        """Append steps."""
        self._steps += steps
        self._places += [self._place] * len(steps)

    def sync(self, barrier: int) -> None:
        """Arrive at a named barrier and wait for the others."""
        self.add(Meet(barrier), Join(barrier))

    def end(self) -> None:
        """Hand the program to the board."""
        self._board.programs.append(Program(self._name, self._block, tuple(self._steps), tuple(self._places)))
