"""Orders of one wave of tiles: what each GPC loads, counted by a simulation of turns."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from cutegen.arch import find_arch, resident_clusters
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.kernel_set import kernel_set
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.wave_order import (
    GPCS,
    KNOWN_SMS,
    PAIRS,
    SMALL,
    SMALL_SMS,
    Wave,
    least_loads,
    loads,
    turn_of,
    units_of_gpcs,
)
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
ORDERS = [(swizzle, along_m) for swizzle, along_m in product((1, 2, 4, 8), (False, True))]


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


def given_out(count: int, blocks: int) -> list[int]:
    """Return the GPC of each cluster, given out one by one: groups of two multiprocessors come first."""
    room = [2 // blocks if blocks <= 2 else 0] * PAIRS + [10**6] * GPCS
    room[PAIRS + SMALL] = SMALL_SMS // blocks
    found: list[int] = []
    while len(found) < count:
        for group in range(PAIRS + GPCS):
            if room[group] and len(found) < count:
                room[group] -= 1
                found.append(group)
    return found


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_turns_are_those_of_clusters_given_out_one_by_one(blocks: int) -> None:
    count = resident_clusters(KNOWN_SMS, blocks)
    turns = [turn_of(cluster, blocks) for cluster in range(count)]
    assert [PAIRS + turn for turn, _ in turns] == given_out(count, blocks)
    assert len(set(turns)) == count, "each has its place"
    for turn in range(GPCS):
        assert [place for at, place in turns if at == turn] == [*range(sum(at == turn for at, _ in turns))]


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_work_units_of_a_gpc_follow_each_other(blocks: int) -> None:
    """Each unit is one group's, and a GPC has as many as it has clusters."""
    for count in range(1, resident_clusters(KNOWN_SMS, blocks) + 1):
        parts = units_of_gpcs(count, blocks)
        assert [unit for first, length in parts for unit in range(first, first + length)] == [*range(count)]
        turns = [turn for turn, _ in (turn_of(cluster, blocks) for cluster in range(count))]
        assert [length for _, length in parts[-GPCS:]] == [turns.count(gpc) for gpc in range(GPCS)]


def simulated(wave: Wave, swizzle: int, along_m: bool) -> int:
    """Return what :func:`loads` should, from the coordinates of every work unit."""
    total = 0
    for first, count in units_of_gpcs(
        min(wave.clusters_m * wave.clusters_n * wave.parts, wave.resident), wave.blocks
    ):
        units = [located(unit, wave, swizzle, along_m) for unit in range(first, first + count)]
        total += wave.rows * len({(part, row) for part, row, _ in units})
        total += wave.columns * len({(part, column) for part, _, column in units})
    return total


@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
def test_loads_are_those_of_work_units_one_by_one(blocks: int) -> None:
    generator = Random(blocks)
    for _ in range(60):
        clusters = generator.randint(1, 12), generator.randint(1, 12), generator.choice([1, 1, 3])
        sides = generator.randint(1, 512), generator.randint(1, 512)
        wave = Wave(*clusters, blocks, *sides, resident=resident_clusters(KNOWN_SMS, blocks))
        assert loads(wave, ORDERS) == [simulated(wave, *order) for order in ORDERS]


def tiling_of(problem: Problem) -> Tiling:
    return Tiling(problem, 132, find_machine(ARCH))


def kernel(problem: Problem, tile: tuple[int, int], cluster: tuple[int, int]) -> Config:
    knobs = {"tile_shape_mn": tile, "cluster_shape_mn": cluster, "mma_warpgroups": 2, "swap_ab": True}
    return SPACE.default(problem).replace(**knobs)


def test_clusters_of_a_gpc_share_the_longer_operand() -> None:
    """Of nine rows of clusters with three of them each, a GPC has one or two; it would have five."""
    problem = Problem(290, 4608, 4096)
    wave = tiling_of(problem).wave(kernel(problem, (128, 104), (4, 1)), 1)
    found = dict(zip(ORDERS, loads(wave, ORDERS), strict=True))
    order = least_loads(wave, ORDERS)
    assert order == (1, False) and found[order] == min(found.values())
    assert found[1, True] > 1.3 * found[order]


def test_one_row_of_clusters_has_but_one_order() -> None:
    problem = Problem(100, 4608, 4096)
    wave = tiling_of(problem).wave(kernel(problem, (128, 104), (1, 1)), 1)
    assert wave.clusters_n == 1 and least_loads(wave, ORDERS) == ORDERS[0]


@pytest.mark.parametrize("m", [200, 290, 599, 1013, 4000])
def test_defaults_load_least(m: int) -> None:
    """In one wave of all orders, in several of those that cause the least traffic."""
    problem = Problem(m, 2304, 4096)
    kernels, tiling = kernel_set(SPACE, problem, 132), tiling_of(problem)
    seen = {False: 0, True: 0}
    for _, config in kernels.by_time(problem, rest=False):
        split = config.integer("split_k")
        one_wave = tiling.is_one_wave(config, split)
        orders = ORDERS if one_wave else tiling.cheapest(config, ORDERS)
        order = config.integer("swizzle_size"), config.flag("raster_along_m")
        assert order == least_loads(tiling.wave(config, split), orders)
        seen[one_wave] += 1
    assert max(seen.values()) > 20


def test_without_known_turns_the_first_order_of_least_traffic_is_taken() -> None:
    """On a Hopper with other multiprocessors the kernels take tiles in their plain order."""
    problem = Problem(599, 2304, 4096)
    for _, config in kernel_set(SPACE, problem, 114).by_time(problem, rest=False):
        if Tiling(problem, 114, find_machine(ARCH)).is_one_wave(config, config.integer("split_k")):
            assert (config["swizzle_size"], config["raster_along_m"]) == ORDERS[0]
