"""What the model says of configs at every size of a range, each worked out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from math import exp, log

from cutegen.families.ranges import Range
from cutegen.families.registry import space_of
from cutegen.family import Problem
from cutegen.search.defaults import default_set, predictor, strategy_of
from cutegen.search.twins import aside_from_overlap
from cutegen.space import Config, Space

__all__ = ["Predictions", "unproven"]

#: By how much kernels that are no default candidates take longer than predicted, as a logarithm, where they
#: are chosen since they are predicted to be fast: of many the model likes best what it is most wrong about.
#: The first up to so many rows, the second from so many on, and in proportion between. Source: on 36 shapes
#: of two matrices and 210 to 6942 rows on an H200 the kernel of the whole space that was expected to be
#: fastest took longer than the first default candidate, as predictions have both, by 0.01 to 0.02 in the mean
#: up to 512 rows; beyond, it did not (docs/results/wide_tiles.json.xz). An earlier fit needed 0.05 and 0.03.
_UNPROVEN, _UNPROVEN_FROM, _UNPROVEN_TO = (0.02, 0.005), 256, 512


def unproven(size: int) -> float:
    """Return how much longer than predicted kernels take that are no default candidates: a logarithm."""
    small, large = _UNPROVEN
    share = log(max(1.0, size / _UNPROVEN_FROM)) / log(_UNPROVEN_TO / _UNPROVEN_FROM)
    return small + (large - small) * min(share, 1.0)


class Predictions:
    """Predicted microseconds by size and config. Without a model time goes with the bytes that must move.

    Args:
        whole: The range.
        space: That of the family's general algorithm.
        sm_count: SMs of the GPU.
    """

    def __init__(self, whole: Range, space: Space, sm_count: int) -> None:
        self._range = whole
        self._space = space
        self._sm_count = sm_count
        self._expected: tuple[Config, ...] = ()
        self._at: dict[int, tuple[Problem, Callable[[Config], float | None]] | None] = {}
        self._known: dict[tuple[int, Config], float | None] = {}
        self._trusted: frozenset[Config] = frozenset()

    def __call__(self, size: int, config: Config) -> float | None:
        """Return what ``config`` is predicted to take at ``size``; None if it is not valid there."""
        key = (size, config)
        if key not in self._known:
            self._known[key] = self._predict(size, config)
        return self._known[key]

    def expect(self, configs: Iterable[Config]) -> None:
        """Take note of what will be asked about at many sizes: together that takes less time."""
        self._expected = tuple(configs)
        self._at.clear()

    def is_proven(self, config: Config) -> bool:
        """Return whether the kernel of ``config`` is a default candidate, or one to be trusted."""
        if not self._proven:
            return True
        kernel = self._kernel_of(config)
        return kernel in self._proven or kernel in self._trusted

    def trust(self, configs: Iterable[Config]) -> None:
        """Take predictions of ``configs`` as they are: measurements have chosen these before."""
        self._trusted |= {self._kernel_of(config) for config in configs}

    @cached_property
    def _proven(self) -> frozenset[Config]:
        """Kernels of the default candidates, overlap aside; none where there is no model."""
        if strategy_of(self._space) is None:
            return frozenset()
        known = default_set(self._space, self._range.low, self._sm_count)
        return frozenset(self._kernel_of(config) for _, config in known)

    def _kernel_of(self, config: Config) -> Config:
        return aside_from_overlap(self._space_of(config).compile_view(config))

    def tile_of(self, config: Config) -> int:
        """Return how many values of the range's size share a tile of ``config``."""
        strategy = strategy_of(self._space_of(config))
        return 1 if strategy is None else strategy.tile(config, self._range.size)

    def _space_of(self, config: Config) -> Space:
        return space_of(config, self._space.family, self._space.arch)

    def _predict(self, size: int, config: Config) -> float | None:
        if size not in self._at:
            problem = self._range.at(size)
            self._at[size] = None if problem is None else (problem, self._model(problem))
        found = self._at[size]
        if found is None:
            return None
        problem, predict = found
        if not self._space_of(config).is_valid(problem, config):
            return None
        time_us = predict(config)
        return time_us if time_us is None or self.is_proven(config) else time_us * exp(unproven(size))

    def _model(self, problem: Problem) -> Callable[[Config], float | None]:
        predict = predictor(self._space, problem, self._sm_count, self._expected)
        return predict or (lambda config: float(problem.min_bytes))
