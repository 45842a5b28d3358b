"""The plain GEMM inside a gated one: what the GEMM's rules and performance model are asked about."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cutegen.families.gemm.problem import Epilogue, Problem

__all__ = ["plain_gemm"]


@lru_cache(maxsize=4096)
def plain_gemm(problem: Any) -> Problem:
    """Return the GEMM of x with all rows of w, which costs what the gated one does; a GEMM is its own.

    Raises:
        ProblemError: A size is not one that a GEMM takes.
    """
    if isinstance(problem, Problem):
        return problem
    return Problem(
        problem.m,
        2 * problem.n,
        problem.k,
        ab_dtype=problem.dtype,
        unaligned_out=problem.unaligned,
        epilogue=Epilogue(activation=problem.activation),
    )
