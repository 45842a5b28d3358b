"""A strategy of the GEMM, asked about the GEMM that costs what a problem of another family costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cutegen.families.gemm.problem import Problem
from cutegen.family import Default, OpenLibrary, Predictor, Strategy
from cutegen.space import Config, Space, Value

__all__ = ["BorrowedStrategy", "Fixed"]

#: Knobs restricted to some values.
Fixed = Mapping[str, Sequence[Value]] | None


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

    def rank(
        self,
        space: Space,
        problem: Any,
        sm_count: int,
        limit: int,
        fixed: Fixed = None,
        *,
        default: Config | None = None,
    ) -> list[Config]:
        """Return the default, then the best by prediction."""
        asked = self.asked_space(space, problem)
        lead = None if default is None else self.theirs(asked, default)
        found = self._gemm.rank(
            asked, self._as_gemm(problem), sm_count, limit, self._kept(asked, fixed), default=lead
        )
        return self.ours(space, problem, found)

    def likely(
        self,
        space: Space,
        problem: Any,
        sm_count: int,
        limit: int,
        fixed: Fixed = None,
        *,
        everywhere: bool = False,
    ) -> list[Config]:
        """Return the best by the fit to measured products."""
        asked = self.asked_space(space, problem)
        known = asked, self._as_gemm(problem), sm_count, limit, self._kept(asked, fixed)
        return self.ours(space, problem, self._gemm.likely(*known, everywhere=everywhere))

    def refine(
        self,
        space: Space,
        problem: Any,
        results: Mapping[Config, float | None],
        limit: int,
        *,
        sm_count: int | None = None,
        fixed: Fixed = None,
        new_kernels: bool = True,
    ) -> list[Config]:
        """Return untried configs that the measured microseconds make promising."""
        asked = self.asked_space(space, problem)
        found = self._gemm.refine(
            asked,
            self._as_gemm(problem),
            {self.theirs(asked, config): time for config, time in results.items()},
            limit,
            sm_count=sm_count,
            fixed=self._kept(asked, fixed),
            new_kernels=new_kernels,
        )
        return [config for config in self.ours(space, problem, found) if config not in results]

    def precompute(self, space: Space, problem: Any, sm_count: int, fixed: Fixed = None) -> None:
        """Work out in advance what the other methods look up."""
        asked = self.asked_space(space, problem)
        self._gemm.precompute(asked, self._as_gemm(problem), sm_count, self._kept(asked, fixed))

    def prepare(self, space: Space, problem: Any, sm_count: int, library: OpenLibrary) -> None:
        """Make ready what :meth:`default` needs."""
        self._gemm.prepare(self.asked_space(space, problem), self._as_gemm(problem), sm_count, library)

    def default(self, space: Space, problem: Any, sm_count: int) -> Default:
        """Return the fastest predicted of the default candidates."""
        found = self._gemm.default(self.asked_space(space, problem), self._as_gemm(problem), sm_count)
        own = next(iter(self.ours(space, problem, [found.config])), None)
        return Default(space.default(problem)) if own is None else Default(own, found.time_us)

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

    def _kept(self, asked: Space, fixed: Fixed) -> Fixed:
        """Return what is fixed, and the knobs that a config of ours does not have."""
        alone = {knob: (value,) for knob, value in self.theirs(asked, {}).items()}
        return {**(fixed or {}), **alone} if alone else fixed
