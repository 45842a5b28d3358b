"""A strategy of the GEMM, asked about the GEMM that costs what a problem of another family costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Query, Space, Value
from cutegen.strategy import Default, OpenLibrary, Predictor, Strategy

__all__ = ["BorrowedStrategy"]


class BorrowedStrategy:
    """Chooses configs by the time that a model of the GEMM predicts; arguments as its methods have them.

    A family whose configs are not those of the space that the model chooses from says what is what, by
    :meth:`asked_space`, :meth:`theirs` and :meth:`ours`.

    Args:
        gemm: The model.
        as_gemm: Returns the GEMM that costs what a problem does.
    """

    def __init__(self, gemm: Strategy, as_gemm: Callable[[Any], Problem]) -> None:
        self._gemm = gemm
        self._as_gemm = as_gemm

    def asked_space(self, space: Space, problem: Any) -> Space:
        """Return the space that the model chooses from, whose rules take the GEMM: the family's own."""
        return space

    def theirs(self, asked: Space, config: Mapping[str, Value]) -> Config:
        """Return a config of ours as the space that is asked has it."""
        return Config(config)

    def ours(self, space: Space, problem: Any, configs: Iterable[Config]) -> list[Config]:
        """Return configs of the space that was asked as ours, without those that are none."""
        return [config for config in configs if space.is_valid(problem, config)]

    def rank(self, query: Query, limit: int, *, default: Config | None = None) -> list[Config]:
        """Return the default, then the best by prediction."""
        asked = self._asked(query)
        lead = None if default is None else self.theirs(asked.space, default)
        return self.ours(query.space, query.problem, self._gemm.rank(asked, limit, default=lead))

    def likely(self, query: Query, limit: int, *, everywhere: bool = False) -> list[Config]:
        """Return the best by the fit to measured products."""
        found = self._gemm.likely(self._asked(query), limit, everywhere=everywhere)
        return self.ours(query.space, query.problem, found)

    def refine(
        self, query: Query, results: Mapping[Config, float | None], limit: int, *, new_kernels: bool = True
    ) -> list[Config]:
        """Return untried configs that the measured microseconds make promising."""
        asked = self._asked(query)
        theirs = {self.theirs(asked.space, config): time for config, time in results.items()}
        found = self._gemm.refine(asked, theirs, limit, new_kernels=new_kernels)
        return [c for c in self.ours(query.space, query.problem, found) if c not in results]

    def precompute(self, query: Query) -> None:
        """Work out in advance what the other methods look up."""
        self._gemm.precompute(self._asked(query))

    def prepare(self, space: Space, problem: Any, sm_count: int, library: OpenLibrary) -> None:
        """Make ready what :meth:`default` needs."""
        self._gemm.prepare(self.asked_space(space, problem), self._as_gemm(problem), sm_count, library)

    def default(self, space: Space, problem: Any, sm_count: int) -> Default | None:
        """Return the fastest predicted of the default candidates, None if it is none of ours."""
        found = self._gemm.default(self.asked_space(space, problem), self._as_gemm(problem), sm_count)
        if found is None:
            return None
        own = next(iter(self.ours(space, problem, [found.config])), None)
        return None if own is None else Default(own, found.time_us)

    def default_set(self, space: Space, problem: Any, sm_count: int) -> Sequence[tuple[Any, Config]]:
        """Return every kernel that :meth:`default` may answer with."""
        return self._gemm.default_set(space, problem, sm_count)

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along a size."""
        return self._gemm.tile(config, size)

    def predictor(
        self, space: Space, problem: Any, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return the model's time of a config."""
        asked = self.asked_space(space, problem)
        known = [self.theirs(asked, config) for config in configs]
        predict = self._gemm.predictor(asked, self._as_gemm(problem), sm_count, known)
        return lambda config: predict(self.theirs(asked, config))

    def _asked(self, query: Query) -> Query:
        """Return what the model is asked; knobs that a config of ours does not have are fixed."""
        asked = self.asked_space(query.space, query.problem)
        alone = {knob: (value,) for knob, value in self.theirs(asked, {}).items()}
        fixed = {**dict(query.fixed), **alone}
        return Query.of(asked, self._as_gemm(query.problem), query.sm_count, fixed)
