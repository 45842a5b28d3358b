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
    "gemm_of",
    "has_factors",
    "is_masked",
    "mean_rows",
    "uncut",
    "whole",
]

#: A mean of as many rows as there is room for.
ALL = "all"
#: Ends the names of families in which each group has a matrix, whose first rows are its own.
_MASKED = "_masked"
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
def as_gemm(problem: DeclaredProblem) -> Problem:
    """Return the GEMM of as many groups, with as many rows each as most do not exceed by much.

    Groups of rows that choose at random have about the square root of the mean more or less than the mean.
    """
    mean = mean_rows(problem)
    rows = mean + math.isqrt(mean) if problem.g > 1 else mean
    return gemm_of(problem, min(rows, problem.m), problem.g)


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
