"""Which configs of fp8 GEMMs with factors of blocks exist on Hopper, which are legal, and what follows.

Kernels and knobs are those of the GEMM (``spaces/gemm/sm90.py``). What differs: accumulators leave the tensor
cores after every block of 128 terms, into a second set of registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd

from cutegen.arch import Arch
from cutegen.families.gemm.problem import FACTOR_BLOCK, Problem
from cutegen.space import Config, Rule, Space, Value

from ..gemm import sm90 as gemm
from ..gemm.hopper_resources import SLAB, accumulators, stage_bytes, store_bytes
from ..gemm.shared import RUN_TIME_KNOBS, compile_view

MOST_SUMS = 192
"""Accumulators that a thread may hold, in registers; more spill."""
MOST_SUMS_OF_THREE = 128
"""The same with three warpgroups that multiply."""

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    **gemm.DOMAINS,
    "tile_k": (128, 256),
}

#: Tile, cluster, warpgroups, k tile, kind. Source: on an H200 the best kernels of 12 shapes of 64 and 4096
#: rows are among these (docs/results/gemm_blocks.json); narrow ones are for fewer rows.
DEFAULT_CANDIDATES = (
    ((128, 128), (1, 2), 2, 256, ""),
    ((128, 128), (2, 1), 2, 256, ""),
    ((128, 128), (1, 1), 2, 256, ""),
    ((256, 128), (1, 2), 2, 128, ""),
    ((256, 96), (1, 2), 2, 128, ""),
    ((192, 128), (1, 2), 3, 128, ""),
    ((128, 64), (1, 1), 2, 256, ""),
    ((64, 64), (1, 1), 1, 256, ""),
    ((64, 128), (1, 1), 1, 128, ""),
    ((64, 64), (1, 1), 1, 256, "split"),
    ((64, 128), (1, 1), 1, 128, "split"),
    ((64, 128), (1, 1), 1, 128, "swapped split"),
    ((64, 32), (1, 1), 1, 256, "swapped"),
    ((64, 16), (1, 1), 1, 256, "swapped"),
    ((64, 8), (1, 1), 1, 256, "swapped"),
    ((64, 16), (1, 1), 1, 256, "swapped split"),
    ((64, 8), (1, 1), 1, 256, "swapped split"),
)


def step_n(tile_n: int) -> int:
    """Return how many columns of a tile surely lie in one block of B, wherever the tile begins."""
    return gcd(tile_n, FACTOR_BLOCK)


def runs_ahead(tile_shape_mn: tuple[int, int], tile_k: int, mma_warpgroups: int, swap_ab: bool) -> bool:
    """Return whether a warpgroup multiplies the next 64 rows and 128 terms while it adds up what it has.

    It does where a k tile has an even number of those, for each of which it has registers.
    """
    steps = tile_k // FACTOR_BLOCK * (tile_shape_mn[0] // (SLAB * mma_warpgroups))
    return steps % 2 == 0 and _sums(tile_shape_mn, mma_warpgroups, swap_ab, 2) <= _most_sums(mma_warpgroups)


def _sums(tile_shape_mn: tuple[int, int], mma_warpgroups: int, swap_ab: bool, sets: int) -> int:
    """Registers of a thread's accumulators, of ``sets`` sets that MMAs write, and of factors."""
    of_factors = tile_shape_mn[1] // 4 if swap_ab else 0
    return accumulators(tile_shape_mn, mma_warpgroups) + sets * tile_shape_mn[1] // 2 + of_factors


def _most_sums(mma_warpgroups: int) -> int:
    return MOST_SUMS_OF_THREE if mma_warpgroups == 3 else MOST_SUMS


def factor_bytes(tile_shape_mn: tuple[int, int], tile_k: int, swap_ab: bool) -> int:
    """Return the shared memory that factors of a stage take."""
    rows_a = tile_shape_mn[1 if swap_ab else 0]
    return (-(-rows_a // 32) * 32 + 4) * 4 * (tile_k // FACTOR_BLOCK)


def blocks_of_b(tile_shape_mn: tuple[int, int], swap_ab: bool) -> int:
    """Return in how many blocks of columns of B a tile can lie; with swap_ab its rows are those columns."""
    length, step = (tile_shape_mn[0], SLAB) if swap_ab else (tile_shape_mn[1], step_n(tile_shape_mn[1]))
    return (FACTOR_BLOCK - step + length - 1) // FACTOR_BLOCK + 1


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def sums_fit_registers(
    tile_shape_mn: tuple[int, int], tile_k: int, mma_warpgroups: int, swap_ab: bool
) -> bool:
    """A thread keeps tile_m * tile_n / (128 * mma_warpgroups) accumulators, tile_n / 2 of the 128 terms that
    are being multiplied, and with swap_ab tile_n / 4 factors: at most 192 together, 128 with three
    warpgroups. With tile_k of 256 the next 128 terms are multiplied meanwhile, which takes tile_n / 2
    more."""
    limit = _most_sums(mma_warpgroups)
    sums = _sums(tile_shape_mn, mma_warpgroups, swap_ab, 1)
    return sums <= limit and (
        tile_k == FACTOR_BLOCK or runs_ahead(tile_shape_mn, tile_k, mma_warpgroups, swap_ab)
    )


def tiles_lie_in_few_blocks(tile_shape_mn: tuple[int, int], swap_ab: bool) -> bool:
    """Columns of B have factors in blocks of 128, so tile_n must divide 128 or be a multiple of 32: else few
    columns at a time surely lie in one block. With swap_ab the columns of a tile are rows of A."""
    return swap_ab or step_n(tile_shape_mn[1]) >= min(32, tile_shape_mn[1])


def stages_with_factors_fit_shared_memory(
    tile_shape_mn: tuple[int, int],
    tile_k: int,
    mma_warpgroups: int,
    pingpong: bool,
    swap_ab: bool,
    use_tma_store: bool,
    problem: Problem,
    arch: Arch,
) -> bool:
    """At least 3 stages of (tile_m + tile_n) * tile_k elements and the factors of their blocks must fit the
    shared memory of a thread block beside two store buffers per warpgroup, or loads cannot run ahead of the
    tensor cores."""
    stores = store_bytes(tile_shape_mn[1], mma_warpgroups, pingpong, use_tma_store, problem)
    of_factors = factor_bytes(tile_shape_mn, tile_k, swap_ab)
    return gemm.three_stages_fit(stage_bytes(*tile_shape_mn, tile_k, problem) + of_factors, stores, arch)


_OTHERWISE_HERE = ("accumulators_fit_registers", "stages_fit_shared_memory")
RULES = (
    *(rule for rule in gemm.RULES if rule.name not in _OTHERWISE_HERE),
    Rule.of(sums_fit_registers),
    Rule.of(stages_with_factors_fit_shared_memory),
    Rule.of(tiles_lie_in_few_blocks),
)


# --- what follows from a config ---


def derive(config: Config, problem: Problem, arch: Arch) -> dict[str, Value]:
    """Return what follows for a GEMM, and how columns of a tile lie in blocks of B."""
    tile, swap_ab = config.pair("tile_shape_mn"), config.flag("swap_ab")
    beside = factor_bytes(tile, config.integer("tile_k"), swap_ab)
    found = gemm.derive(config, problem, arch, beside_tiles=beside)
    return {
        **found,
        "step_n": step_n(tile[1]),
        "of_b": blocks_of_b(tile, swap_ab),
        "bytes_factors": beside,
        "ahead": runs_ahead(tile, config.integer("tile_k"), config.integer("mma_warpgroups"), swap_ab),
    }


def default_candidates(problem: Problem) -> Iterator[dict[str, Value]]:
    """Yield what is chosen from before anybody measured; the rest of each is the default's."""
    for tile, cluster, warpgroups, tile_k, kind in DEFAULT_CANDIDATES:
        yield {
            "tile_shape_mn": tile,
            "tile_k": tile_k,
            "cluster_shape_mn": cluster,
            "mma_warpgroups": warpgroups,
            "swap_ab": "swapped" in kind,
            "use_tma_store": not problem.unaligned_out and "split" not in kind,
            "use_pdl": True,
            "split_k": 2 if "split" in kind else 1,
        }


def build_space(arch: Arch) -> Space:
    """Return the space of Hopper's fp8 GEMMs with factors of blocks, bound to ``arch``."""
    return Space(
        family="gemm_blocks",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=gemm.choose_default,
        launch=gemm.launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS,
        default_candidates=default_candidates,
    )
