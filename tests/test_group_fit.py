"""Defaults of grouped GEMMs against times on an H200: what the choice among the timed kernels loses."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.grouped_gemm.group_fit import FEATURES, describe, load_group_fit
from cutegen.families.grouped_gemm.group_rows import expected_rows, groups_with_rows, row_tiles
from cutegen.families.grouped_gemm.strategy import GatedGroupedStrategy, GroupedStrategy
from cutegen.families.registry import find_space, parse_problem
from cutegen.space import Config

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
HOPPER = find_arch("sm_90a")
STRATEGIES = {"grouped_gemm": GroupedStrategy, "grouped_gated_gemm": GatedGroupedStrategy}


def problem_of(text: str) -> DeclaredProblem:
    problem = parse_problem(text)
    assert isinstance(problem, DeclaredProblem)
    return problem


def lost(name: str, family: str) -> list[float]:
    """Return the time of the fastest kernel over that of the chosen one, of each recorded problem."""
    strategy = STRATEGIES[family].of(HOPPER)
    assert strategy is not None
    found = []
    for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
        problem = problem_of(row["problem"])
        if problem.family == family:
            times = {Config.parse(text): time for text, time in row["times"].items()}
            chosen = strategy.fastest(find_space(family, HOPPER), problem, 132, [*times])
            found.append(min(times.values()) / times[chosen])
    return found


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("untuned_products_before", "grouped_gemm"),
        *product(("untuned_products_21", "untuned_grouped_113", "untuned_grouped_127"), STRATEGIES),
    ],
)
def test_choices_among_timed_kernels_are_near_the_fastest(name: str, family: str) -> None:
    """The fit knows these times; what it loses on others, its provenance tells."""
    ratios = lost(name, family)
    assert len(ratios) >= 40
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= 0.98 and min(ratios) >= 0.85


TILES = (
    "tile_k=64 mma_warpgroups=1 pingpong=true use_tma_store=true use_pdl=true swizzle_size=1 "
    "raster_along_m=false"
)
TALL = Config.parse(f"tile_shape_mn=128x128 cluster_shape_mn=2x1 swap_ab=false {TILES}")
WIDE = Config.parse(f"tile_shape_mn=128x64 cluster_shape_mn=1x1 swap_ab=true {TILES}")


@pytest.mark.parametrize("tokens", ["uniform", "zipf"])
@pytest.mark.parametrize("height", [16, 64])
def test_expected_tiles_are_those_of_drawn_rows(tokens: str, height: int) -> None:
    """Rows are drawn as the benchmark draws them: each chooses its group by itself."""
    import torch

    problem = problem_of(f"grouped_gemm 4096x1024x2048x32 bf16{' tokens=zipf' if tokens == 'zipf' else ''}")
    odds = torch.tensor([1 / rank if tokens == "zipf" else 1.0 for rank in range(1, 33)])
    generator = torch.Generator().manual_seed(3)
    draws = torch.multinomial(odds.expand(400, -1), 4096, replacement=True, generator=generator)
    counts = torch.stack([torch.bincount(row, minlength=32) for row in draws])
    tiles = ((counts + height - 1) // height).sum(1).double()
    apart = math.sqrt(groups_with_rows(problem) / 3)
    near = (tiles - row_tiles(problem, height)).abs() <= apart
    assert float(near.double().mean()) > 0.9


def test_features_say_what_groups_and_tiles_are() -> None:
    """512 rows for each of 8 groups: 16 columns of tiles, and 4 or 8 rows of them in each group."""
    problem = problem_of("grouped_gemm 4096x2048x2048x8 bf16")
    found = describe(problem, [TALL, WIDE], [40.0, 50.0], 132)
    tall, wide = (dict(zip(FEATURES, column, strict=False)) for column in found[: len(FEATURES)].T)
    assert sum(count for _, count in expected_rows(problem)) == 8
    assert tall["equal_us_log"] == pytest.approx(math.log(40))
    assert tall["mean_rows_log"] == pytest.approx(math.log(512), rel=1e-3)
    assert (tall["height_log"], wide["height_log"]) == pytest.approx((math.log(256), math.log(64)))
    assert (tall["zipf"], tall["swap_ab"], wide["swap_ab"]) == (0, 0, 1)
    assert tall["filled_rows"] < wide["filled_rows"] <= 1
    assert tall["filled_columns"] == wide["filled_columns"] == 1
    assert 8 * 2 * 16 / 66 <= tall["drawn_waves"] <= 8 * 4 * 16 / 66
    beside = found[len(FEATURES) :]
    assert beside.sum(1) == pytest.approx(0, abs=1e-3)


def test_uneven_groups_make_more_waves() -> None:
    even, uneven = (problem_of(f"grouped_gemm 4096x2048x2048x64 bf16{t}") for t in ("", " tokens=zipf"))
    at = FEATURES.index("drawn_waves")
    waves = [describe(problem, [TALL], [40.0], 132)[at, 0] for problem in (even, uneven)]
    assert waves[0] < waves[1]


def test_times_stay_near_those_of_equal_groups() -> None:
    problem = problem_of("grouped_gemm 4096x2048x2048x8 bf16")
    times = load_group_fit().times_us(problem, [TALL, WIDE], [40.0, 50.0], 132)
    assert times == pytest.approx([40.0, 50.0], rel=0.4)


def test_provenance_names_what_trees_left_out_lose() -> None:
    judged = load_group_fit().provenance["fastest_over_chosen"]["all"]
    assert judged["trees_left_out"]["geometric_mean"] > judged["equal_groups"]["geometric_mean"]
