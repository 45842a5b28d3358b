"""What a grouped GEMM takes by three questions to the fit of GEMMs, whose answers err differently.

The batched GEMM of equal groups has whole tiles where groups have parts of them. So the fit is also asked
about batches of fewer tiles and of one more, and about one GEMM of as many tiles as there are in all, a few
more and a few less. The geometric mean of these answers errs less than each.
"""

from __future__ import annotations

import math

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.fitted import Fit, fitted_us
from cutegen.families.gemm.problem import Problem
from cutegen.families.grouped_gemm.batched_gemm import batched_gemm, gemm_of, with_gemm_knobs
from cutegen.families.grouped_gemm.group_rows import groups_with_rows, mean_rows, row_tiles
from cutegen.space import Config

__all__ = ["UnevenGroups", "rough_us"]

#: Tiles that are rounded up in each group are together about the square root of so many groups' tiles more
#: or fewer than expected: two standard deviations. Source: replayed, as the mean of the answers is: of 96
#: untuned problems with 6 kernels each on an H200 (docs/results/untuned_products_21.json) the choice is at
#: 0.973 of the fastest in geometric mean, by the batched GEMM alone at 0.963; of 66 others at 0.986, 0.985.
_ROUNDED = 1 / 3
#: Mean rows of a group from which uneven groups make more tiles. Source: times of 50 untuned problems and 8
#: kernels each on an H200.
_UNEVEN = 64


def rough_us(problem: DeclaredProblem, config: Config, equal_us: float) -> float:
    """Return the microseconds of ``config`` by those that the GEMM of equal groups is predicted to take.

    With probabilities of 1 / rank, more tiles take longer, though not as much: by their square root.
    """
    if mean_rows(problem) < _UNEVEN or problem.tokens != "zipf":
        return equal_us
    height = _height(config)
    return equal_us * math.sqrt(row_tiles(problem, height) / _equal_tiles(problem, height))


class UnevenGroups:
    """Asks the fit about the kernels of one problem.

    Args:
        problem: Of a family whose groups have 16-bit operands.
        sm_count: Multiprocessors.
        fit: The fit.
    """

    def __init__(self, problem: DeclaredProblem, sm_count: int, fit: Fit) -> None:
        self._problem, self._sm_count, self._fit = problem, sm_count, fit

    def time_us(self, config: Config, equal_us: float) -> float:
        """Return the microseconds of ``config``, of which equal groups are predicted to take ``equal_us``."""
        known, height = Config(with_gemm_knobs(config)), _height(config)
        in_one = equal_us * self._of_tiles(known, height)
        product = rough_us(self._problem, config, equal_us) * self._in_batches(known, height) * in_one
        return float(product ** (1 / 3))

    def _in_batches(self, config: Config, height: int) -> float:
        """Return the time of groups whose mean tiles are between two whole numbers."""
        batches = batched_gemm(self._problem).batch
        tiles = row_tiles(self._problem, height) / batches
        whole = max(1, int(tiles))
        rest = max(0.0, tiles - whole)
        fewer, more = (
            self._ask(config, gemm_of(self._problem, count * height, batches)) for count in (whole, whole + 1)
        )
        return (1 - rest) * fewer + rest * more

    def _of_tiles(self, config: Config, height: int) -> float:
        """Return how much longer the expected tiles take than those of equal groups, all of one GEMM."""
        tiles = row_tiles(self._problem, height)
        apart = math.sqrt(_ROUNDED * groups_with_rows(self._problem))
        times = [self._one(config, height, round(count)) for count in (tiles - apart, tiles, tiles + apart)]
        equal = self._one(config, height, _equal_tiles(self._problem, height))
        return sum(times) / len(times) / equal

    def _one(self, config: Config, height: int, tiles: int) -> float:
        return self._ask(config, gemm_of(self._problem, max(1, tiles) * height, 1))

    def _ask(self, config: Config, gemm: Problem) -> float:
        return fitted_us(gemm, config, self._sm_count, self._fit)


def _equal_tiles(problem: DeclaredProblem, height: int) -> int:
    """Return the tiles of equal groups."""
    gemm = batched_gemm(problem)
    return gemm.batch * -(-gemm.m // height)


def _height(config: Config) -> int:
    """Return the rows of a cluster's tiles."""
    side = config.flag("swap_ab")
    return config.pair("tile_shape_mn")[side] * config.pair("cluster_shape_mn")[side]
