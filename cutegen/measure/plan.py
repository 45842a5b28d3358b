"""What to allocate and how often to launch: operand rotation, launches per graph, tail problems. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cutegen.errors import ProblemError
from cutegen.problem import LAYOUTS, Problem, aligned_step

__all__ = ["Rotation", "plan_launches", "plan_replays", "plan_rotation", "tail_problems"]

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


def plan_launches(time_us: float, sets: int) -> int:
    """Return the launches of one graph: about a millisecond, and every operand set equally often."""
    wanted = min(_MOST_LAUNCHES, math.ceil(_GRAPH_US / time_us))
    return -(-max(wanted, 1) // sets) * sets


def plan_replays(round_us: float, graph_us: float) -> int:
    """Return how many replays of a graph fill a round, at least one."""
    return max(1, math.ceil(round_us / graph_us - 0.5))


def tail_problems(problem: Problem) -> tuple[Problem, ...]:
    """Return small problems of the same signature whose extents fit no tile, smallest first.

    m and n leave remainders for every tile, k ends in 16 bytes. Later ones are larger, for configs that need
    more tiles or a deeper k (clusters, split k, more than one wave); take the first that is legal.
    """
    step = aligned_step(problem.ab_dtype)
    batch = 2 if problem.batch > 1 else 1
    sizes = [(m, n, blocks * 64 + step) for blocks in _TAIL_BLOCKS for m, n in _tail_faces(problem)]
    tails = (_resized(problem, m, n, k, batch) for m, n, k in sorted(sizes, key=math.prod))
    return tuple(dict.fromkeys(tail for tail in tails if tail is not None))


#: Whole blocks of 64 along k, before the remainder.
_TAIL_BLOCKS = (3, 17, 65, 132, 264)
_TAIL_FACES = ((333, 392), (1101, 1192), (2765, 1672), (2765, 2232), (3021, 3016), (2765, 4520))
_TAIL_COLUMNS_OF_FEW_ROWS = (392, 1192, 20008, 40008)


def _tail_faces(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield extents of the output; problems of few rows keep few rows."""
    m_contiguous, n_contiguous = (axis in "mn" for axis in LAYOUTS[problem.layout])
    few = max(1, problem.m - problem.m // 4)
    faces = ((few, n) for n in _TAIL_COLUMNS_OF_FEW_ROWS) if problem.m < 64 else _TAIL_FACES
    for m, n in faces:
        odd = problem.unaligned_out and not n_contiguous
        yield -(-m // 8) * 8 if m_contiguous else m, n - 1 if odd else n


def _resized(problem: Problem, m: int, n: int, k: int, batch: int) -> Problem | None:
    try:
        tail = problem.with_extents(m, n, k, batch)
    except ProblemError:
        return None
    return tail if tail.signature == problem.signature else None
