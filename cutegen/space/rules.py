"""Rules that every GEMM space shares."""

from __future__ import annotations

from cutegen.problem import Problem

__all__ = ["LARGEST_EXTENT", "extents_round_up_below_2_to_31"]

#: No cluster of tiles of any space is larger than this along an axis: tiles of 256 on 16 thread blocks.
_LARGEST_CLUSTER = 4096
LARGEST_EXTENT = 2**31 - _LARGEST_CLUSTER


def extents_round_up_below_2_to_31(problem: Problem) -> bool:
    """Kernels round m, n and k up to whole clusters of tiles, which are at most 4096 wide, and compute
    coordinates in signed 32-bit integers: no extent may be above 2**31 - 4096 = 2147479552."""
    return max(problem.m, problem.n, problem.k) <= LARGEST_EXTENT
