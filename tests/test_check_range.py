"""Laws of tools/check_range.py that need no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from cutegen.families.gemm.problem import Problem
from cutegen.families.ranges import parse_range
from tools.benchmark.range_table import RANGE_CHECK, RangeResults
from tools.check_range import Row, meets_power_limit, random_sizes, summary


def results(asked: str, rows: Sequence[Row], tuned_s: float | None = None) -> RangeResults:
    """What the tool would write of these rows."""
    return RangeResults({
        "kind": RANGE_CHECK, "range": asked, "tuned_s": tuned_s, "gpu": "G", "commit": "abc",
        "machine": {"driver": "1"}, "measured_at": "2026-11-23T01:00:00", "policy": {"context": "behind"},
        "rows": [row.to_json() for row in rows],
    })  # fmt: skip


def test_random_sizes_are_members_even_over_the_doublings() -> None:
    """The same for one seed; as many as the range has, at most."""
    whole = parse_range("gemm 8..8192x64x64 bf16 mn")
    sizes = random_sizes(whole, 60, 0)
    assert len(sizes) == len(set(sizes)) == 60 and all(whole.at(size) for size in sizes)
    assert sizes == random_sizes(whole, 60, 0) != random_sizes(whole, 60, 1)
    assert sum(size < 512 for size in sizes) > 15
    assert sorted(random_sizes(parse_range("gemm 1..4x64x64 bf16 kk"), 60, 0)) == [1, 2, 3, 4]


def test_results_are_rendered_by_bands() -> None:
    """Ratios round down, regrets up; sizes that were not tuned alone have none."""
    rows = [Row(1, "range", 10.0, 1.2109), Row(9, "range", 10.0, 1.0, 9.0), Row(64, "range", 10.0, 0.9, 10.0)]
    found = results("gemm 1..64x64x64 bf16 kk", rows, tuned_s=26.01)
    assert found.summary() == [
        "- gemm 1..64x64x64 bf16 kk: 3 sizes, geometric mean **1.029**, smallest 0.900",
        "- 2 of them beside exact tuning: 5.5 % behind in the geometric mean, 11.2 % at worst",
    ]
    text = found.render()
    assert "| 1 to 8 | 1 | 1.210 | 1.210 |  |" in text
    assert "| 9 to 64 | 2 | 0.948 | 0.900 | 2: 5.5 % behind in the geometric mean, 11.2 % at worst |" in text
    assert "tuned in 27 s; sizes at random" in text and "each launch behind" in text


def test_the_summary_has_means_and_worst_cases() -> None:
    """Regret of those that were tuned alone only."""
    rows = [Row(1, "range", 10.0, 1.21), Row(2, "range", 10.0, 1.0, 9.0), Row(3, "range", 10.0, 0.9, 10.0)]
    assert summary(rows) == (
        "3 sizes beside the baseline: geometric mean 1.029, smallest 0.900, 1 under 1; "
        "2 beside exact tuning: regret 5.41% in the geometric mean, 11.11% at worst"
    )
    assert summary([]) == ""


def test_what_is_left_to_the_baseline_is_shown_apart() -> None:
    """The kernel's own ratio stays; as served such a size counts as 1."""
    rows = [Row(1, "range", 10.0, 1.21), Row(300, "range", 10.0, 0.8251, by_baseline=True, clock_mhz=1980.0)]
    assert rows[1].ratio == 0.8251 and rows[1].served_ratio == 1.0
    assert summary(rows) == (
        "2 sizes beside the baseline: geometric mean 0.999, smallest 0.825, 1 under 1; "
        "as served by default, 1 left to the baseline: geometric mean 1.100, smallest 1.000"
    )
    found = results("gemm 1..512x64x64 bf16 kk", rows)
    assert found.summary()[1] == (
        "- as served by default, which leaves 1 of them to the library: geometric mean **1.100**, "
        "smallest 1.000"
    )
    text = found.render()
    assert "| all | 2 | 0.999 | 0.825 | 1 | 1.100 | 1.000 |  |" in text
    assert "| 257 to 512 | 1 | 0.825 | 0.825 | 1 | 1.000 | 1.000 |  |" in text


def test_sizes_at_the_power_limit_have_two_ratios() -> None:
    """With settled clocks and in bursts; the others count as they are in both."""
    assert meets_power_limit(Problem(256, 6144, 4096)) and not meets_power_limit(Problem(64, 6144, 4096))
    rows = [Row(8, "range", 10.0, 1.21), Row(4096, "range", 10.0, 1.1, burst_ratio=1.0, clock_mhz=1500.0)]
    assert [row.ratio_at_full_clock for row in rows] == [1.21, 1.0]
    assert summary(rows) == (
        "2 sizes beside the baseline: geometric mean 1.154, smallest 1.100, 0 under 1; "
        "1 of them in bursts: geometric mean of all 1.100, smallest 1.000"
    )
    found = results("gemm 1..8192x64x64 bf16 kk", rows)
    assert found.summary()[1] == (
        "- 1 of them in bursts, the others as before: geometric mean **1.100**, smallest 1.000"
    )
    assert "| 2049 to 8192 | 1 | 1.100 | 1.100 | 1.000 | 1.000 |  |" in found.render()
