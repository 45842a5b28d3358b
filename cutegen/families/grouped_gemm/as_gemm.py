"""A grouped GEMM as the batched GEMM of about the same tiles, which rules and performance model know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.space import Config, Value

__all__ = [
    "ALL",
    "activation_of",
    "as_gemm",
    "expected_rows",
    "gemm_of",
    "has_factors",
    "is_masked",
    "mean_rows",
    "row_tiles",
    "uncut",
    "whole",
]

#: A mean of as many rows as there is room for.
ALL = "all"
#: Ends the names of families in which each group has a matrix, whose first rows are its own.
_MASKED = "_masked"
#: Groups of fewer rows than this in the mean have tiles for so many square roots of it more. Source: times of
#: 50 untuned problems and 8 kernels each on an H200.
_SMALL, _SMALL_MARGIN = 64, 2
#: Knobs of the GEMM that a grouped one does not have.
_UNCUT: Mapping[str, Value] = {"stream_k": False, "reduction": "fixed", "split_k": 1}


def is_masked(problem: DeclaredProblem) -> bool:
    """Return whether each group has a matrix, not a range of the rows of one."""
    return problem.family.endswith(_MASKED)


def has_factors(problem: DeclaredProblem) -> bool:
    """Return whether blocks of both operands have factors."""
    return problem.family.endswith("_blocks")


def activation_of(problem: DeclaredProblem) -> str:
    """Return the activation of gated products, empty for plain ones."""
    return str(dict(problem.options).get("activation", ""))


def mean_rows(problem: DeclaredProblem) -> int:
    """Return the rows of a group in the mean, rounded up."""
    if is_masked(problem):
        return int(problem.m) if problem.mean == ALL else min(int(problem.m), int(problem.mean))
    return -(-int(problem.m) // int(problem.g))


@lru_cache(maxsize=4096)
def expected_rows(problem: DeclaredProblem) -> tuple[tuple[float, int], ...]:
    """Return how many rows groups are expected to have, and how many groups have about as many.

    With probabilities of 1 / rank, groups whose ranks are within a factor of 2 are taken together.
    """
    groups = int(problem.g)
    rows = mean_rows(problem) * groups if is_masked(problem) else int(problem.m)
    if problem.tokens != "zipf":
        return ((rows / groups, groups),)
    parts = [(1 << step, min(groups + 1, 2 << step)) for step in range(groups.bit_length())]
    odds = [(sum(1 / rank for rank in range(*part)), part[1] - part[0]) for part in parts]
    whole_odds = sum(share for share, _ in odds)
    return tuple((rows * share / whole_odds / count, count) for share, count in odds)


def _with_rows(problem: DeclaredProblem) -> float:
    """Return how many groups are expected to have rows."""
    return sum(count * -math.expm1(-rows) for rows, count in expected_rows(problem))


def row_tiles(problem: DeclaredProblem, height: int) -> float:
    """Return how many tiles of so many rows the groups are expected to have together."""
    return sum(count * _tiles_of_group(rows, height) for rows, count in expected_rows(problem))


def _tiles_of_group(rows: float, height: int) -> float:
    """Return the expected tiles of a group: how likely it has some rows, more than one tile's, than two's...

    Those that choose at random are about normally distributed, with the mean as variance.
    """
    spread = math.sqrt(2 * rows)
    at = max(1, int((rows - 3 * spread) / height))
    tiles = at - 1 - math.expm1(-rows)
    while at * height - rows < 3 * spread:
        tiles += math.erfc((at * height + 0.5 - rows) / spread) / 2
        at += 1
    return tiles


@lru_cache(maxsize=4096)
def as_gemm(problem: DeclaredProblem) -> Problem:
    """Return the GEMM of as many groups as have rows, with as many rows each as few exceed.

    Groups of rows that choose at random have about the square root of the mean more or less than the mean. Of
    small groups hardly any should need a second tile, for it waits for the first.
    """
    groups = max(1, round(_with_rows(problem)))
    total = mean_rows(problem) * int(problem.g) if is_masked(problem) else int(problem.m)
    mean = total / groups
    margin = math.sqrt(mean) * (_SMALL_MARGIN if mean < _SMALL else 1)
    rows = math.ceil(mean + margin) if problem.g > 1 else total
    return gemm_of(problem, min(rows, problem.m), groups)


def gemm_of(problem: DeclaredProblem, rows: int, groups: int) -> Problem:
    """Return the GEMM of some rows of each of so many groups; k is rounded up to what a GEMM takes.

    Gated products cost what the plain ones cost with all columns of their matrices.
    """
    k, dtype, activation = -(-problem.k // 8) * 8, str(problem.dtype), activation_of(problem)
    if has_factors(problem):
        out, unaligned = str(problem.out), problem.unaligned
        return Problem(rows, problem.n, k, groups, dtype, out, unaligned_out=unaligned, promote=True)
    n, epilogue = (2 * problem.n if activation else problem.n), Epilogue(activation=activation)
    return Problem(rows, n, k, groups, ab_dtype=dtype, unaligned_out=problem.unaligned, epilogue=epilogue)


def whole(config: Mapping[str, Value]) -> Config:
    """Return a config as the GEMM has it."""
    return Config({**config, **_UNCUT})


def uncut(config: Mapping[str, Value]) -> Config:
    """Return a config of the GEMM as a grouped one has it."""
    return Config({knob: value for knob, value in config.items() if knob not in _UNCUT})
