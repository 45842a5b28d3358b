"""Which Hopper configs of gated products exist: those of the GEMM whose tiles have a half for the gates.

A gated product costs what a GEMM with all rows of the weights costs, so rules, resources and defaults are the
GEMM's, asked about that product. ``tile_shape_mn`` is the tile of the MMA: along the weights half of it is a
tile of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.as_gemm import as_gemm
from cutegen.space import Config, Launch, Rule, Space, Value

from ..gemm import sm90 as gemm
from ..gemm.hopper_resources import SLAB, accumulators
from ..gemm.shared import RUN_TIME_KNOBS, compile_view

DOMAINS = {knob: values for knob, values in gemm.DOMAINS.items() if knob != "reduction"}
"""Those of the GEMM, without sums in the order of their arrival."""


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def halves_fit_the_tile(tile_shape_mn: tuple[int, int], mma_warpgroups: int, swap_ab: bool) -> bool:
    """Half of a tile along the weights belongs to the gates, and both halves to the same threads: tile_n must
    be a multiple of 16, twice the MMA's 8 columns; with swap_ab tile_m one of 128 rows for each of the
    mma_warpgroups."""
    return tile_shape_mn[0] % (2 * SLAB * mma_warpgroups) == 0 if swap_ab else tile_shape_mn[1] % 16 == 0


def single_stores_leave_registers(
    tile_shape_mn: tuple[int, int],
    mma_warpgroups: int,
    swap_ab: bool,
    use_tma_store: bool,
    split_k: int,
    problem: Any,
) -> bool:
    """Without a TMA store, swap_ab or an unaligned output makes every element a store of its own, whose
    address takes registers: a thread may then hold at most 176 accumulators."""
    if use_tma_store or split_k > 1 or not (swap_ab or as_gemm(problem).unaligned_out):
        return True
    return accumulators(tile_shape_mn, mma_warpgroups) <= 176


def of_gemm(rule: Rule) -> Rule:
    """Return a rule of the GEMM, asked about the product inside a gated one."""
    if "problem" not in rule.context:
        return rule
    return replace(rule, holds=lambda problem, **values: rule.holds(problem=as_gemm(problem), **values))


_FOREIGN = ("tf32_is_for_blackwell", "int8_tiles_have_widths_of_the_mma")
RULES = (
    *(of_gemm(rule) for rule in gemm.RULES if "reduction" not in rule.knobs and rule.name not in _FOREIGN),
    *(Rule.of(function) for function in (halves_fit_the_tile, single_stores_leave_registers)),
)


# --- what follows from a config ---


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return what the GEMM derives, with store buffers of half a tile."""
    columns = config.pair("tile_shape_mn")[1]
    stored = columns if config.flag("swap_ab") else columns // 2
    return {**gemm.derive(config, as_gemm(problem), arch, stored), "reduction": "fixed"}


def launch(config: Config, problem: Any, sm_count: int) -> Launch:
    """Return clusters, swizzle_size, raster_along_m (and split_k if it is not 1), and the workspace."""
    return gemm.launch(config.replace(reduction="fixed"), as_gemm(problem), sm_count)


def choose_default(space: Space, problem: Any) -> Config:
    """Return a safe config as the GEMM does; swapped, with tiles that have two halves."""
    config = gemm.choose_default(space, as_gemm(problem))
    if config.flag("swap_ab"):
        config = config.replace(tile_shape_mn=(2 * SLAB, config.pair("tile_shape_mn")[1]))
    return Config({knob: config[knob] for knob in DOMAINS})


def default_candidates(problem: Any) -> Iterator[dict[str, Value]]:
    """Yield the GEMM's, those with swapped operands with tiles that have two halves."""
    found: dict[str, dict[str, Value]] = {}
    for knobs in gemm.default_candidates(as_gemm(problem)):
        config = Config(knobs)
        (rows, columns), swap = config.pair("tile_shape_mn"), config.flag("swap_ab")
        step = 2 * SLAB * config.integer("mma_warpgroups")
        tile = (-(-rows // step) * step, columns) if swap else (rows, columns)
        if tile in DOMAINS["tile_shape_mn"] and (swap or columns % 16 == 0):
            changed = {**knobs, "tile_shape_mn": tile}
            found.setdefault(str(changed), changed)
    yield from found.values()


def build_space(arch: Arch) -> Space:
    """Return the space of gated products on Hopper bound to ``arch``."""
    return Space(
        family="gated_gemm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS,
        default_candidates=default_candidates,
    )
