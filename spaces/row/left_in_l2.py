"""What the kernel before has left in L2 of what a kernel over rows reads, as numbers of rows.

A kernel writes rows from the first to the last, so that L2 has the last ones when the next kernel starts.
That one reads them first, before what it reads and writes itself takes their place. And what it has read or
written leaves L2 first, where that makes room for what it has yet to read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cutegen.arch import Arch
from cutegen.space import Value

HELD = 0.6
"""Share of L2 up to which it holds all of what the kernel before wrote, so that the first rows come first.
Source: an H100 with 50 MiB of L2 (docs/results/row_order_h100.json): where rows do not leave L2 first, the
last ones first take 4 to 19 % longer for most inputs of 17 to 29 MB, between 6 % less and 2 % more for 34 MB,
and 7 to 19 % less for 44 to 67 MB."""
HELD_LEAVING = 1.1
"""The same where what is read and written leaves L2 first. Source: the same file: the last rows first take 2
to 12 % longer for 34 MB, 1 to 2 % for 44 and 50 MB, and up to 5 % less for 59 and 67 MB."""
PASSING = 0.25, 6.0
"""Sizes, in sizes of L2, of all that is read and written, between which it leaves L2 first. Source: the same
file: in the better order of rows that takes 4 to 27 % less time for 58 to 134 MB, up to 11 % less for 146 to
344 MB, and as long for 537 MB; for 16 to 50 MB between 10 % less and 2 % more."""


def left_in_l2(problem: Any, arch: Arch, row_bytes: int, *, leaves: bool = True) -> dict[str, Value]:
    """Return the rows up to which the first come first, and those between which all leave L2 first.

    Args:
        problem: What is computed; its number of rows counts nothing.
        arch: The target.
        row_bytes: Bytes of a row of the first input, which the kernel before may have written.
        leaves: Whether the kernel can tell L2 what leaves first.
    """
    held = int((HELD_LEAVING if leaves else HELD) * arch.l2_bytes) // row_bytes
    if not leaves:
        return {"rows_held": held}
    moved = _moved_for_row(_Kind(problem.signature, problem))
    least, most = (int(share * arch.l2_bytes) // moved for share in PASSING)
    return {"rows_held": held, "passing_from": least, "passing_to": most}


@dataclass(frozen=True)
class _Kind:
    """Problems of one signature, and one of them."""

    signature: Any
    example: Any = field(compare=False)


@lru_cache(maxsize=1024)
def _moved_for_row(kind: _Kind) -> int:
    """Return the bytes that one more row adds; to work that out takes longer than the rest of a default."""
    one, two = (kind.example.with_sizes(m=m).min_bytes for m in (1, 2))
    return int(two - one)
