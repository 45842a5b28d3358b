"""Which Hopper grouped GEMM configs exist, which are legal, and what follows from each of them.

They are those of the Hopper GEMM without a cut along k. Its rules judge the batched GEMM of about the same
tiles, :func:`cutegen.families.grouped_gemm.batched_gemm.batched_gemm`; rows of a group are its m. Half of a
tile of a gated GEMM are gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.grouped_gemm.batched_gemm import (
    GEMM_ONLY_KNOBS,
    activation_of,
    batched_gemm,
    with_gemm_knobs,
    without_gemm_knobs,
)
from cutegen.families.grouped_gemm.group_rows import is_masked
from cutegen.space import Config, Launch, Rule, Space, Value

from ..gated_gemm import sm90 as gated
from ..gemm import sm90 as gemm
from ..gemm.hopper_resources import accumulators
from ..gemm.shared import (
    RUN_TIME_KNOBS,
    compile_view,
    sizes_round_up_below_2_to_31,
    swap_ab_is_for_narrow_m,
    tma_store_needs_aligned_output,
)

EXPERTS_PER_LANE = 16
"""Groups whose tiles a thread of one warp counts."""
MOST_GROUPS = 32 * EXPERTS_PER_LANE
TABLE_BYTES = 4 * (MOST_GROUPS + 1)
"""Shared memory for the tiles before each group and behind the last."""


def fits_registers(tile: Any) -> bool:
    """Return whether some warpgroups can share a tile of 16-bit operands."""
    plain = Problem(64, 64, 64)
    return any(
        gemm.warpgroups_divide_tile(tile, count) and gemm.accumulators_fit_registers(tile, count, plain)
        for count in (1, 2, 3)
    )


DOMAINS: dict[str, tuple[Value, ...]] = {
    **{knob: domain for knob, domain in gemm.DOMAINS.items() if knob not in GEMM_ONLY_KNOBS},
    "tile_shape_mn": tuple(filter(fits_registers, gemm.DOMAINS["tile_shape_mn"])),
    "tile_k": (64, 128),
}
"""Those of the GEMM, as far as 16-bit operands have configs of them."""


def room(arch: Arch) -> Arch:
    """Return the target with as much shared memory as the table leaves."""
    return replace(arch, smem_bytes=arch.smem_bytes - TABLE_BYTES)


_TURNS: dict[str, Value] = {
    "tile_k": 64,
    "mma_warpgroups": 1,
    "pingpong": True,
    "use_tma_store": True,
    "use_pdl": True,
}
OWN_CANDIDATES: tuple[dict[str, Value], ...] = (
    {
        **_TURNS,
        "tile_shape_mn": (128, 136),
        "cluster_shape_mn": (2, 1),
        "swap_ab": True,
        "swizzle_size": 1,
        "raster_along_m": False,
    },
    {
        **_TURNS,
        "tile_shape_mn": (192, 128),
        "cluster_shape_mn": (1, 2),
        "swap_ab": False,
        "swizzle_size": 8,
        "raster_along_m": True,
    },
)
"""Default candidates beside the GEMM's. Source, an H200: of five kernels each the first was the fastest for
128 groups of about 512 rows, 1.06 to 1.14 times as fast as the GEMM's candidate there
(``docs/results/grouped_gemm.json``); of 22 kernels for 4 and 8 groups of thousands of rows the second was
never more than 2 % behind the fastest under load, and level with a loop of torch.mm in bursts, where most
others were slower."""


def _kernels(*kernels: tuple[tuple[int, int], tuple[int, int], int, int, bool, bool]) -> tuple[Config, ...]:
    """Return configs by tile, cluster, tile_k, mma_warpgroups, pingpong and swap_ab, alike otherwise."""
    knobs = ("tile_shape_mn", "cluster_shape_mn", "tile_k", "mma_warpgroups", "pingpong", "swap_ab")
    like: dict[str, Value] = {"use_pdl": True, "swizzle_size": 1, "raster_along_m": False}
    return tuple(Config({**like, **dict(zip(knobs, values, strict=True))}) for values in kernels)


COVERING = _kernels(
    ((128, 160), (2, 1), 64, 1, True, False),
    ((128, 160), (1, 1), 64, 1, True, False),
    ((128, 152), (2, 1), 64, 1, True, False),
    ((128, 152), (1, 2), 64, 1, True, True),
    ((64, 80), (2, 1), 128, 1, True, True),
    ((64, 24), (2, 2), 128, 1, False, True),
    ((64, 8), (2, 2), 128, 1, False, True),
    ((128, 8), (1, 1), 128, 2, False, True),
)
GATED_COVERING = _kernels(
    ((64, 208), (2, 1), 64, 1, False, False),
    ((128, 176), (1, 1), 64, 1, True, False),
    ((64, 160), (1, 1), 128, 1, False, False),
    ((64, 96), (1, 1), 128, 1, False, False),
    ((64, 64), (1, 4), 128, 1, False, False),
    ((64, 48), (1, 4), 128, 1, False, False),
    ((128, 8), (4, 1), 128, 1, False, True),
    ((128, 16), (4, 1), 128, 1, False, True),
)
"""Further default candidates, of plain and of gated GEMMs: what came nearest to the fastest of 12 configs
where no other default candidate did. Source: 227 untuned problems each on an H200
(``docs/results/untuned_grouped_113.json`` and those before); with these the best default candidate is at
0.992 of the fastest in the geometric mean, and at 0.991 of gated ones, where it was at 0.988 and 0.982."""


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def rows_of_operands_are_aligned(problem: Any) -> bool:
    """TMA loads rows of a and b that start at multiples of 16 bytes: k must be a multiple of 8."""
    return bool(problem.k % 8 == 0)


def a_warp_counts_the_groups(problem: Any) -> bool:
    """One warp counts the tiles of all groups, 16 to a thread: there may be at most 512 groups."""
    return bool(problem.g <= MOST_GROUPS)


def work_units_have_31_bits(tile_shape_mn: tuple[int, int], swap_ab: bool, problem: Any) -> bool:
    """Tiles are numbered with 31 bits: those of all groups, and those along rows even if every group ended
    with the last row, as wrong offsets may say."""
    long, wide = tile_shape_mn[::-1] if swap_ab else tile_shape_mn
    rows, width = -(-problem.m // long), -(-batched_gemm(problem).n // wide)
    count = rows * problem.g if is_masked(problem) else rows + problem.g
    return bool(count * width < 2**30 and rows * problem.g < 2**30)


def short_groups_leave_registers(
    tile_shape_mn: tuple[int, int], mma_warpgroups: int, swap_ab: bool, problem: Any
) -> bool:
    """With swap_ab every element of a group with fewer rows than a tile is a store of its own, whose address
    takes registers: a thread may then hold at most 176 accumulators, and 144 where each group has a matrix
    (200 and 152 spill)."""
    most = 144 if is_masked(problem) else 176
    return not swap_ab or accumulators(tile_shape_mn, mma_warpgroups) <= most


def of_one_group(rule: Rule) -> Rule:
    """Return a rule of the GEMM, asked about the GEMM of as many tiles."""
    missing = {knob: value for knob, value in GEMM_ONLY_KNOBS.items() if knob in rule.knobs}

    def holds(**values: Any) -> bool:
        if "problem" in values:
            values["problem"] = batched_gemm(values["problem"])
        if "arch" in values:
            values["arch"] = room(values["arch"])
        return rule.holds(**values, **missing)

    return replace(rule, knobs=tuple(knob for knob in rule.knobs if knob not in missing), holds=holds)


OWN_RULES = (
    rows_of_operands_are_aligned,
    a_warp_counts_the_groups,
    work_units_have_31_bits,
    short_groups_leave_registers,
)
GEMM_RULES = (
    sizes_round_up_below_2_to_31,
    gemm.warpgroups_divide_tile,
    gemm.tile_k_is_one_or_two_swizzle_rows,
    gemm.accumulators_fit_registers,
    gemm.single_stores_leave_registers,
    gemm.pingpong_has_one_warpgroup_per_tile,
    gemm.stages_fit_shared_memory,
    gemm.wide_k_is_for_small_tiles,
    tma_store_needs_aligned_output,
    swap_ab_is_for_narrow_m,
    gemm.cluster_is_no_larger_than_problem,
)


# --- what follows from a config ---


def derive(config: Config, problem: Any, arch: Arch, beside_tiles: int = 0) -> dict[str, Value]:
    """Return what follows for the GEMM, with less shared memory, and the groups that a thread counts; a tile
    of a gated GEMM stores half of its columns if these are not rows of the result. A stage holds
    ``beside_tiles`` bytes beside tiles of A and B."""
    columns = config.pair("tile_shape_mn")[1]
    stored = columns // 2 if activation_of(problem) and not config.flag("swap_ab") else columns
    found = gemm.derive(with_gemm_knobs(config), batched_gemm(problem), room(arch), stored, beside_tiles)
    found["smem_bytes"] += TABLE_BYTES  # type: ignore[operator]
    return {**found, "experts_per_lane": EXPERTS_PER_LANE}


def launch(config: Config, problem: Any, sm_count: int) -> Launch:
    """Return clusters, swizzle_size and raster_along_m."""
    return gemm.launch(with_gemm_knobs(config), batched_gemm(problem), sm_count)


def choose_default(space: Space, problem: Any) -> Config:
    """Return the GEMM's safe config for as many tiles, or one of large tiles where there are too many."""
    config = _of_product(gemm.choose_default(space, batched_gemm(problem)), problem)
    assert config is not None, "its tiles are 8 columns wide if swapped, else 128 or 256"
    return with_few_tiles(config, problem)


def with_few_tiles(config: Config, problem: Any) -> Config:
    """Return ``config``, or with large tiles where its own are too many to be numbered."""
    if work_units_have_31_bits(config.pair("tile_shape_mn"), config.flag("swap_ab"), problem):
        return config
    return config.replace(tile_shape_mn=(128, 128), mma_warpgroups=2, swap_ab=False)


def default_candidates(problem: Any) -> Iterator[dict[str, Value]]:
    """Yield the GEMM's, or those of gated GEMMs, without those that cut k, then our own."""
    one = batched_gemm(problem)
    theirs = gated.default_candidates(one) if activation_of(problem) else gemm.borrowed_candidates(one)
    own = (_of_product(with_gemm_knobs(knobs), problem) for knobs in _own(problem))
    more = GATED_COVERING if activation_of(problem) else COVERING
    covering = (config.replace(use_tma_store=not problem.unaligned) for config in more)
    found = (*(without_gemm_knobs(knobs) for knobs in theirs if knobs["split_k"] == 1), *own, *covering)
    yield from (dict(config) for config in dict.fromkeys(found) if config is not None)


def _own(problem: Any) -> Iterator[dict[str, Value]]:
    """Yield candidates of our own as far as the output's alignment allows a TMA store."""
    return (knobs for knobs in OWN_CANDIDATES if not (knobs["use_tma_store"] and problem.unaligned))


def _of_product(config: Config, problem: Any) -> Config | None:
    """Return a config of the GEMM for grouped GEMMs, plain or gated, if there is one like it."""
    changed = gated.halved(config) if activation_of(problem) else config
    return None if changed is None else without_gemm_knobs(changed)


def build(family: str, arch: Arch, *more: Rule) -> Space:
    """Return the space of a family of grouped GEMMs, which has some more rules, bound to ``arch``."""
    return Space(
        family=family,
        arch=arch,
        domains=DOMAINS,
        rules=(
            *(Rule.of(rule) for rule in OWN_RULES),
            *more,
            *(of_one_group(Rule.of(rule)) for rule in GEMM_RULES),
        ),
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS - GEMM_ONLY_KNOBS.keys(),
        default_candidates=default_candidates,
    )


def build_space(arch: Arch) -> Space:
    """Return the space of grouped GEMMs over ranges of rows."""
    return build("grouped_gemm", arch)
