"""The configs of grouped fp8 GEMMs with factors of blocks: grouped GEMMs whose accumulators fit registers.

What a tile's accumulators and factors take is judged as for one such GEMM (``spaces/gemm_blocks/sm90.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutegen.arch import Arch
from cutegen.families.grouped_gemm.batched_gemm import GEMM_ONLY_KNOBS, batched_gemm, without_gemm_knobs
from cutegen.space import Config, Rule, Space, Value

from ..gemm import sm90 as gemm
from ..gemm.shared import RUN_TIME_KNOBS, compile_view
from ..gemm_blocks import sm90 as blocks
from ..grouped_gemm import sm90 as grouped

DOMAINS: dict[str, tuple[Value, ...]] = {
    **{knob: domain for knob, domain in gemm.DOMAINS.items() if knob not in GEMM_ONLY_KNOBS},
    "tile_k": blocks.DOMAINS["tile_k"],
}
RULES = (
    Rule.of(grouped.a_warp_counts_the_groups),
    Rule.of(grouped.work_units_have_31_bits),
    Rule.of(grouped.short_groups_leave_registers),
    Rule.of(blocks.sums_fit_registers),
    Rule.of(blocks.tiles_lie_in_few_blocks),
    *(
        grouped.of_one_group(Rule.of(rule))
        for rule in grouped.GEMM_RULES
        if rule is not gemm.accumulators_fit_registers
    ),
)


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return what follows for a grouped GEMM, and how columns of a tile lie in blocks of B."""
    tile, tile_k, swap_ab = config.pair("tile_shape_mn"), config.integer("tile_k"), config.flag("swap_ab")
    beside = blocks.factor_bytes(tile, tile_k, swap_ab)
    return {
        **grouped.derive(config, problem, arch, beside),
        "step_n": blocks.step_n(tile[1]),
        "of_b": blocks.blocks_of_b(tile, swap_ab),
        "ahead": blocks.runs_ahead(tile, tile_k, config.integer("mma_warpgroups"), swap_ab),
    }


def choose_default(space: Space, problem: Any) -> Config:
    """Return the GEMM's safe config for as many tiles, or one of large tiles where there are too many."""
    config = without_gemm_knobs(gemm.choose_default(space, batched_gemm(problem)))
    return grouped.with_few_tiles(config, problem)


def default_candidates(problem: Any) -> Iterator[dict[str, Value]]:
    """Yield those of one such GEMM that leave k whole."""
    found = (knobs for knobs in blocks.default_candidates(batched_gemm(problem)) if knobs["split_k"] == 1)
    yield from (dict(without_gemm_knobs(knobs)) for knobs in found if not knobs.get("stream_k"))


def build_space(arch: Arch) -> Space:
    """Return the space of grouped fp8 GEMMs with factors of blocks, bound to ``arch``."""
    return Space(
        family="grouped_gemm_blocks",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=grouped.launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS - GEMM_ONLY_KNOBS.keys(),
        default_candidates=default_candidates,
    )
