"""Which kernels for few rows to try: those that are predicted to be fast, then steps from the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TypeVar

from cutegen.arch import Arch
from cutegen.errors import ProblemError, UsageError
from cutegen.families.gemm.perf_model.few_rows import FewRowsEstimator, is_fitted
from cutegen.families.gemm.problem import Problem
from cutegen.families.same_kind import problems_of_kind
from cutegen.family import Problem as AnyProblem
from cutegen.space import Config, Query, Space, Value, as_integer
from cutegen.strategy import Default, OpenLibrary, Predictor

__all__ = ["FewRowsStrategy"]

_P = TypeVar("_P", bound=AnyProblem)

#: So many rows have kernels of their own at most; the space says which.
_MOST_ROWS = 4
#: Refinement starts from so many of the fastest.
_PARENTS = 3
#: Predictions within this factor do not tell kernels apart. Source: so much do those of kernels differ that
#: were measured to be within 2 % of each other.
_SLACK = 1.03

#: So many times as long as estimated do kernels of so many rows and more take, on sizes that the estimate
#: was not fitted to. Source: five untuned products of 3 and 4 rows on an H200 took 1.05 to 1.34 times as
#: long, 1.15 in the geometric mean; the general algorithm took up to 1.07 times as long on 24 others. With
#: 2 rows the two are about level, with 1 row estimates are right.
_MANY_ROWS, _LONGER = 4, 1.15


class FewRowsStrategy:
    """Chooses kernels for few rows by predicted time; every kernel is one config."""

    @classmethod
    def of(cls, arch: Arch) -> FewRowsStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        return cls() if is_fitted(arch) else None

    def rank(self, query: Query, limit: int, *, default: Config | None = None) -> list[Config]:
        """Return the default, its like, and the best predicted, of each way to cut up the work one first.

        Raises:
            ConfigError: ``fixed`` names a knob or a value that does not exist.
            UsageError: ``limit`` is not positive.
        """
        if limit < 1:
            raise UsageError(f"limit={limit} kernels must be at least 1")
        space, problem = query.space, query.problem
        # Equals keep the order of the space: simpler first.
        ordered = sorted(
            space.configs(problem, dict(query.fixed)), key=_Times(space, problem, query.sm_count).time_us
        )
        first: dict[tuple[Value, ...], Config] = {}
        for config in ordered:
            first.setdefault(_work_of(config), config)
        likely = [*([default] if default is not None else []), *_candidates(space, problem)]
        lead = [config for config in likely if config in ordered]
        return list(dict.fromkeys([*lead, *first.values(), *ordered]))[:limit]

    def likely(self, query: Query, limit: int, *, everywhere: bool = False) -> list[Config]:
        """Return nothing: ranking takes no time."""
        return []

    def refine(
        self, query: Query, results: Mapping[Config, float | None], limit: int, *, new_kernels: bool = True
    ) -> list[Config]:
        """Return untried neighbours of the fastest, by their parent's time and the ratio of predictions."""
        if not new_kernels:
            return []  # no two configs share a kernel
        space, problem = query.space, query.problem
        predicted_us = _Times(space, problem, query.sm_count).time_us
        timed = sorted((time, space.simplicity(c), c) for c, time in results.items() if time is not None)
        scored: dict[Config, float] = {}
        for time, _, parent in timed[:_PARENTS]:
            for near in space.neighbours(problem, parent):
                if near not in results and query.keeps(near):
                    score = time * predicted_us(near) / predicted_us(parent)
                    scored[near] = min(score, scored.get(near, score))
        return sorted(scored, key=lambda config: (scored[config], space.simplicity(config)))[:limit]

    def precompute(self, query: Query) -> None:
        """Do nothing: predictions take no time worth saving."""

    def prepare(self, space: Space, problem: Problem, sm_count: int, library: OpenLibrary) -> None:
        """Do nothing: candidates are few."""

    def tile(self, config: Config, size: str) -> int:
        """Return 1: there are no tiles."""
        return 1

    def default(self, space: Space, problem: Problem, sm_count: int) -> Default:
        """Return the first of the default candidates that is predicted to be about as fast as the fastest.

        What the model does not tell apart is in the order of measurements. Where no candidate is valid, it is
        the space's own default.
        """
        found = list(_candidates(space, problem))
        if not found:
            return Default(space.default(problem))
        estimates = _Times(space, problem, sm_count)
        times = [estimates.time_us(config) for config in found]
        longest = _SLACK * min(times)
        return next(Default(*each) for each in zip(found, times, strict=True) if each[1] <= longest)

    def default_set(self, space: Space, problem: _P, sm_count: int) -> Sequence[tuple[_P, Config]]:
        """Return the space's default candidates, as far as they are valid.

        Where none is, the general algorithm is the default.
        """
        return _default_set(space, problem)

    def predictor(
        self, space: Space, problem: Problem, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return the model's time of a config."""
        return _Times(space, problem, sm_count).time_us


class _Times:
    """Estimates of one problem, each made once."""

    def __init__(self, space: Space, problem: Problem, sm_count: int) -> None:
        self._space, self._problem, self._sm_count = space, problem, sm_count
        self._known: dict[Config, float] = {}

    @cached_property
    def _estimator(self) -> FewRowsEstimator:
        # Made when asked for: of problems with more rows, nobody asks.
        return FewRowsEstimator(self._problem, self._space.arch, self._sm_count)

    def time_us(self, config: Config) -> float:
        """Return the microseconds that ``config`` is predicted to take."""
        known = self._known.get(config)
        if known is None:
            derived = self._space.derive(config, self._problem, self._space.arch)
            known = self._estimator.time_us(config, as_integer(derived["registers"]))
            known *= _LONGER if config.integer("rows_per_cta") >= _MANY_ROWS else 1.0
            self._known[config] = known
        return known


@lru_cache(maxsize=16)
def _default_set(space: Space, problem: _P) -> tuple[tuple[_P, Config], ...]:
    """Return the default candidates, remembered for the steps of a range."""
    found: dict[Config, tuple[_P, Config]] = {}
    for kin in _few_rows_of(problem):
        if not space.explain(kin, {}):
            for config in _candidates(space, kin):
                found.setdefault(space.compile_view(config), (kin, config))
    return tuple(found.values())


def _few_rows_of(problem: _P) -> Iterator[_P]:
    """Yield problems of the signature of ``problem`` with few rows, where rows may be so few."""
    kinds = problems_of_kind(problem, 1500)
    by_others = {tuple(size for name, size in kin.sizes.items() if name != "m"): kin for kin in kinds}
    for m in range(1, _MOST_ROWS + 1):
        try:
            yield from dict.fromkeys(kin.with_sizes(m=m) for kin in by_others.values())
        except ProblemError:
            continue


def _candidates(space: Space, problem: AnyProblem) -> Iterator[Config]:
    complete = (Config(dict(knobs)) for knobs in space.default_candidates(problem))
    return (config for config in complete if space.is_valid(problem, config))


def _work_of(config: Config) -> tuple[Value, ...]:
    """How a kernel cuts up the work: how much each warp has, and how many share it."""
    return tuple(config[knob] for knob in ("columns_per_warp", "warps_along_k", "unroll", "cluster_k"))
