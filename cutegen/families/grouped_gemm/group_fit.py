"""What a grouped GEMM takes: the time of a batched GEMM of equal groups, corrected by boosted trees.

The batched GEMM has whole tiles where groups have parts of them. Trees, which ``tools/fit_groups.py`` fits to
recorded times, see how many tiles and waves groups make whose rows are drawn at random. They tell the
candidates of one problem apart: each feature counts by itself, and beside its mean over the candidates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.grouped_gemm.batched_gemm import activation_of, equal_tiles
from cutegen.families.grouped_gemm.group_rows import groups_with_rows, row_tiles, total_rows
from cutegen.space import Config

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cutegen.families.gemm.perf_model.trees import Array

__all__ = ["FEATURES", "FILE", "GroupFit", "describe", "load_group_fit"]

FILE = Path(__file__).with_name("fit_sm_90a.json")
#: What trees may ask of a candidate. Logarithms are natural ones; rows and columns are those of the output,
#: height and width those of a cluster's tiles, and what is drawn is a mean over draws of rows.
FEATURES = (
    "equal_us_log", "rows_log", "groups_log", "mean_rows_log", "n_log", "k_log",
    "zipf", "gated", "unaligned",
    "swap_ab", "pingpong", "mma_warpgroups", "tile_k", "tile_m", "tile_n",
    "cluster_rows", "cluster_columns", "cluster_size",
    "height_log", "width_log", "filled_rows", "filled_columns", "rows_to_height",
    "waves_log", "few_waves", "last_wave", "tiles_to_equal_log", "waves_to_equal_log",
    "drawn_waves", "drawn_waves_log", "drawn_work", "drawn_work_log",
    "load_log", "shared_load_log", "ctas_log", "steps", "steps_log",
    "drawn_tiles_log", "largest_group", "drawn_last_wave_log", "drawn_filled_rows",
)  # fmt: skip
#: Draws of rows, of which the mean number of waves is a feature.
_DRAWS = 8
#: Waves from which more are all the same.
_FEW_WAVES = 4.0


@dataclass(frozen=True)
class GroupFit:
    """Trees, and what they were fitted to.

    Attributes:
        provenance: Where the times come from, and what the choice loses: for people.
        trees: Corrections of the logarithm of the time of equal groups.
    """

    provenance: Mapping[str, Any]
    trees: Trees

    def times_us(
        self, problem: DeclaredProblem, configs: Sequence[Config], equal_us: Sequence[float], sm_count: int
    ) -> list[float]:
        """Return microseconds of candidates, which are right beside each other rather than by themselves.

        Args:
            problem: Of a family whose groups have 16-bit operands.
            configs: The candidates.
            equal_us: What the batched GEMM of equal groups is predicted to take with each.
            sm_count: Multiprocessors.
        """
        import numpy as np

        features = describe(problem, configs, equal_us, sm_count)
        found = np.array(equal_us) * np.exp(self.trees.sums(features) + self.trees.base)
        return [float(time_us) for time_us in found]


@cache
def load_group_fit() -> GroupFit:
    """Return the fit that the package ships."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return GroupFit(found["provenance"], Trees.of(found, 2 * len(FEATURES)))


def describe(
    problem: DeclaredProblem, configs: Sequence[Config], equal_us: Sequence[float], sm_count: int
) -> Array:
    """Return the features of each candidate, a column for each, then how far each is from their mean."""
    import numpy as np

    columns = [[*_features(problem, c, us, sm_count)] for c, us in zip(configs, equal_us, strict=True)]
    own = np.array(columns, np.float32).T
    return np.concatenate([own, own - own.mean(1, keepdims=True)])


def _features(problem: DeclaredProblem, config: Config, equal_us: float, sm_count: int) -> Iterator[float]:
    """Yield :data:`FEATURES` of one candidate."""
    swapped = config.flag("swap_ab")
    tile, cluster = config.pair("tile_shape_mn"), config.pair("cluster_shape_mn")
    height, width = (tile[side] * cluster[side] for side in (swapped, not swapped))
    rows, groups, n = total_rows(problem), groups_with_rows(problem), _columns(problem)
    columns, slots = -(-n // width), max(1, sm_count // (cluster[0] * cluster[1]))
    tiles, equal = row_tiles(problem, height), equal_tiles(problem, height)
    waves = tiles * columns / slots
    drawn = _Drawn.of(problem, height, columns, slots)
    steps = problem.k / config.integer("tile_k")
    yield from map(log, (equal_us, rows, groups, rows / groups, n, problem.k))
    yield from (problem.tokens == "zipf", activation_of(problem) != "", problem.unaligned)
    yield from (swapped, config.flag("pingpong"), config.integer("mma_warpgroups"), config.integer("tile_k"))
    yield from (*tile, cluster[swapped], cluster[not swapped], cluster[0] * cluster[1])
    yield from (log(height), log(width), rows / (tiles * height), n / (columns * width))
    yield from (rows / groups / height, log(waves), min(waves, _FEW_WAVES), ceil(waves) / waves)
    yield from (log(tiles / equal), log(ceil(waves) / ceil(equal * columns / slots)))
    yield from (drawn.waves, log(drawn.waves), drawn.waves * height * width)
    yield from (log(drawn.waves * tile[0] * tile[1]), log(drawn.waves * (tile[0] + tile[1])))
    yield log(drawn.waves * (tile[0] / cluster[1] + tile[1] / cluster[0]))
    yield from (log(min(sm_count, drawn.clusters * cluster[0] * cluster[1])), steps * drawn.waves, log(steps))
    yield from (log(drawn.tiles), drawn.largest * tile[swapped] * tile[not swapped])
    yield from (log(drawn.waves * slots / drawn.clusters), drawn.filled)


class _Drawn(NamedTuple):
    """What groups whose rows are drawn at random come to, as means over the draws.

    Attributes:
        waves: Waves of clusters, whole ones.
        clusters: Clusters.
        tiles: Rows of tiles of a group that has rows.
        largest: Rows of tiles of the largest group.
        filled: Part of its rows of tiles that a group fills.
    """

    waves: float
    clusters: float
    tiles: float
    largest: float
    filled: float

    @classmethod
    def of(cls, problem: DeclaredProblem, height: int, columns: int, slots: int) -> _Drawn:
        import numpy as np

        rows = _drawn_rows(problem)
        tiles = -(-rows // height)
        clusters = tiles.sum(1) * columns
        return cls(
            float(np.ceil(clusters / slots).mean()),
            float(clusters.mean()),
            float(tiles.sum() / (rows > 0).sum()),
            float(tiles.max(1).mean()),
            float((rows / (np.maximum(tiles, 1) * height)).mean()),
        )


def _columns(problem: DeclaredProblem) -> int:
    """Return the columns that are multiplied: gated GEMMs have two for each of the output."""
    return int(problem.n) * (2 if activation_of(problem) else 1)


@lru_cache(maxsize=256)
def _drawn_rows(problem: DeclaredProblem) -> NDArray[numpy.int64]:
    """Return rows of each group, a row for each of some draws: always the same ones."""
    import numpy as np

    groups = int(problem.g)
    odds = 1 / np.arange(1, groups + 1) if problem.tokens == "zipf" else np.ones(groups)
    return np.random.default_rng(groups).multinomial(total_rows(problem), odds / odds.sum(), _DRAWS)
