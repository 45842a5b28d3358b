"""What to allocate and how often to launch: operand rotation and launches per graph. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutegen.family import Problem

__all__ = ["Rotation", "plan_copies", "plan_launches", "plan_replays", "plan_rotation"]

#: Operands in rotation span at least so many L2 caches, so that every launch finds it cold.
#: Source: NVIDIA's GEMM measurement guidelines ask for 2, QuACK uses 3.
_L2_SPAN = 3
#: One set this many times the L2 leaves too little of itself behind to matter.
_ALONE_SPAN = 8
_MOST_SETS = 512
#: Rotated operands take at most this share of the device memory.
_MEMORY_SHARE = 4
#: A graph runs about this long, so that the gap between replays (some microseconds) vanishes.
_GRAPH_US = 1000.0
_MOST_LAUNCHES = 200


@dataclass(frozen=True)
class Rotation:
    """How many sets of operands take turns.

    Attributes:
        sets: Number of sets.
        set_bytes: Bytes that one launch touches.
    """

    sets: int
    set_bytes: int

    @property
    def footprint_bytes(self) -> int:
        """Bytes that all sets span together."""
        return self.sets * self.set_bytes


def plan_rotation(problem: Problem, l2_bytes: int, memory_bytes: int) -> Rotation:
    """Return how many operand sets keep the L2 cache cold on a GPU of that size (both in bytes)."""
    size = problem.min_bytes
    if size >= _ALONE_SPAN * l2_bytes:
        return Rotation(1, size)
    wanted = max(2, -(-_L2_SPAN * l2_bytes // size))
    affordable = max(1, memory_bytes // _MEMORY_SHARE // size)
    return Rotation(min(wanted, affordable, _MOST_SETS), size)


def plan_copies(size: int, l2_bytes: int, least: int) -> int:
    """Return how many tensors of ``size`` bytes span the L2 cache as operands do, ``least`` or more of them.

    There are no more than launches in a graph: small tensors then stay in the cache, where reading them takes
    a fraction of a microsecond less.
    """
    return max(least, min(_MOST_LAUNCHES, -(-_L2_SPAN * l2_bytes // size)))


def plan_launches(time_us: float, sets: int) -> int:
    """Return the launches of one graph: about a millisecond, and every operand set equally often."""
    wanted = min(_MOST_LAUNCHES, math.ceil(_GRAPH_US / time_us))
    return -(-max(wanted, 1) // sets) * sets


def plan_replays(round_us: float, graph_us: float) -> int:
    """Return how many replays of a graph fill a round, at least one."""
    return max(1, math.ceil(round_us / graph_us - 0.5))
