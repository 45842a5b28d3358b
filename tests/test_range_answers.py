"""Which configs may answer a size of a range, and when it is left to the baseline.

That is by its time beside the fastest, between sizes, and under load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from cutegen.families.registry import parse_problem
from cutegen.family import Problem
from cutegen.measure.timing import Timing
from cutegen.search.interpolation import interpolated
from cutegen.search.range_model import Estimates
from cutegen.space import Config
from cutegen.tuning.compared_ratios import ComparedRatios
from cutegen.tuning.range_answers import Baseline, Measured, best_ratios, ratios, rivals

A, B = (Config({"tile_shape_mn": (tile, 64), "split_k": 1}) for tile in (64, 128))


def few_operations(size: int) -> Problem:
    """Of so small a matrix that the bytes decide at every size."""
    return parse_problem(f"gemm {size}x64x64 bf16 kk")


def nothing_expected(_: int) -> None:
    """The baseline of a family without a fit."""


def measured(own_us: float, ratio: float, *, drift: float = 1.0) -> Measured:
    """A config and the baseline in rounds ``drift`` times as long; paired times are without it."""
    own, base = [own_us * drift] * 3, [own_us * drift * ratio] * 3
    return Measured(Timing.of(own, base, reference="torch.mm", drift=[drift] * 3), "")


def estimates(times: Mapping[int, Mapping[Config, float]]) -> Estimates:
    """What was measured, of configs that are predicted to take as long as the size is."""
    found = Estimates(lambda size, _: float(size), lambda _: 8)
    for size, known in times.items():
        found.learn(size, known)
    return found


def test_orders_of_tiles_of_one_kernel_take_one_place_among_the_rivals() -> None:
    """Where many orders of the fastest kernel were measured, other kernels still compete between sizes."""
    orders = [A.replace(swizzle_size=size) for size in (1, 2, 4, 8, 16, 32, 64, 128)]
    times = {**{order: 90.0 + at for at, order in enumerate(orders)}, B: 100.0}
    known = estimates({100: times, 200: times})
    found = rivals(known, 140, lambda config: Config({"tile_shape_mn": config["tile_shape_mn"]}))
    assert found == [orders[0], B]


def test_the_baseline_is_as_fast_between_sizes_as_beside_the_fastest_config() -> None:
    """Rounds in which the clock was low say as much of the ratio as others."""
    results = {
        100: {A: measured(100.0, 1.2, drift=1.3), B: measured(130.0, 0.9)},
        400: {A: measured(400.0, 1.2)},
    }
    known = estimates({size: {A: found[A].timing.paired.mid} for size, found in results.items()})
    ratio_at = ratios(results, known, Baseline(nothing_expected, few_operations))
    assert ratio_at(100, A) == pytest.approx(1.2) and ratio_at(200, A) == pytest.approx(1.2)
    assert best_ratios(results, Baseline(nothing_expected, few_operations)) == pytest.approx(
        {100: 1.2, 400: 1.2}
    )


@pytest.mark.parametrize(
    ("expected", "ratio"),
    [(lambda size: 0.5 * size, 1.2), (lambda size: 0.5 * size if size != 200 else 80.0, 0.96)],
    ids=["as between", "with a faster kernel"],
)
def test_a_faster_kernel_of_the_library_between_two_sizes_is_believed(
    expected: Callable[[int], float], ratio: float
) -> None:
    """What is expected is mended by its errors at both sizes, here 2.4 times as long; a slower one is not."""
    results = {size: {A: measured(float(size), 1.2)} for size in (100, 400)}
    known = estimates({size: {A: float(size)} for size in (100, 400)})
    assert ratios(results, known, Baseline(expected, few_operations))(200, A) == pytest.approx(ratio)
    slower = Baseline(lambda size: expected(size) * (3.0 if size == 200 else 1.0), few_operations)
    assert ratios(results, known, slower)(200, A) == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("problem", "doubt"),
    [
        ("gemm 100x4096x4096 bf16 kk", 1.0),
        ("gemm 400x4096x4096 bf16 kk", 1.05),
        ("gemm 400x64x4096 bf16 kk", 1.0),
        ("gemm 400x4096x4096 bf16 kk act=silu", 1.0),
    ],
)
def test_a_lead_over_a_library_counts_for_less_where_the_power_limit_may_decide(
    problem: str, doubt: float
) -> None:
    """By operations for each byte; not beside several calls, of which nothing was recorded."""
    baseline = Baseline(nothing_expected, lambda _: parse_problem(problem))
    assert baseline.doubt(1) == doubt
    results = {1: {A: measured(10.0, 1.2)}}
    assert ratios(results, estimates({1: {A: 10.0}}), baseline)(1, A) == pytest.approx(1.2 / doubt)
    assert best_ratios(results, baseline) == pytest.approx({1: 1.2 / doubt})


def test_beyond_known_sizes_the_outermost_value_counts() -> None:
    """Between two it lies on a straight line of both logarithms; without any there is none."""
    known = {10: 1.0, 1000: 4.0}
    assert [interpolated(size, [10, 1000], known) for size in (1, 10, 1000, 5000)] == [1.0, 1.0, 4.0, 4.0]
    assert interpolated(100, [10, 1000], known) == pytest.approx(2.0)
    assert interpolated(100, [], {}) is None


def same_kernel(config: Config) -> Config:
    return config


def test_ratios_of_compared_sizes_are_interpolated_between_them() -> None:
    """On logarithmic axes; near one alone, its own; none far from all that were compared."""
    found = ComparedRatios(same_kernel)
    assert found.between(lambda _: A)(100) is None
    found.learn(100, {A: 1.0, B: 0.9})
    found.learn(121, {A: 1.21})
    found.learn(800, {})
    ratio_at = found.between(lambda _: A)
    assert found.sizes == {100, 121}
    assert [ratio_at(size) for size in (90, 100, 121, 140)] == pytest.approx([1.0, 1.0, 1.21, 1.21])
    assert ratio_at(110) == pytest.approx(1.1)
    assert ratio_at(50) is None and ratio_at(400) is None


def test_another_answer_than_those_compared_counts_as_the_slowest() -> None:
    found = ComparedRatios(same_kernel)
    found.learn(100, {A: 1.2, B: 0.9})
    other = A.replace(split_k=2)
    assert found.between(lambda _: other)(100) == pytest.approx(0.9)


def test_where_the_answer_changes_only_its_own_kernel_tells_its_ratio() -> None:
    """Not that of before, which fitted in one tile; where neither side has it, the slower answer counts."""
    found = ComparedRatios(same_kernel)
    found.learn(120, {A: 1.1})
    found.learn(140, {B: 0.95})
    assert found.between(lambda size: A if size <= 128 else B)(130) == pytest.approx(0.95)
    assert found.between(lambda size: A if size <= 128 else B)(122) == pytest.approx(1.1)
    other = A.replace(split_k=2)
    assert found.between({120: A, 130: other, 140: B}.__getitem__)(130) == pytest.approx(0.95)


def test_of_a_kernel_the_better_order_of_tiles_counts() -> None:
    found = ComparedRatios(lambda config: config.replace(split_k=1))
    found.learn(100, {A: 1.2, A.replace(split_k=2): 1.3})
    assert found.between(lambda _: A)(100) == pytest.approx(1.3)


def test_what_was_compared_decides_where_the_library_changes_between_sizes() -> None:
    """Not where few operations meet a byte: there the rounds of all contenders do."""
    results = {size: {A: measured(float(size), 1.2)} for size in (100, 400)}
    known = estimates({size: {A: float(size)} for size in (100, 400)})
    uneven = Baseline(nothing_expected, lambda size: parse_problem(f"gemm {size}x4096x4096 bf16 kk"))
    assert uneven.is_uneven(400) and not uneven.is_uneven(50)
    ratio_at = ratios(results, known, uneven, lambda _: 0.97)
    assert ratio_at(150, A) == 0.97
    assert ratio_at(400, A) == ratio_at(300, A) == pytest.approx(0.97 / uneven.doubt(400))
    even = Baseline(nothing_expected, few_operations)
    assert not even.is_uneven(400)
    assert ratios(results, known, even, lambda _: 0.97)(400, A) == pytest.approx(1.2)
