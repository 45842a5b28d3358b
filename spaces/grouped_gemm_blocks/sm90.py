"""The configs of grouped fp8 GEMMs with factors of blocks: those of grouped GEMMs whose sums fit registers.

What a tile's sums and factors take is judged as for one such GEMM (``spaces/gemm_blocks/sm90.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutegen.arch import Arch
from cutegen.families.grouped_gemm.as_gemm import as_gemm, uncut, whole
from cutegen.space import Config, Rule, Space, Value

from ..gemm import sm90 as gemm
from ..gemm.shared import RUN_TIME_KNOBS, compile_view
from ..gemm_blocks import sm90 as blocks
from ..grouped_gemm import sm90 as grouped

DOMAINS: dict[str, tuple[Value, ...]] = {
    **{knob: domain for knob, domain in gemm.DOMAINS.items() if knob not in whole({})},
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
    config = uncut(gemm.choose_default(space, as_gemm(problem)))
    if grouped.work_units_have_31_bits(config.pair("tile_shape_mn"), config.flag("swap_ab"), problem):
        return config
    return config.replace(tile_shape_mn=(128, 128), mma_warpgroups=2, swap_ab=False)


def default_candidates(problem: Any) -> Iterator[dict[str, Value]]:
    """Yield those of one such GEMM that leave k whole."""
    found = (whole_k for whole_k in blocks.default_candidates(as_gemm(problem)) if whole_k["split_k"] == 1)
    yield from (dict(uncut(knobs)) for knobs in found if not knobs.get("stream_k"))


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
        run_time_knobs=RUN_TIME_KNOBS - whole({}).keys(),
        default_candidates=default_candidates,
    )
