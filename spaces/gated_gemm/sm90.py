"""Which Hopper configs of gated GEMMs exist: those of the GEMM whose tiles have a half for the gates.

A gated GEMM costs what a plain GEMM with all rows of the weights costs, so rules, resources and defaults are
those of that GEMM. ``tile_shape_mn`` is the tile of the MMA: along the weights half of it is a
tile of the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.space import Config, Launch, Rule, Space, Value

from ..gemm import sm90 as gemm
from ..gemm.hopper_resources import SLAB, accumulators
from ..gemm.shared import RUN_TIME_KNOBS, compile_view

DOMAINS = {knob: values for knob, values in gemm.DOMAINS.items() if knob != "reduction"}
"""Those of the GEMM; partial sums are never added in order of arrival."""
LONG = (4, 1)
"""A cluster that is no default. Source: for Llama-3's weights and 1 to 16 rows, kernels of such clusters,
which the GEMM's fit predicts to be the fastest, took 1.02 to 1.05 times as long as those of one block
(``docs/results/gated_gemm.json``)."""


_OWN_TILES = (
    ((128, 72), 64, (1, 2), 1, "swapped pingpong"),
    ((128, 80), 64, (1, 2), 1, "swapped pingpong"),
    ((128, 96), 64, (1, 2), 2, ""),
    ((192, 112), 64, (1, 1), 3, ""),
    ((128, 176), 64, (2, 1), 1, "pingpong"),
    ((64, 16), 128, (1, 4), 1, ""),
    ((64, 32), 128, (1, 4), 1, ""),
    ((64, 48), 128, (1, 4), 1, ""),
    ((64, 80), 128, (1, 4), 1, ""),
    ((64, 112), 64, (1, 4), 1, ""),
    ((192, 160), 64, (1, 1), 3, ""),
    ((128, 8), 128, (1, 2), 1, "swapped pingpong"),
    ((128, 144), 64, (1, 1), 1, "swapped pingpong"),
    ((128, 160), 64, (1, 1), 1, "swapped pingpong"),
    ((128, 176), 64, (1, 1), 1, "swapped pingpong"),
)
"""Tiles, k tiles, clusters, warpgroups and kinds of default candidates beside the GEMM's. Source: of 60
random problems and up to 16 kernels each on an H200, the first two were fastest for 129 to 152 rows of two
weights, the next two for 1300 and 1500 rows of narrow weights, by 1.05 to 1.10. With these, defaults
would be at 0.988 of the fastest in geometric mean and never under 0.91, without at 0.980 and 0.88. The
fifth was the fastest for 1024 to 4096 rows of Llama-3 and Gemma-2, by up to 1.06
(``docs/results/gated_gemm.json``). The others came one by one as the fit predicts them to gain most on 260
random problems, of 147 kernels that were timed twice at least: 2.7 % in all, 1.9 % by the narrow ones of
clusters of four, which were the fastest of all for 11 of 34 problems that they were timed for
(``docs/results/untuned_products_141.json`` to ``untuned_products_269.json``)."""


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
    if use_tma_store or split_k > 1 or not (swap_ab or plain_gemm(problem).unaligned_out):
        return True
    return accumulators(tile_shape_mn, mma_warpgroups) <= 176


def two_tensors_leave_registers(tile_shape_mn: tuple[int, int], mma_warpgroups: int, problem: Any) -> bool:
    """With layout=split a thread exchanges gates and what they multiply where these come first in memory,
    which takes registers: it may then hold at most 176 accumulators (192 spill)."""
    apart = plain_gemm(problem) is not problem and problem.layout == "split"
    return not apart or accumulators(tile_shape_mn, mma_warpgroups) <= 176


def of_gemm(rule: Rule) -> Rule:
    """Return a rule of the GEMM, asked about the plain GEMM inside a gated one."""
    if "problem" not in rule.context:
        return rule
    return replace(rule, holds=lambda problem, **values: rule.holds(problem=plain_gemm(problem), **values))


_FOREIGN = ("tf32_is_for_blackwell", "int8_tiles_have_widths_of_the_mma")
RULES = (
    *(of_gemm(rule) for rule in gemm.RULES if "reduction" not in rule.knobs and rule.name not in _FOREIGN),
    *(
        Rule.of(function)
        for function in (halves_fit_the_tile, single_stores_leave_registers, two_tensors_leave_registers)
    ),
)


# --- what follows from a config ---


def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
    """Return what the GEMM derives, with store buffers of half a tile."""
    columns = config.pair("tile_shape_mn")[1]
    stored = columns if config.flag("swap_ab") else columns // 2
    return {**gemm.derive(config, plain_gemm(problem), arch, stored), "reduction": "fixed"}


def launch(config: Config, problem: Any, sm_count: int) -> Launch:
    """Return clusters, swizzle_size, raster_along_m (and split_k if it is not 1), and the workspace."""
    return gemm.launch(config.replace(reduction="fixed"), plain_gemm(problem), sm_count)


def choose_default(space: Space, problem: Any) -> Config:
    """Return a safe config as the GEMM does; swapped, with tiles that have two halves."""
    config = halved(gemm.choose_default(space, plain_gemm(problem)))
    assert config is not None, "its tiles are 8 columns wide if swapped, else 128 or 256"
    return Config({knob: config[knob] for knob in DOMAINS})


def halved(config: Config) -> Config | None:
    """Return a config of the GEMM with a tile that has two halves, those of swapped operands with more rows;
    None if there is none like it."""
    (rows, columns), swap = config.pair("tile_shape_mn"), config.flag("swap_ab")
    step = 2 * SLAB * config.integer("mma_warpgroups")
    tile = (-(-rows // step) * step, columns) if swap else (rows, columns)
    fits = tile in DOMAINS["tile_shape_mn"] and (swap or columns % 16 == 0)
    return config.replace(tile_shape_mn=tile) if fits else None


def default_candidates(problem: Any) -> Iterator[dict[str, Value]]:
    """Yield the GEMM's without those of long clusters or tall tiles; if swapped, with tiles of two halves.

    Our own follow.
    """
    plain = plain_gemm(problem)
    known = map(Config, gemm.borrowed_candidates(plain))
    found = (halved(config) for config in known if config.pair("cluster_shape_mn") != LONG)
    yield from (
        dict(config) for config in dict.fromkeys(found) if config is not None and not _is_tall(config)
    )
    for tile, tile_k, cluster, warpgroups, kind in _OWN_TILES:
        yield {
            "tile_shape_mn": tile,
            "tile_k": tile_k,
            "cluster_shape_mn": cluster,
            "mma_warpgroups": warpgroups,
            "pingpong": "pingpong" in kind,
            "swap_ab": "swapped" in kind,
            "use_tma_store": not plain.unaligned_out,
            "use_pdl": True,
            "split_k": 1,
        }


def _is_tall(config: Config) -> bool:
    """Return whether swapped tiles have 256 rows, as many become by having two halves.

    Source: on 6 of 7 untuned problems for which the GEMM's fit predicted these to be the fastest, they took
    1.05 to 1.16 times as long as others on an H200.
    """
    return config.flag("swap_ab") and config.pair("tile_shape_mn")[0] == 256


def build_space(arch: Arch) -> Space:
    """Return the space of gated GEMMs on Hopper bound to ``arch``."""
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
