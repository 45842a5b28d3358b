"""In what families of kernels over rows differ: each space says it of its own kernels."""

from __future__ import annotations

from dataclasses import dataclass

from .expected import Terms

__all__ = ["SHORT_FOR_SMEM", "DefaultByTerms", "Registers", "RowsInSmem"]

SHORT_FOR_SMEM = 65_536
"""Bytes of a row up to which it usually stays in registers. Source: an H200, bf16 rows: those of 32 KiB take
3 % longer in shared memory, those of 64 KiB 1 %; those of 128 KiB 9 % longer in registers."""


@dataclass(frozen=True)
class Registers:
    """What the compiler takes for a thread. Source: ptxas, the tests' kernels.

    Attributes:
        values_at_a_time: With how many values of a row in shared memory, at most, a thread gets along with 40
            registers.
        beside_values: Registers of a thread beside its values and weights, where these are loaded late, and
            early by 128 threads: the compiler gets no more. None where it takes few enough.
        values_of_warps: More values of a thread than the first, and up to the second, fit 64 registers where
            a warp has whole rows, though the compiler takes more. None where it takes no more.
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
        turn: Accesses of a thread to a row in shared memory before it works on them, where both are legal.
        few_in_smem: Bytes of a row that a CTA had best have in shared memory where there are nearly as many
            rows as multiprocessors, in turns of 4; None for as many bytes as of more rows.
        lane_values: Values of a row that a lane may hold where a warp has a row with a weight, and rows are
            few; None for as many as rules allow.
    """

    terms: Terms
    turn: int = 2
    few_in_smem: int | None = None
    lane_values: int | None = None
