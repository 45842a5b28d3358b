"""How fast a library's call is beside the answers of a range, compared at many sizes one after the other.

A library changes its kernel between sizes. And where the power limit decides, a ratio from a few rounds says
little: which of two kernels is slowed down more depends on the load of the second before. So the GPU is
loaded until its clock settles, then answers and the call take turns, a few rounds at each size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from math import exp, log, log2

from cutegen.space import Config

__all__ = ["ComparedRatios"]

#: Doublings between two sizes, and beyond the last, across which nothing is interpolated. Source: of 92 sizes
#: of 7680x4608 on an H200, each estimated from its neighbors 0.15 doublings apart, the ratio was 3 % off.
_FAR = 0.35


class ComparedRatios:
    """The call's time over that of configs, at sizes where both were timed in turns."""

    def __init__(self) -> None:
        self._found: dict[int, Mapping[Config, float]] = {}

    @property
    def sizes(self) -> set[int]:
        """Where both were timed."""
        return {*self._found}

    def learn(self, size: int, ratios: Mapping[Config, float]) -> None:
        """Take in the ratios of the configs that were timed at ``size``."""
        if ratios:
            self._found[size] = dict(ratios)

    def between(self, answer_at: Callable[[int], Config]) -> Callable[[int], float | None]:
        """Return what gives the ratio of a size's answer: measured, or interpolated on logarithmic axes.

        None far from sizes that were compared. A size whose answer is another one than those that were timed
        there counts as its slowest.

        Args:
            answer_at: The config that answers a size.
        """
        sizes = sorted(self._found)
        found = [self._found[size] for size in sizes]
        logs = [
            log(ratios.get(answer_at(size), min(ratios.values())))
            for size, ratios in zip(sizes, found, strict=True)
        ]

        def ratio_at(size: int) -> float | None:
            at = bisect_left(sizes, size)
            around = [*range(max(at - 1, 0), min(at + 1, len(sizes)))]
            near = [place for place in around if abs(log2(size / sizes[place])) <= _FAR]
            if at < len(sizes) and sizes[at] == size:
                near = [at]
            if len(near) < 2:
                return exp(logs[near[0]]) if near else None
            below, above = near
            share = log(size / sizes[below]) / log(sizes[above] / sizes[below])
            return exp((1 - share) * logs[below] + share * logs[above])

        return ratio_at
