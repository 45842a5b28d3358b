"""A random walk to a small error that depends on a few numbers in steps, so that no gradient leads there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Doubles", "RandomWalk"]

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class RandomWalk:
    """How a walk goes.

    Attributes:
        steps: How many are tried.
        moved: The share of the numbers that a step moves.
        width: By how much of themselves, at first: the standard deviation of the logarithm.
        narrower: The same at last, as a part of ``width``.
    """

    steps: int
    moved: float
    width: float
    narrower: float

    def end(self, start: Sequence[float], error: Callable[[Doubles], float], seed: int = 0) -> Doubles:
        """Return where the walk from ``start`` ends that takes every step which lessens the error."""
        chance = np.random.default_rng(seed)
        best = np.array(start, float)
        least = error(best)
        for step in range(self.steps):
            width = self.width * self.narrower ** (step / self.steps)
            moved = chance.random(len(best)) < self.moved
            there = best * np.where(moved, np.exp(chance.normal(0, width, len(best))), 1.0)
            if (now := error(there)) < least:
                best, least = there, now
        return best
