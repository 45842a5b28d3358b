"""Small GEMMs with awkward sizes, on which every candidate is checked beside its problem."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cutegen.errors import ProblemError
from cutegen.families.gemm.problem import LAYOUTS, Problem, aligned_step

__all__ = ["tail_problems"]


def tail_problems(problem: Problem) -> tuple[Problem, ...]:
    """Return small problems of the same signature whose sizes fit no tile, smallest first.

    m and n leave remainders for every tile, k ends in 16 bytes. Later ones are larger, for configs that need
    more tiles or a deeper k (clusters, split k, more than one wave); take the first that is valid.
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
    """Yield sizes of the output; problems of few rows keep few rows."""
    m_contiguous, n_contiguous = (axis in "mn" for axis in LAYOUTS[problem.layout])
    few = max(1, problem.m - problem.m // 4)
    faces = ((few, n) for n in _TAIL_COLUMNS_OF_FEW_ROWS) if problem.m < 64 else _TAIL_FACES
    for m, n in faces:
        odd = problem.unaligned_out and not n_contiguous
        yield -(-m // 8) * 8 if m_contiguous else m, n - 1 if odd else n


def _resized(problem: Problem, m: int, n: int, k: int, batch: int) -> Problem | None:
    try:
        tail = problem.resized(m, n, k, batch)
    except ProblemError:
        return None
    return tail if tail.signature == problem.signature else None
