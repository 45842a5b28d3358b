"""How many rows the groups of a grouped GEMM are expected to have, and how many tiles those make."""

from __future__ import annotations

import math
from functools import lru_cache

from cutegen.families.declared import DeclaredProblem

__all__ = ["ALL", "expected_rows", "groups_with_rows", "is_masked", "mean_rows", "row_tiles", "total_rows"]

#: A mean of as many rows as there is room for.
ALL = "all"
#: Ends the names of families in which each group has a matrix, whose first rows are its own.
_MASKED = "_masked"


def is_masked(problem: DeclaredProblem) -> bool:
    """Return whether each group has a matrix, not a range of the rows of one."""
    return problem.family.endswith(_MASKED)


def mean_rows(problem: DeclaredProblem) -> int:
    """Return the mean number of rows of a group, rounded up."""
    if is_masked(problem):
        return int(problem.m) if problem.mean == ALL else min(int(problem.m), int(problem.mean))
    return -(-int(problem.m) // int(problem.g))


def total_rows(problem: DeclaredProblem) -> int:
    """Return the rows of all groups together."""
    return mean_rows(problem) * int(problem.g) if is_masked(problem) else int(problem.m)


@lru_cache(maxsize=4096)
def expected_rows(problem: DeclaredProblem) -> tuple[tuple[float, int], ...]:
    """Return pairs: how many rows a group is expected to have, and how many groups have about as many.

    With probabilities of 1 / rank, groups whose ranks are within a factor of 2 are taken together.
    """
    groups, rows = int(problem.g), total_rows(problem)
    if problem.tokens != "zipf":
        return ((rows / groups, groups),)
    parts = [(1 << step, min(groups + 1, 2 << step)) for step in range(groups.bit_length())]
    odds = [(sum(1 / rank for rank in range(*part)), part[1] - part[0]) for part in parts]
    all_odds = sum(share for share, _ in odds)
    return tuple((rows * share / all_odds / count, count) for share, count in odds)


def groups_with_rows(problem: DeclaredProblem) -> float:
    """Return how many groups are expected to have rows."""
    return sum(count * -math.expm1(-rows) for rows, count in expected_rows(problem))


def row_tiles(problem: DeclaredProblem, height: int) -> float:
    """Return how many tiles of ``height`` rows the groups are expected to have together."""
    return sum(count * _tiles_of_group(rows, height) for rows, count in expected_rows(problem))


def _tiles_of_group(rows: float, height: int) -> float:
    """Return the expected tiles of a group: the sum over t of how likely it has more than t tiles of rows.

    Rows that choose their group at random are about normally distributed, with the mean as variance.
    """
    spread = math.sqrt(2 * rows)
    at = max(1, int((rows - 3 * spread) / height))
    tiles = at - 1 - math.expm1(-rows)
    while at * height - rows < 3 * spread:
        tiles += math.erfc((at * height + 0.5 - rows) / spread) / 2
        at += 1
    return tiles
