"""Laws of tools/check_range.py that need no GPU."""

from __future__ import annotations

from cutegen.families.ranges import parse_range
from tools.check_range import Row, random_sizes, summary


def test_random_sizes_are_members_even_over_the_doublings() -> None:
    """The same for one seed; as many as the range has, at most."""
    whole = parse_range("gemm 8..8192x64x64 bf16 mn")
    sizes = random_sizes(whole, 60, 0)
    assert len(sizes) == len(set(sizes)) == 60 and all(whole.at(size) for size in sizes)
    assert sizes == random_sizes(whole, 60, 0) != random_sizes(whole, 60, 1)
    assert sum(size < 512 for size in sizes) > 15
    assert sorted(random_sizes(parse_range("gemm 1..4x64x64 bf16 kk"), 60, 0)) == [1, 2, 3, 4]


def test_the_summary_has_means_and_worst_cases() -> None:
    """Regret of those that were tuned alone only."""
    rows = [Row(1, "range", 10.0, 1.21), Row(2, "range", 10.0, 1.0, 9.0), Row(3, "range", 10.0, 0.9, 10.0)]
    assert summary(rows) == (
        "3 sizes beside the baseline: geometric mean 1.029, smallest 0.900, 1 under 1; "
        "2 beside exact tuning: regret 5.41% in the geometric mean, 11.11% at worst"
    )
    assert summary([]) == ""
