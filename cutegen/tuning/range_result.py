"""The result of tuning a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutegen.families.ranges import Range
from cutegen.records.range_entry import RangeEntry

__all__ = ["RangeResult"]


@dataclass(frozen=True)
class RangeResult:
    """The answers of a range, and what it took.

    Attributes:
        entry: The answers, as they stand in the table.
        arch: The target's name.
        device: The GPU's name.
        outcomes: How many candidates ended in each outcome, over all sizes.
        sizes: Sizes at which candidates were measured.
        kernels: Kernels that were compiled.
        seconds: Wall-clock time of this call.
        reused: Whether everything came from records and nothing ran.
    """

    entry: RangeEntry
    arch: str
    device: str
    outcomes: Mapping[str, int] = field(default_factory=dict)
    sizes: int = 0
    kernels: int = 0
    seconds: float = 0.0
    reused: bool = False

    @property
    def range(self) -> Range:
        """What was tuned."""
        return self.entry.range

    @property
    def ratios(self) -> Mapping[int, float]:
        """The baseline's time over that of the answer, by the size at which both were measured."""
        points = self.entry.points
        return {
            point.size: point.ratio_to_baseline for point in points if point.ratio_to_baseline is not None
        }

    @property
    def contended_by(self) -> str:
        """Other processes that used the GPU while it was measured, in words; empty if none was seen."""
        return self.entry.contended_by
