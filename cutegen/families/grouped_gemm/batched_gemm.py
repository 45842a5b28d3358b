"""A grouped GEMM as the batched GEMM of about the same tiles, which rules and performance model know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.grouped_gemm.group_rows import groups_with_rows, total_rows
from cutegen.space import Config, Value

__all__ = [
    "GEMM_ONLY_KNOBS",
    "activation_of",
    "batched_gemm",
    "equal_tiles",
    "gemm_of",
    "has_factors",
    "with_gemm_knobs",
    "without_gemm_knobs",
]

#: Groups with a mean below so many rows get a margin of so many square roots of the mean. Source: times of 50
#: untuned problems and 8 kernels each on an H200.
_SMALL, _SMALL_MARGIN = 64, 2
#: Knobs of the GEMM that a grouped one does not have: k is never cut.
GEMM_ONLY_KNOBS: Mapping[str, Value] = {"stream_k": False, "reduction": "fixed", "split_k": 1}


def has_factors(problem: DeclaredProblem) -> bool:
    """Return whether blocks of both operands have factors."""
    return problem.family.endswith("_blocks")


def activation_of(problem: DeclaredProblem) -> str:
    """Return the activation of gated GEMMs, empty for plain ones."""
    return str(dict(problem.options).get("activation", ""))


@lru_cache(maxsize=4096)
def batched_gemm(problem: DeclaredProblem) -> Problem:
    """Return the GEMM with a batch for each group that has rows, each of as many rows as few groups exceed.

    Rows that choose their group at random give it about the square root of the mean more or less than the
    mean. Of small groups hardly any should need a second tile, for it waits for the first.
    """
    groups = max(1, round(groups_with_rows(problem)))
    total = total_rows(problem)
    mean = total / groups
    margin = math.sqrt(mean) * (_SMALL_MARGIN if mean < _SMALL else 1)
    rows = math.ceil(mean + margin) if problem.g > 1 else total
    return gemm_of(problem, min(rows, problem.m), groups)


def equal_tiles(problem: DeclaredProblem, height: int) -> int:
    """Return how many tiles of ``height`` rows its batches have together."""
    gemm = batched_gemm(problem)
    return gemm.batch * -(-gemm.m // height)


def gemm_of(problem: DeclaredProblem, rows: int, groups: int) -> Problem:
    """Return the GEMM of ``rows`` rows of each of ``groups`` groups; k is rounded up to what a GEMM takes.

    A gated GEMM costs what the plain one costs with all columns of its matrices.
    """
    k, dtype, activation = -(-problem.k // 8) * 8, str(problem.dtype), activation_of(problem)
    if has_factors(problem):
        out, unaligned = str(problem.out), problem.unaligned
        return Problem(rows, problem.n, k, groups, dtype, out, unaligned_out=unaligned, promote=True)
    n, epilogue = (2 * problem.n if activation else problem.n), Epilogue(activation=activation)
    return Problem(rows, n, k, groups, ab_dtype=dtype, unaligned_out=problem.unaligned, epilogue=epilogue)


def with_gemm_knobs(config: Mapping[str, Value]) -> Config:
    """Return a config of a grouped GEMM as the GEMM has it."""
    return Config({**config, **GEMM_ONLY_KNOBS})


def without_gemm_knobs(config: Mapping[str, Value]) -> Config:
    """Return a config of the GEMM as a grouped one has it."""
    return Config({knob: value for knob, value in config.items() if knob not in GEMM_ONLY_KNOBS})
