"""Which kernels for few rows to try: those that are predicted to be fast, then steps from the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TypeAlias, TypeVar

from cutegen.arch import Arch
from cutegen.errors import ProblemError, UsageError
from cutegen.families.gemm.perf_model.few_rows import FewRowsEstimator, is_fitted, prepare
from cutegen.families.gemm.problem import Problem
from cutegen.families.same_kind import problems_of_kind
from cutegen.family import Problem as AnyProblem
from cutegen.space import Config, Query, Space, Value, as_integer
from cutegen.space.checks import Checks, Left, all_hold
from cutegen.strategy import Default, OpenLibrary, Predictor
from cutegen.system.remembered import Remembered

__all__ = ["FewRowsStrategy"]

_P = TypeVar("_P", bound=AnyProblem)
#: A config, what is to be asked of each problem before it is one for it, and the registers of a thread.
_Candidate: TypeAlias = "tuple[Config, Left, int]"

#: So many rows have kernels of their own at most; the space says which.
_MOST_ROWS = 4
#: Refinement starts from so many of the fastest.
_PARENTS = 3


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
        configs = list(space.configs(problem, dict(query.fixed)))
        times = _Times(space, problem, query.sm_count)
        times.look(configs)
        ordered = sorted(configs, key=times.time_us)  # equals keep the order of the space: simpler first
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
        """Leave estimates to C, where that was compiled."""
        prepare(space.arch, sm_count, library)

    def tile(self, config: Config, size: str) -> int:
        """Return 1: there are no tiles."""
        return 1

    def default(self, space: Space, problem: Problem, sm_count: int) -> Default | None:
        """Return the default candidate that is predicted to be the fastest, None if none is valid."""
        valid = [
            (config, registers)
            for config, left, registers in _known_candidates(space, problem)
            if all_hold(left, problem)
        ]
        if not valid:
            return None
        times = FewRowsEstimator(problem, space.arch, sm_count).times_us(valid)
        time_us = min(times)
        return Default(valid[times.index(time_us)][0], time_us)

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

    def look(self, configs: Sequence[Config]) -> None:
        """Estimate ``configs`` at once, which takes less time than one after the other."""
        new = [config for config in dict.fromkeys(configs) if config not in self._known]
        derived = (self._space.derive(config, self._problem, self._space.arch) for config in new)
        kernels = [(c, as_integer(d["registers"])) for c, d in zip(new, derived, strict=True)]
        self._known.update(zip(new, self._estimator.times_us(kernels), strict=True))

    def time_us(self, config: Config) -> float:
        """Return the microseconds that ``config`` is predicted to take."""
        if config not in self._known:
            self.look([config])
        return self._known[config]


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
    complete = (_config(tuple(knobs.items())) for knobs in space.default_candidates(problem))
    return (config for config in complete if space.is_valid(problem, config))


#: Default candidates by what they depend on: rows, and what is compiled in.
_known: Remembered[tuple[Space, object, int], list[_Candidate]] = Remembered(256)


def _known_candidates(space: Space, problem: Problem) -> list[_Candidate]:
    """Return default candidates for as many rows, with what sizes decide and the registers of each."""
    key = space, problem.signature, problem.m
    found = _known.get(key)
    if found is None:
        checks = Checks(space, problem)
        asked = [_config(tuple(knobs.items())) for knobs in space.default_candidates(problem)]
        made = [
            (config, left, as_integer(space.derive(config, problem, space.arch)["registers"]))
            for config in asked
            if (left := checks.left(config)) is not None
        ]
        found = _known.keep(key, made)
    return found


@lru_cache(maxsize=256)
def _config(knobs: tuple[tuple[str, Value], ...]) -> Config:
    """Return a config; finding it takes less time than making it, and calls ask for the same few."""
    return Config(dict(knobs))


def _work_of(config: Config) -> tuple[Value, ...]:
    """How a kernel cuts up the work: how much each warp has, and how many share it."""
    return tuple(config[knob] for knob in ("columns_per_warp", "warps_along_k", "unroll", "cluster_k"))
