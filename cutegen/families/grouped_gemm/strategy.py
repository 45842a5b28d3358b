"""The GEMM's performance model, asked about the batched GEMM that has about the tiles of a grouped one.

It chooses from the space of that GEMM, or from that of gated GEMMs, whose rules take a GEMM's problem too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from cutegen.arch import Arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.borrowed import BorrowedStrategy
from cutegen.families.gemm.perf_model.fitted import is_fitted
from cutegen.families.gemm.perf_model.strategy import GemmStrategy, defaults_by_time
from cutegen.families.grouped_gemm.batched_gemm import (
    activation_of,
    batched_gemm,
    equal_tiles,
    with_gemm_knobs,
    without_gemm_knobs,
)
from cutegen.families.grouped_gemm.group_fit import load_group_fit
from cutegen.families.grouped_gemm.group_rows import is_masked, mean_rows, row_tiles
from cutegen.families.registry import find_space
from cutegen.space import Config, Query, Space, Value
from cutegen.strategy import Default

__all__ = ["GatedGroupedStrategy", "GroupedStrategy"]

#: So many default candidates of the GEMM are compared with our own.
_LOOKED_AT = 12
#: From so many mean rows of a group on, kernels take longer than the GEMM's model says if tiles have
#: 64 rows, 256 swapped rows, or are swapped in clusters of one block. Source: times of 50 untuned problems
#: and 8 kernels each on an H200; with these factors, and those of uneven groups, defaults were at 0.985 of
#: the fastest in geometric mean, where the model alone was at 0.950.
_MANY, _SHORT, _TALL, _ALONE = 128, 1.1, 1.05, 1.03
#: Mean rows of a group from which uneven groups make more tiles. Source: as above.
_UNEVEN = 64
#: Swapped tiles of so many rows whose warpgroups do not take turns: nothing hides their epilogue. Source: an
#: H200, docs/results/grouped_gated_gemm.json.
_HIGH, _NO_TURNS = 64, 1.03


def _no_turns(config: Config) -> float:
    """Return how much longer a gated kernel takes than equal groups do by whether warpgroups take turns."""
    high = config.flag("swap_ab") and config.pair("tile_shape_mn")[1] >= _HIGH
    return _NO_TURNS if high and not config.flag("pingpong") else 1.0


def _slower(config: Config, problem: DeclaredProblem) -> float:
    """Return how much longer a kernel takes than the GEMM's model says, by what is known of groups.

    With probabilities of 1 / rank, more tiles take longer, though not as much: by their square root.
    """
    factor, rows, swapped = 1.0, mean_rows(problem), config.flag("swap_ab")
    tile, cluster = config.pair("tile_shape_mn"), config.pair("cluster_shape_mn")
    if rows >= _UNEVEN and problem.tokens == "zipf":
        height = tile[swapped] * cluster[swapped]
        factor *= math.sqrt(row_tiles(problem, height) / equal_tiles(problem, height))
    if rows >= _MANY:
        factor *= _SHORT if tile[0] == 64 else 1.0
        factor *= _TALL if swapped and tile[0] == 256 else 1.0
        factor *= _ALONE if swapped and cluster == (1, 1) else 1.0
    return factor


@lru_cache(maxsize=256)
def _own_candidates(space: Space, asked: Space, problem: DeclaredProblem) -> tuple[Mapping[str, Value], ...]:
    """Return default candidates that the GEMM does not have."""
    theirs = [without_gemm_knobs(knobs) for knobs in asked.default_candidates(batched_gemm(problem))]
    return tuple(knobs for knobs in space.default_candidates(problem) if Config(knobs) not in theirs)


@lru_cache(maxsize=256)
def _default_views(space: Space, problem: DeclaredProblem) -> frozenset[Config]:
    """Return the kernels that a warm-up compiles: of what the GEMM tries, those that were measured here."""
    safe = space.default(problem)
    return frozenset(space.compile_view(safe.replace(**knobs)) for knobs in space.default_candidates(problem))


class GroupedStrategy(BorrowedStrategy):
    """Chooses configs of grouped GEMMs by predicted time; of what the GEMM tries some cut k."""

    @classmethod
    def of(cls, arch: Arch) -> GroupedStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        gemm = GemmStrategy.of(arch)
        return None if gemm is None else cls(gemm, batched_gemm)

    def asked_space(self, space: Space, problem: DeclaredProblem) -> Space:
        """Return the space of the GEMM, or of gated GEMMs."""
        return find_space("gated_gemm" if activation_of(problem) else "gemm", space.arch)

    def theirs(self, asked: Space, config: Mapping[str, Value]) -> Config:
        """Return a config with the knobs of a GEMM whose k is whole."""
        known = with_gemm_knobs(config)
        return Config({knob: value for knob, value in known.items() if knob in asked.domains})

    def ours(self, space: Space, problem: DeclaredProblem, configs: Iterable[Config]) -> list[Config]:
        """Return configs that leave k whole and are valid, each once."""
        found = dict.fromkeys(without_gemm_knobs(config) for config in configs if config["split_k"] == 1)
        return [config for config in found if space.is_valid(problem, config)]

    def rank(self, query: Query, limit: int, *, default: Config | None = None) -> list[Config]:
        """Return the default, then what the GEMM tries first, up to ``limit`` with its default kernels."""
        space, problem = query.space, query.problem
        first = default or space.default(problem)
        found = [first, *super().rank(query, limit, default=first)]
        known = {space.compile_view(config) for config in found}
        others = self._defaults(space, problem, query.sm_count)
        more = (config for config in others if space.compile_view(config) not in known)
        found = list(dict.fromkeys([*found, *islice(more, max(0, limit - len(known)))]))
        return [*filter(query.keeps, found)]

    def default(self, space: Space, problem: DeclaredProblem, sm_count: int) -> Default:
        """Return the fastest predicted of the default candidates that leave k whole.

        The first ones of the GEMM's model and our own are compared by what is known of groups, too.
        """
        safe = space.default(problem)
        theirs = [*islice(self._defaults(space, problem, sm_count), _LOOKED_AT)]
        like = problem.with_sizes(m=1)
        own = [safe.replace(**knobs) for knobs in _own_candidates(space, self.asked_space(space, like), like)]
        found = [*theirs, *(config for config in own if space.is_valid(problem, config))]
        if not theirs:
            return Default(next(iter(found), safe))
        return Default(self.fastest(space, problem, sm_count, found))

    def fastest(
        self, space: Space, problem: DeclaredProblem, sm_count: int, found: Sequence[Config]
    ) -> Config:
        """Return the fastest predicted: by the fit to grouped GEMMs where it knows the problem."""
        predict = self.predictor(space, problem, sm_count, found)
        equal = {config: predict(config) or math.inf for config in found}
        known = [config for config in found if math.isfinite(equal[config])]
        if not known:
            return found[0]
        if is_masked(problem) or not is_fitted(self._as_gemm(problem), space.arch):
            return min(known, key=lambda config: equal[config] * self.slower(config, problem))
        times_us = load_group_fit().times_us(problem, known, [equal[config] for config in known], sm_count)
        return min(zip(times_us, known, strict=True), key=lambda pair: pair[0])[1]

    def slower(self, config: Config, problem: DeclaredProblem) -> float:
        """Return what a prediction of the GEMM's model is multiplied by."""
        return _slower(config, problem)

    def _defaults(self, space: Space, problem: DeclaredProblem, sm_count: int) -> Iterator[Config]:
        """Yield the GEMM's default candidates that are ours, the fastest predicted first."""
        seen, kernels = set(), _default_views(space, problem.with_sizes(m=1))
        for theirs in defaults_by_time(self.asked_space(space, problem), self._as_gemm(problem), sm_count):
            config = without_gemm_knobs(theirs)
            if theirs["split_k"] != 1 or config in seen or space.compile_view(config) not in kernels:
                continue
            if space.is_valid(problem, config):
                seen.add(config)
                yield config


class GatedGroupedStrategy(GroupedStrategy):
    """The same for gated GEMMs."""

    def slower(self, config: Config, problem: DeclaredProblem) -> float:
        """Return what a prediction is multiplied by, as for groups and for gated GEMMs."""
        return super().slower(config, problem) * _no_turns(config)

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along m or n; along n half of it are gates."""
        return super().tile(config, size) // (2 if size == "n" else 1)
