"""Values between two sizes at which they are known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import exp, log

__all__ = ["interpolated"]


def interpolated(size: int, sizes: Sequence[int], values: Mapping[int, float]) -> float | None:
    """Return the value at ``size``, interpolated linearly between its neighbors on logarithmic axes.

    Beyond the first and the last size it is the value there; None without any.

    Args:
        size: Where.
        sizes: Where values are known, the smallest first.
        values: By size; positive.
    """
    if not sizes:
        return None
    at = bisect_left(sizes, size)
    below, above = sizes[max(at - 1, 0)], sizes[min(at, len(sizes) - 1)]
    if below == above:
        return values[above]
    share = log(size / below) / log(above / below)
    return exp((1 - share) * log(values[below]) + share * log(values[above]))
