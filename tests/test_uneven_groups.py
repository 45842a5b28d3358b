"""Defaults of grouped GEMMs against times on an H200: what the choice among the timed kernels loses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.fitted import load_fit
from cutegen.families.grouped_gemm.group_rows import expected_rows, groups_with_rows, row_tiles
from cutegen.families.grouped_gemm.strategy import GatedGroupedStrategy, GroupedStrategy
from cutegen.families.grouped_gemm.uneven_groups import UnevenGroups, rough_us
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
    ("name", "family", "at_least"),
    [
        ("untuned_products_21", "grouped_gemm", 0.965),
        ("untuned_products_21", "grouped_gated_gemm", 0.97),
        ("untuned_products_before", "grouped_gemm", 0.98),
    ],
)
def test_choices_among_timed_kernels_are_near_the_fastest(name: str, family: str, at_least: float) -> None:
    ratios = lost(name, family)
    assert len(ratios) >= 20
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= at_least


@pytest.mark.parametrize("tokens", ["uniform", "zipf"])
@pytest.mark.parametrize("height", [16, 64])
def test_tiles_of_drawn_rows_are_within_what_is_asked_about(tokens: str, height: int) -> None:
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


def test_equal_groups_of_whole_tiles_take_about_what_the_batched_gemm_takes() -> None:
    """512 rows for each of 8 groups: the three answers are of nearly the same tiles."""
    problem = problem_of("grouped_gemm 4096x2048x2048x8 bf16")
    config = Config.parse(
        "tile_shape_mn=128x128 tile_k=64 cluster_shape_mn=2x1 mma_warpgroups=1 pingpong=true swap_ab=false "
        "use_tma_store=true use_pdl=true swizzle_size=1 raster_along_m=false"
    )
    groups = UnevenGroups(problem, 132, load_fit())
    assert sum(count for _, count in expected_rows(problem)) == 8
    assert rough_us(problem, config, 50.0) == 50.0
    assert groups.time_us(config, 50.0) == pytest.approx(50.0, rel=0.4)
