"""What the model says of configs at every size of a range, each worked out once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cutegen.families.ranges import Range
from cutegen.families.registry import space_of
from cutegen.family import Problem
from cutegen.search.defaults import predictor, strategy_of
from cutegen.space import Config, Space

__all__ = ["Predictions"]


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
        return predict(config) if self._space_of(config).is_valid(problem, config) else None

    def _model(self, problem: Problem) -> Callable[[Config], float | None]:
        predict = predictor(self._space, problem, self._sm_count, self._expected)
        return predict or (lambda config: float(problem.min_bytes))
