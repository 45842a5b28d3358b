"""In what families of kernels over rows differ: each space says it of its own kernels."""

from __future__ import annotations

from dataclasses import dataclass

from .expected import Terms
from .registers import RegistersTaken

__all__ = ["SHORT_FOR_SMEM", "DefaultByTerms", "Registers", "RowsInSmem"]

SHORT_FOR_SMEM = 65_536
"""Bytes of a row up to which it usually stays in registers. Source: an H200, bf16 rows: those of 32 KiB take
3 % longer in shared memory, those of 64 KiB 1 %; those of 128 KiB 9 % longer in registers."""


@dataclass(frozen=True)
class Registers:
    """What the compiler takes for a thread. Source: ptxas, the tests' kernels.

    Attributes:
        values_at_a_time: Most values of a row in shared memory that a thread works on at a time with no more
            than 40 registers.
        beside_values: Registers that a thread needs beside its values and weights, where weights are loaded
            late and where they are loaded early. The launch bounds of CTAs of 128 threads and more then give
            the compiler no others. None where it takes few by itself.
        values_of_warps: Where a warp has whole rows: a thread with more values than the first number, and at
            most the second, fits 64 registers, though the compiler takes more unless launch bounds forbid it.
            None where it does not.
    """

    values_at_a_time: int = 32
    beside_values: tuple[int, int] | None = None
    values_of_warps: tuple[int, int] | None = None


@dataclass(frozen=True)
class RowsInSmem:
    """Which rows may wait in shared memory.

    Attributes:
        longer_than: Bytes of a row above which a cluster may keep it there.
        of_one_cta: Least and most bytes of a row that one CTA may keep there; None if none may.
        two_at_a_time: Whether a thread may take two of them at a time.
    """

    longer_than: int = SHORT_FOR_SMEM
    of_one_cta: tuple[int, int] | None = None
    two_at_a_time: bool = False


@dataclass(frozen=True)
class DefaultByTerms:
    """How a default is chosen by what kernels are expected to take.

    Attributes:
        terms: What they are expected to take.
        registers: What a thread takes of them.
        lane_values: Most values that a thread should hold of a row with a weight that one warp has alone,
            where rows are few; None for as many as the rules allow.
        pairs: Up to so many rows, of which a warp has each, go two at a time.
        half_warps: Between so many rows for each multiprocessor, those of which eight threads would have each
            go two at a time to sixteen.
    """

    terms: Terms
    registers: RegistersTaken
    lane_values: int | None = None
    pairs: int = 0
    half_warps: tuple[int, int] = (0, 0)
