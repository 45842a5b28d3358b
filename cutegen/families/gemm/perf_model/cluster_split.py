"""Which kernels whose clusters split k to try: tiles that fit the problem, by the time of a GEMM like them.

Blocks that share a tile, each with a part of k, take about as long as the blocks of a GEMM of as many times
the columns and a part of the depth: they load as many bytes and multiply as much. What they exchange in the
end is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

from cutegen.arch import Arch, resident_clusters
from cutegen.errors import ProblemError, UsageError
from cutegen.families.gemm.perf_model.strategy import GemmStrategy
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.family import Predictor
from cutegen.space import Config, Space, Value, as_integer, as_pair

__all__ = ["ClusterSplitStrategy"]

#: Rows of a tile and the warpgroups that share them.
_ROWS = ((64, 1), (128, 2), (192, 3), (256, 2))
#: Most tiles along the columns of a tile.
_MOST_TILES = 8
#: Elements of a swizzled line along k.
_LINE = 64
#: Microseconds that the blocks of a tile wait for one another, and bytes of a microsecond that one sends.
_MEET_US, _BYTES_US = 0.5, 60_000
#: Refinement starts from so many of the fastest.
_PARENTS = 3
#: Kernels that are known at once.
_LIKELY = 3


class ClusterSplitStrategy:
    """Chooses kernels whose clusters split k by predicted time; every kernel is one config."""

    def __init__(self, general: GemmStrategy) -> None:
        self._general = general

    @classmethod
    def of(cls, arch: Arch) -> ClusterSplitStrategy | None:
        """Return the strategy for ``arch``; None where GEMMs have no model."""
        general = GemmStrategy.of(arch)
        return None if general is None else cls(general)

    def rank(
        self,
        space: Space,
        problem: Problem,
        sm_count: int,
        limit: int,
        fixed: Mapping[str, Sequence[Value]] | None = None,
        *,
        default: Config | None = None,
    ) -> list[Config]:
        """Return the default and the best predicted; of a tile that is split alike only one.

        Raises:
            UsageError: ``limit`` is not positive.
        """
        if limit < 1:
            raise UsageError(f"limit={limit} kernels must be at least 1")
        kept = [c for c in self._by_time(space, problem, sm_count) if _keeps_to(c, fixed)]
        first: dict[tuple[Value, ...], Config] = {}
        for config in kept:
            first.setdefault(tuple(config[k] for k in ("tile_shape_mn", "cluster_k", "swap_ab")), config)
        lead = [default] if default in kept and default is not None else []
        return list(dict.fromkeys([*lead, *first.values(), *kept]))[:limit]

    def likely(
        self,
        space: Space,
        problem: Problem,
        sm_count: int,
        limit: int,
        fixed: Mapping[str, Sequence[Value]] | None = None,
        *,
        everywhere: bool = False,
    ) -> list[Config]:
        """Return the best predicted few: they are known at once."""
        return self.rank(space, problem, sm_count, min(limit, _LIKELY), fixed)

    def refine(
        self,
        space: Space,
        problem: Problem,
        results: Mapping[Config, float | None],
        limit: int,
        *,
        sm_count: int | None = None,
        fixed: Mapping[str, Sequence[Value]] | None = None,
        new_kernels: bool = True,
    ) -> list[Config]:
        """Return untried neighbours of the fastest, by their parent's time and the ratio of predictions."""
        if not new_kernels:
            return []  # no two configs share a kernel
        predict = self.predictor(space, problem, sm_count or space.arch.nominal_sm_count)
        timed = sorted((time, space.simplicity(c), c) for c, time in results.items() if time is not None)
        scored: dict[Config, float] = {}
        for time, _, parent in timed[:_PARENTS]:
            for near in space.neighbours(problem, parent):
                if near not in results and _keeps_to(near, fixed):
                    score = time * (predict(near) or 0.0) / (predict(parent) or 1.0)
                    scored[near] = min(score, scored.get(near, score))
        return sorted(scored, key=lambda config: (scored[config], space.simplicity(config)))[:limit]

    def precompute(
        self,
        space: Space,
        problem: Problem,
        sm_count: int,
        fixed: Mapping[str, Sequence[Value]] | None = None,
    ) -> None:
        """Do nothing: predictions take no time worth saving."""

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile along m or n; swapped kernels have them the other way round."""
        return self._general.tile(config, size)

    def default(self, space: Space, problem: Problem, sm_count: int) -> Config:
        """Return the config that is predicted to be fastest; the space's own where no tile fits."""
        best = self._by_time(space, problem, sm_count)
        return best[0] if best else space.default(problem)

    def default_set(self, space: Space, problem: Problem, sm_count: int) -> Sequence[tuple[Problem, Config]]:
        """Return nothing: the general algorithm answers what nobody tuned."""
        return ()

    def predictor(
        self, space: Space, problem: Problem, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return the model's time of a config."""
        own = [config for config in configs if config.algorithm == space.algorithm]
        general = find_space(space.family, space.arch)
        predictors: dict[int, Predictor] = {}

        def predict(config: Config) -> float | None:
            parts = as_integer(config["cluster_k"])
            if parts not in predictors:
                alike = _alike(problem, parts)
                known = [_as_general(other) for other in own if other["cluster_k"] == parts]
                predictors[parts] = self._general.predictor(general, alike, sm_count, known)
            time_us = predictors[parts](_as_general(config))
            return None if time_us is None else time_us + _exchange_us(config, parts)

        return predict

    def _by_time(self, space: Space, problem: Problem, sm_count: int) -> list[Config]:
        return list(_ordered(self, space, problem, sm_count))


@lru_cache(maxsize=64)
def _ordered(
    strategy: ClusterSplitStrategy, space: Space, problem: Problem, sm_count: int
) -> tuple[Config, ...]:
    if space.explain(problem, {}):
        return ()
    found = [
        config
        for config in _fitting(problem)
        if _at_once(problem, config, sm_count) and space.is_valid(problem, config)
    ]
    predict = strategy.predictor(space, problem, sm_count, found)
    return tuple(sorted(found, key=lambda config: predict(config) or 0.0))


def _at_once(problem: Problem, config: Config, sm_count: int) -> bool:
    """Whether all clusters run at once: the general model knows nothing of clusters that are left over."""
    rows, columns = (problem.n, problem.m) if config["swap_ab"] else (problem.m, problem.n)
    (tile_m, tile_n), (along_m, along_n) = (
        as_pair(config["tile_shape_mn"]),
        as_pair(config["cluster_shape_mn"]),
    )
    clusters = -(-rows // (tile_m * along_m)) * -(-columns // (tile_n * along_n)) * problem.batch
    blocks = along_m * along_n * as_integer(config["cluster_k"])
    return clusters <= resident_clusters(sm_count, blocks)


def _fitting(problem: Problem) -> Iterator[Config]:
    """Yield configs whose tiles divide the columns of the kernel evenly, as far as tiles are that narrow."""
    for swap_ab, (rows, warpgroups) in product((True, False), _ROWS):
        columns = problem.m if swap_ab else problem.n
        widths = {-(-columns // (8 * count)) * 8 for count in range(1, _MOST_TILES + 1)}
        for width in sorted(width for width in widths if 16 <= width <= 256):
            for lines, cluster, parts in product((1, 2), ((1, 1), (2, 1), (1, 2)), (2, 3, 4)):
                yield Config(
                    {
                        "algorithm": "cluster_split",
                        "tile_shape_mn": (rows, width),
                        "tile_k": lines * _LINE,
                        "cluster_shape_mn": cluster,
                        "cluster_k": parts,
                        "mma_warpgroups": warpgroups,
                        "swap_ab": swap_ab,
                        "use_tma_store": not problem.unaligned_out,
                        "use_pdl": False,
                    }
                )


def _alike(problem: Problem, parts: int) -> Problem:
    """Return a GEMM of as many times the columns and a part of the depth."""
    depth = max(8, problem.k // parts // 8 * 8)
    try:
        return problem.resized(problem.m, problem.n * parts, depth, problem.batch)
    except ProblemError:
        return problem


def _as_general(config: Config) -> Config:
    """Return the config of a block that has a tile to itself."""
    kept = {knob: value for knob, value in config.items() if knob not in ("algorithm", "cluster_k")}
    return Config(
        {
            **kept,
            "pingpong": False,
            "stream_k": False,
            "reduction": "fixed",
            "split_k": 1,
            "swizzle_size": 1,
            "raster_along_m": False,
        }
    )


def _exchange_us(config: Config, parts: int) -> float:
    rows, columns = as_pair(config["tile_shape_mn"])
    return _MEET_US + rows * columns * 4 * (parts - 1) / parts / _BYTES_US


def _keeps_to(config: Config, fixed: Mapping[str, Sequence[Value]] | None) -> bool:
    return all(config.get(knob) in values for knob, values in (fixed or {}).items())
