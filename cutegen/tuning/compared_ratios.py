"""How fast a library's call is beside the answers of a range, timed at many sizes one after the other.

A library changes its kernel between sizes. And where the power limit decides, a ratio from a few rounds says
little: which of two kernels is slowed down more depends on the load of the second before. So the GPU is
loaded until its clock settles, then candidates and the call take turns, a few rounds at each size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from math import log2

from cutegen.search.interpolation import interpolated
from cutegen.space import Config

__all__ = ["ComparedRatios"]

#: Doublings between two sizes, and beyond the last, across which nothing is interpolated. Source: of 92 sizes
#: of 7680x4608 on an H200, each estimated from its neighbors 0.15 doublings apart, the ratio was 3 % off.
_FAR = 0.35


class ComparedRatios:
    """The call's time over that of kernels, at sizes where both were timed in turns.

    Args:
        kernel_of: The part of a config that is compiled in, which names its kernel.
    """

    def __init__(self, kernel_of: Callable[[Config], Config]) -> None:
        self._kernel_of = kernel_of
        self._found: dict[int, dict[Config, float]] = {}

    @property
    def sizes(self) -> set[int]:
        """Where both were timed."""
        return {*self._found}

    def learn(self, size: int, ratios: Mapping[Config, float]) -> None:
        """Take in the ratios of the configs that were timed at ``size``; of a kernel the best counts."""
        for config, ratio in ratios.items():
            known = self._found.setdefault(size, {})
            kernel = self._kernel_of(config)
            known[kernel] = max(ratio, known.get(kernel, 0.0))

    def between(self, answer_at: Callable[[int], Config]) -> Callable[[int], float | None]:
        """Return what gives the ratio of a size's answer: measured, or estimated from the sizes around it.

        Where its kernel was timed on both sides the ratio is interpolated on logarithmic axes, where on one,
        it is the ratio there. Else it is the least of the answers on either side, and where these were not
        timed, of all kernels. None far from sizes where anything was timed.

        Args:
            answer_at: The config that answers a size.
        """
        sizes = sorted(self._found)

        def ratio_at(size: int) -> float | None:
            at = bisect_left(sizes, size)
            around = sizes[max(at - 1, 0) : at + 1]
            if at < len(sizes) and sizes[at] == size:
                around = [size]
            near = [other for other in around if abs(log2(size / other)) <= _FAR]
            kernel = self._kernel_of(answer_at(size))
            same = {other: self._found[other][kernel] for other in near if kernel in self._found[other]}
            if same:
                return interpolated(size, sorted(same), same)
            return min((self._of_answer(other, answer_at) for other in near), default=None)

        return ratio_at

    def _of_answer(self, size: int, answer_at: Callable[[int], Config]) -> float:
        found = self._found[size]
        return found.get(self._kernel_of(answer_at(size)), min(found.values()))
