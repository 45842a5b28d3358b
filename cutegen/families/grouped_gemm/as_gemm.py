"""A grouped GEMM as the batched GEMM of about the same tiles, which rules and performance model know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Value

__all__ = ["ALL", "MASKED", "RANGES", "as_gemm", "gemm_of", "mean_rows", "uncut", "whole"]

#: Names of the families: ranges of the rows of one matrix, and the first rows of a matrix for each group.
RANGES, MASKED = "grouped_gemm", "grouped_gemm_masked"
#: A mean of as many rows as there is room for.
ALL = "all"
#: Knobs of the GEMM that a grouped one does not have.
_UNCUT: Mapping[str, Value] = {"stream_k": False, "reduction": "fixed", "split_k": 1}


def mean_rows(problem: DeclaredProblem) -> int:
    """Return the rows of a group in the mean, rounded up."""
    if problem.family == MASKED:
        return int(problem.m) if problem.mean == ALL else min(int(problem.m), int(problem.mean))
    return -(-int(problem.m) // int(problem.g))


@lru_cache(maxsize=4096)
def as_gemm(problem: DeclaredProblem) -> Problem:
    """Return the GEMM of as many groups, with as many rows each as most do not exceed by much.

    Groups of rows that choose at random have about the square root of the mean more or less than the mean.
    """
    mean = mean_rows(problem)
    rows = mean + math.isqrt(mean) if problem.g > 1 else mean
    return gemm_of(problem, min(rows, problem.m), problem.g)


def gemm_of(problem: DeclaredProblem, rows: int, groups: int) -> Problem:
    """Return the GEMM of some rows of each of so many groups; k is rounded up to what a GEMM takes."""
    k, dtype = -(-problem.k // 8) * 8, str(problem.dtype)
    return Problem(rows, problem.n, k, groups, ab_dtype=dtype, unaligned_out=problem.unaligned)


def whole(config: Mapping[str, Value]) -> Config:
    """Return a config as the GEMM has it."""
    return Config({**config, **_UNCUT})


def uncut(config: Mapping[str, Value]) -> Config:
    """Return a config of the GEMM as a grouped one has it."""
    return Config({knob: value for knob, value in config.items() if knob not in _UNCUT})
