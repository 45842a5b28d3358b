"""The performance model as a search strategy: what to try first, what next, and what without measuring."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from cutegen.arch import Arch
from cutegen.families.gemm.perf_model import proposals
from cutegen.families.gemm.perf_model.blackwell import estimator_of
from cutegen.families.gemm.perf_model.estimator import Estimator
from cutegen.families.gemm.perf_model.fitted import fit_of, fitted_times_us, fitted_us, is_fitted
from cutegen.families.gemm.perf_model.gpu_params import is_modelled
from cutegen.families.gemm.perf_model.kernel_set import KernelSet, default_kernels, every_kernel, kernel_set
from cutegen.families.gemm.perf_model.ranking import Ranker
from cutegen.families.gemm.perf_model.torch_mm import torch_mm_of
from cutegen.families.gemm.problem import Problem
from cutegen.families.same_kind import problems_of_kind
from cutegen.family import is_heavy
from cutegen.space import Config, Query, Space, Value, as_pair
from cutegen.space.checks import Checks, Left, all_hold
from cutegen.strategy import Default, OpenLibrary, Predictor

__all__ = ["GemmStrategy", "defaults_by_time"]

#: Most kernels that come first since the fit predicts them to be fast. Source: on an H200 the best of eight
#: that boosted trees put first is some tenths of a percent behind the best.
_BY_FIT = 8
#: Of so many kernels or more a third is what the fit likes best of the physics' best. Source: winners of
#: tuning 28 shapes on an H200, few of them default kernels: 16 are among 12 proposed so, by tile,
#: cluster and split, and 9 among 12 without.
_WIDE = 12
#: Of kernels of the whole space so many may differ in nothing but how a tile is worked on, which the fit
#: hardly tells apart; so many are looked at closely, and so many come first. Source: kernels of a sweep of an
#: H200 that were left out of the fit; its first choice is 2.5 % behind the best, the best of eight 0.2 %.
_ALIKE, _LOOKED_AT, _BY_FIT_OF_ALL = 2, 400, 12
#: Kernels that lose little both under load and in bursts, and how far behind the fastest they may be
#: predicted to be. Source: 19 to 24 configs of each of six GEMMs on an H200 (docs/results/two_regimes.json):
#: of these tiles, whole or by ``stream_k``, one is within 1.5 % of the library in both regimes on all six, of
#: all others on four.
_STEADY: Mapping[str, tuple[Value, ...]] = {
    "tile_shape_mn": ((128, 256), (256, 128)),
    "tile_k": (64,),
    "cluster_shape_mn": ((2, 1), (1, 2)),
    "mma_warpgroups": (2,),
    "pingpong": (False,),
    "split_k": (1,),
}
_STEADY_SLACK = 1.1


def defaults_by_time(space: Space, problem: Problem, sm_count: int) -> Iterator[Config]:
    """Yield the space's default candidates that are valid for ``problem``, the fastest predicted first."""
    if is_fitted(problem, space.arch):
        yield from (config for _, config in kernel_set(space, problem, sm_count).by_time(problem))
        return
    ranker = Ranker(space, problem, sm_count, None)
    valid = (config for config in default_kernels(space, problem) if not space.explain(problem, config))
    found = sorted((ranker.finish(config) for config in valid), key=lambda candidate: candidate.time_us)
    yield from (candidate.config for candidate in found)


@lru_cache(maxsize=16)
def _default_set(space: Space, problem: Problem) -> tuple[tuple[Problem, Config], ...]:
    """Return the default candidates that are valid somewhere, and the space's default where none is.

    Remembered, since a range asks for them at each step.
    """
    checks = Checks(space, problem)
    kernels: list[tuple[Config, Config, Left]] | None = None
    found: dict[Config, tuple[Problem, Config]] = {}
    for kin in problems_of_kind(problem, 1500):
        if space.explain(kin, {}):
            continue
        if kernels is None:
            asked = [(config, checks.left(config)) for config in default_kernels(space, kin)]
            kernels = [
                (config, space.compile_view(config), left) for config, left in asked if left is not None
            ]
        new = [(view, config) for config, view, left in kernels if view not in found and all_hold(left, kin)]
        if not new and not any(all_hold(left, kin) for _, view, left in kernels if view in found):
            safe = space.default(kin)
            new = [(space.compile_view(safe), safe)]
        for view, config in new:
            found.setdefault(view, (kin, config))
    return tuple(found.values())


@lru_cache(maxsize=8)
def _of_all(query: Query) -> tuple[tuple[float, Config], ...]:
    """Return the best of the whole space by the fit that are asked for, few alike, worked out once."""
    space, problem = query.space, query.problem
    kernels = list(every_kernel(space, problem, dict(query.fixed)))
    if not kernels:
        return ()
    looked_at = KernelSet(space, problem, query.sm_count, kernels, _LOOKED_AT)
    found = islice(looked_at.by_time(problem), _LOOKED_AT)
    kept = ((us, _as_asked(query, looked_at, config)) for us, config in found)
    return tuple(
        islice(_unlike((us, config) for us, config in kept if query.keeps(config)), 2 * _BY_FIT_OF_ALL)
    )


def _as_asked(query: Query, kernels: KernelSet, config: Config) -> Config:
    """Return ``config`` with the best of the orders of tiles that are asked for."""
    if query.keeps(config):
        return config
    return kernels.ordered(query.problem, config, config.integer("split_k"), dict(query.fixed))


def _unlike(found: Iterable[tuple[float, Config]]) -> Iterator[tuple[float, Config]]:
    """Yield the first few of each tile, swapped or not, split or not."""
    seen: Counter[tuple[Value, ...]] = Counter()
    for us, config in found:
        work = config["tile_shape_mn"], config["swap_ab"], config["split_k"] != 1
        seen[work] += 1
        if seen[work] <= _ALIKE:
            yield us, config


def _by_fit(limit: int) -> int:
    """Return how many default candidates are among ``limit`` kernels: fewer where others join by the fit."""
    return min(_BY_FIT, limit // 3 if limit >= _WIDE else 3 * limit // 4)


def _is_plain(config: Config) -> bool:
    """Whether a fit says something of ``config`` as it is."""
    own = config.source == "cutegen" and not config.algorithm
    return own and not config.flag("stream_k") and config.get("reduction", "fixed") == "fixed"


class GemmStrategy:
    """Chooses GEMM configs by predicted time."""

    @classmethod
    def of(cls, arch: Arch) -> GemmStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        return cls() if is_modelled(arch) else None

    def rank(self, query: Query, limit: int, *, default: Config | None = None) -> list[Config]:
        """Return the default, then the best by the fit where there is one, then the best by the physics.

        The fit knows the default candidates, which a warm cache holds, and orders what the physics likes; the
        physics ranks the whole space and sees to it that the work is cut up in several ways. Raises as
        :func:`proposals.rank`.
        """
        first = self.likely(query, limit)
        if first and limit >= _WIDE and is_fitted(query.problem, query.space.arch):
            fit = fit_of(query.space.arch)

            def by_fit(configs: Sequence[Config]) -> Sequence[float]:
                return fitted_times_us(query.problem, configs, query.sm_count, fit)

            first += self._steady(query)
            first += proposals.promising(query, by_fit, _by_fit(limit))
        return proposals.rank(query, limit, default=default, first=first)

    def _steady(self, query: Query) -> list[Config]:
        """Return one kernel for each cluster that loses little whatever the clock, if power may limit it."""
        space, problem, sm_count = query.space, query.problem, query.sm_count
        if not is_heavy(problem):
            return []
        wanted = {k: [v for v in space.domains.get(k, ()) if v in values] for k, values in _STEADY.items()}
        kernels = list(every_kernel(space, problem, wanted)) if all(wanted.values()) else []
        if not kernels:
            return []
        predict = self.predictor(space, problem, sm_count)
        found: dict[Value, tuple[float, Config]] = {}
        for _, config in KernelSet(space, problem, sm_count, kernels).by_time(problem):
            parted = [config.replace(stream_k=True)] if "stream_k" in config else []
            for form in (config, *parted):
                us = predict(form) if query.keeps(form) and not space.explain(problem, form) else None
                known = found.get(form["cluster_shape_mn"])
                if us is not None and (known is None or us < known[0]):
                    found[form["cluster_shape_mn"]] = us, form
        default, known_us = self.default(space, problem, sm_count) or Default(space.default(problem))
        fastest = known_us or predict(default) or math.inf
        return [config for us, config in found.values() if us <= fastest * _STEADY_SLACK]

    def likely(self, query: Query, limit: int, *, everywhere: bool = False) -> list[Config]:
        """Return the best by the fit that are asked for, each of another kernel; none without a fit.

        They are default candidates, which a warm cache holds; from ``everywhere``, half of them. Of products
        with factors of blocks, which no fit knows, they are the best of these by the physics.
        """
        space, problem, sm_count = query.space, query.problem, query.sm_count
        if not is_fitted(problem, space.arch):
            if not problem.has_factors:
                return []
            kept = filter(query.keeps, defaults_by_time(space, problem, sm_count))
            return list(islice(kept, 3 * limit // 4))
        count = min(_BY_FIT_OF_ALL, 3 * limit // 4) if everywhere else _by_fit(limit)
        kernels = kernel_set(space, problem, sm_count)
        best = kernels.by_time(problem, rest=False)
        found: dict[Config, tuple[float, Config]] = {}
        for us, config in islice(best, -(-count // 2) if everywhere else count):
            config = _as_asked(query, kernels, config)
            if query.keeps(config):
                found.setdefault(space.compile_view(config), (us, config))
        for us, config in _of_all(query) if everywhere else ():
            if len(found) < count:
                found.setdefault(space.compile_view(config), (us, config))
        return [config for _, config in sorted(found.values(), key=lambda each: each[0])]

    refine = staticmethod(proposals.refine)
    precompute = staticmethod(proposals.precompute)

    def prepare(self, space: Space, problem: Problem, sm_count: int, library: OpenLibrary) -> None:
        """Make the default candidates ready to be looked at, in C where that was compiled."""
        if is_fitted(problem, space.arch):
            kernel_set(space, problem, sm_count).prepare(library)
            torch_mm_of(space.arch).prepare(library)

    def default(self, space: Space, problem: Problem, sm_count: int) -> Default | None:
        """Return the fastest predicted of the space's default candidates, None if none is valid.

        They are few, so that programs that never tune compile few kernels.
        """
        if is_fitted(problem, space.arch):
            return kernel_set(space, problem, sm_count).fastest(problem)
        first = next(defaults_by_time(space, problem, sm_count), None)
        return None if first is None else Default(first)

    def default_set(self, space: Space, problem: Problem, sm_count: int) -> Sequence[tuple[Problem, Config]]:
        """Return the space's default candidates, and its own default where none of them is valid."""
        return _default_set(space, problem)

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile along m or n; swapped kernels have them the other way round."""
        axes = "nm" if config.get("swap_ab", False) else "mn"
        shape = config.get("tile_shape_mn") or config.get("mma_tiler_mn")
        return as_pair(shape)[axes.index(size)] if shape and size in axes else 1

    def predictor(
        self, space: Space, problem: Problem, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return the model's time of a config; None for kernels that are not of cutegen's templates."""
        kernels = kernel_set(space, problem, sm_count) if is_fitted(problem, space.arch) else None
        estimators: list[Estimator] = []  # made when asked for: the fit answers most calls
        together: dict[Config, float] = {}
        if kernels is not None and configs:
            plain = [*filter(_is_plain, configs)]
            times = fitted_times_us(problem, plain, sm_count, fit_of(space.arch))
            together = dict(zip(plain, times, strict=True))

        def physics(config: Config) -> float:
            if not estimators:
                estimators.append(estimator_of(problem, space.arch, sm_count))
            return estimators[0].estimate(config, space.derive(config, problem, space.arch)).time_us

        def predict(config: Config) -> float | None:
            if config.source != "cutegen":
                return None
            if kernels is None:
                return physics(config)
            known = together.get(config)
            if known is not None:
                return known
            plain = config.replace(stream_k=False, reduction="fixed")
            # Of these two knobs nothing was measured: what they change is taken from the analytic model.
            share = 1.0 if plain == config else physics(config) / physics(plain)
            return share * fitted_us(problem, plain, sm_count, fit_of(space.arch))

        return predict
