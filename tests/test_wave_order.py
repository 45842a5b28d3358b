"""Orders of one wave of tiles: what each GPC loads, counted by a simulation of turns."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.kernel_set import kernel_set
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.wave_order import FIRST_TURNS, GPCS, Wave, least_loads, loads
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
ORDERS = [(swizzle, along_m) for swizzle, along_m in product((1, 2, 4, 7, 8), (False, True))]


def located(number: int, wave: Wave, swizzle: int, along_m: bool) -> tuple[int, int, int]:
    """Return part, row and column of a cluster, as the kernels work it out from its number."""
    part, number = divmod(number, wave.clusters_m * wave.clusters_n)
    major, minor = (wave.clusters_m, wave.clusters_n) if along_m else (wave.clusters_n, wave.clusters_m)
    band = min(swizzle, minor)
    at, within = divmod(number, band * major)
    last = at == -(-minor // band) - 1
    of_major, of_minor = divmod(within, minor - at * band if last else band)
    of_minor += at * band
    return (part, of_major, of_minor) if along_m else (part, of_minor, of_major)


def simulated(wave: Wave, swizzle: int, along_m: bool) -> int:
    """Return what :func:`loads` should, giving clusters to GPCs one by one."""
    loaded: list[tuple[set[object], set[object]]] = [(set(), set()) for _ in range(GPCS)]
    turn, room = 0, [FIRST_TURNS // wave.blocks // GPCS, *[10**6] * (GPCS - 1)]
    for number in range(wave.clusters_m * wave.clusters_n * wave.parts):
        while not room[turn % GPCS]:
            turn += 1
        gpc = turn % GPCS
        room[gpc] -= 1
        turn += 1
        part, row, column = located(number, wave, swizzle, along_m)
        loaded[gpc][0].add((part, row))
        loaded[gpc][1].add((part, column))
    return sum(wave.rows * len(rows) + wave.columns * len(columns) for rows, columns in loaded)


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_loads_are_those_of_clusters_given_out_one_by_one(blocks: int) -> None:
    generator = Random(blocks)
    for _ in range(60):
        clusters = generator.randint(1, 12), generator.randint(1, 12), generator.choice([1, 1, 3])
        wave = Wave(*clusters, blocks, rows=generator.randint(1, 512), columns=generator.randint(1, 512))
        assert loads(wave, ORDERS) == [simulated(wave, *order) for order in ORDERS]


def tiling_of(problem: Problem) -> Tiling:
    return Tiling(problem, 132, find_machine(ARCH))


def kernel(problem: Problem, tile: tuple[int, int], cluster: tuple[int, int]) -> Config:
    knobs = {"tile_shape_mn": tile, "cluster_shape_mn": cluster, "mma_warpgroups": 2, "swap_ab": True}
    return SPACE.default(problem).replace(**knobs)


def test_clusters_of_a_gpc_share_the_longer_operand() -> None:
    """Rows of weights that three clusters read are read in one GPC, where there are eight or more of them."""
    problem = Problem(290, 4608, 4096)
    wave = tiling_of(problem).wave(kernel(problem, (128, 104), (4, 1)), 1)
    found = dict(zip(ORDERS, loads(wave, ORDERS), strict=True))
    order = least_loads(wave, ORDERS)
    assert order == (8, False) and found[order] == min(found.values())
    assert found[1, True] > 1.3 * found[order]


def test_one_row_of_clusters_has_but_one_order() -> None:
    problem = Problem(100, 4608, 4096)
    wave = tiling_of(problem).wave(kernel(problem, (128, 104), (1, 1)), 1)
    assert wave.clusters_n == 1 and least_loads(wave, ORDERS) == ORDERS[0]


@pytest.mark.parametrize("m", [200, 290, 599, 1013])
def test_defaults_of_one_wave_load_least(m: int) -> None:
    """The choice, and the order that a tuning begins with, whether launches overlap or not."""
    problem = Problem(m, 2304, 4096)
    kernels, tiling = kernel_set(SPACE, problem, 132), tiling_of(problem)
    seen = 0
    for _, config in kernels.by_time(problem, rest=False):
        split = config.integer("split_k")
        if tiling.is_one_wave(config, split):
            order = config.integer("swizzle_size"), config.flag("raster_along_m")
            assert order == least_loads(tiling.wave(config, split), ORDERS)
            assert kernels.in_a_row(problem, config) == config
            seen += 1
    assert seen > 20
