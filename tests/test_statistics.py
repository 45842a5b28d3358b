"""Laws of the statistics that decide which timing wins and when measuring may stop."""

from __future__ import annotations

import math
import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegen.errors import MeasureError
from cutegen.measure.statistics import (
    LONG_US,
    Interval,
    choose,
    choose_in_all,
    choose_in_both,
    common_drift,
    geometric_mean,
    median,
    median_interval,
    ratio_interval,
    steady_interval,
    tied,
    within,
)

times = st.floats(0.1, 1e6)


@given(st.lists(times, min_size=1, max_size=40))
def test_interval_is_ordered_and_made_of_samples(samples: list[float]) -> None:
    """Low and high are samples with the median between them."""
    interval = median_interval(samples)
    assert interval.low in samples and interval.high in samples
    assert interval.low <= interval.mid <= interval.high


@pytest.mark.parametrize(("count", "rank"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (25, 7)])
def test_interval_uses_the_tabulated_ranks(count: int, rank: int) -> None:
    """The order statistics of 95 % intervals of a median are those of the tables (sign test)."""
    interval = median_interval(list(range(count)))
    assert (interval.low, interval.high) == (rank, count - 1 - rank)


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    """Of many seeded experiments with 15 samples at least 95 % enclose the true median."""
    rng = random.Random(1)
    intervals = [median_interval([rng.lognormvariate(0, 1) for _ in range(15)]) for _ in range(2000)]
    assert sum(x.low <= 1 <= x.high for x in intervals) >= 0.95 * len(intervals)


@given(st.lists(times, min_size=1, max_size=20), times)
def test_common_drift_cancels_in_paired_ratios(own: list[float], factor: float) -> None:
    """If both slow down together round by round, the ratio does not move."""
    reference = [x * factor for x in own]
    ratio = ratio_interval(reference, own)
    assert math.isclose(ratio.low, factor) and math.isclose(ratio.high, factor)


def test_undefined_statistics_are_refused() -> None:
    """No sample, unequal pairs and non-positive means have no answer."""
    with pytest.raises(MeasureError, match="no samples"):
        median_interval([])
    with pytest.raises(MeasureError, match="2 reference samples cannot pair with 1"):
        ratio_interval([1, 2], [1])
    for bad in ([], [1.0, 0.0], [math.nan]):
        with pytest.raises(MeasureError, match="geometric mean"):
            geometric_mean(bad)
    assert geometric_mean([2, 8]) == pytest.approx(4)


@given(times, times, times, times)
def test_tied_is_symmetric_and_reflexive(a: float, b: float, c: float, d: float) -> None:
    """Order of the two does not matter."""
    x, y = (Interval(min(p, q), (p + q) / 2, max(p, q)) for p, q in ((a, b), (c, d)))
    assert tied(x, y) == tied(y, x) and tied(x, x)


def test_tie_needs_overlap_or_close_medians() -> None:
    """0.4 % apart is a tie, 2 % apart with narrow intervals is not, with wide ones it is."""
    assert tied(Interval(99.9, 100, 100.1), Interval(100.3, 100.4, 100.5))
    assert not tied(Interval(99.9, 100, 100.1), Interval(101.9, 102, 102.1))
    assert tied(Interval(99, 100, 102), Interval(101, 102, 103))


def test_winner_is_the_preferred_of_the_tied_whatever_the_order() -> None:
    """The earliest of those tied with the fastest wins, in any order of the mapping."""
    times = {
        "simple": Interval(100.2, 100.3, 100.4),
        "fast": Interval(99.9, 100, 100.1),
        "slow": Interval(119, 120, 121),
    }
    for order in permutations(times):
        shuffled = {name: times[name] for name in order}
        assert choose(shuffled, ["slow", "simple", "fast", "absent"]) == ("simple", ("simple", "fast"))
    with pytest.raises(MeasureError, match="does not rank slow"):
        choose(times, ["simple", "fast"])
    with pytest.raises(MeasureError, match="no timing"):
        choose({}, [])


def test_an_uncertain_fast_entry_does_not_excuse_a_slow_one() -> None:
    """The default loses to whoever surely beats it, though the one with the smallest median is unsure."""
    times = {
        "default": Interval(10.0, 10.2, 10.4),
        "sure": Interval(9.7, 9.74, 9.8),
        "unsure": Interval(9.4, 9.7, 10.3),
    }
    assert choose(times, ["default", "sure", "unsure"]) == ("sure", ("sure", "unsure"))


def test_overlap_excuses_a_little_and_no_more() -> None:
    """Less than half a percent behind an unsure entry the preferred one wins, one percent behind not."""
    unsure = Interval(9.4, 9.7, 10.3)
    for middle, winner in ((9.74, "default"), (9.8, "unsure")):
        times = {"default": Interval(9.6, middle, 10.4), "unsure": unsure}
        assert choose(times, ["default", "unsure"]) == (winner, ("default", "unsure"))
        assert choose(times, ["default", "unsure"], excuse=math.inf)[0] == "default"


def test_whoever_stopped_early_is_put_on_the_scale_of_those_who_went_on() -> None:
    """The GPU slows by 2 % after six rounds, in which most have run: 1 % between two entries still decides,
    though the worse one has seen the fast rounds only."""
    noise = [0.0, 0.001, -0.001, 0.002, -0.002, 0.0]
    factors = [1.0 + e for e in noise] + [1.02 + e for e in noise * 5]
    samples = {f"early{n}": [(10.1 + n) * factor for factor in factors[:6]] for n in range(12)}
    samples |= {"torch": [20.0 * factor for factor in factors], "best": [10.0 * factor for factor in factors]}
    drift = common_drift(samples)
    times = {name: steady_interval(values, drift[: len(values)]) for name, values in samples.items()}
    assert median(samples["early0"]) < median(samples["best"])
    assert times["early0"].mid / times["best"].mid == pytest.approx(1.01)
    assert choose(times, [name for name in times if name != "best"] + ["best"])[0] == "best"


def test_common_drift_is_what_all_entries_share() -> None:
    """Factors common to a round come back; one entry's own noise does not, nor does an early stop matter."""
    factors = [1.0, 1.1, 0.9, 1.0, 1.2]
    samples = {f"e{n}": [(10.0 + n) * factor for factor in factors] for n in range(6)}
    samples["noisy"] = [20.0, 26.0, 21.0, 19.0, 20.5]
    samples["stopped"] = [7.0, 7.7]
    assert common_drift(samples) == pytest.approx(factors)
    assert common_drift({}) == []


def exactly(**times: float) -> dict[str, Interval]:
    return {name: Interval(time * 0.999, time, time * 1.001) for name, time in times.items()}


@pytest.mark.parametrize(
    ("settled", "bursts", "winner"),
    [
        ({"a": 100, "b": 100.9}, {"a": 90, "b": 88}, "b"),
        ({"a": 100, "b": 101.1}, {"a": 90, "b": 89}, "a"),
        ({"a": 100, "b": 103}, {"a": 90, "b": 86}, "b"),
        ({"a": 100, "b": 103}, {"a": 90, "b": 88}, "a"),
        ({"a": 100, "b": 105.1}, {"a": 90, "b": 80}, "a"),
        ({"a": 100, "b": 100.9}, {"a": 90, "b": 89.9}, "a"),
        ({"a": 100.3, "b": 100}, {"a": 90, "b": 89.9}, "a"),
        ({"a": 100.3, "b": 100}, {"a": 90, "b": 88}, "b"),
        ({"a": 100, "b": 100.9}, {}, "a"),
        ({"a": 100, "b": 100.9}, {"a": 90}, "a"),
    ],
)
def test_what_is_nearly_as_fast_when_settled_may_win_by_its_bursts(
    settled: dict[str, float], bursts: dict[str, float], winner: str
) -> None:
    """Within 1 % settled, or where it loses less in its worse regime; a tie leaves the settled winner.

    So does a rival without bursts, or one that is too far behind.
    """
    found, equals = choose_in_both(exactly(**settled), exactly(**bursts), ["a", "b"])
    assert found == winner
    assert equals == choose(exactly(**settled), ["a", "b"])[1]


def test_of_those_that_lose_alike_in_one_regime_the_other_decides() -> None:
    """Unless the settled winner is among them; the preferred one wins where both are alike."""
    settled = exactly(fast=100, steady=103, both=103.1, same=103.2)
    bursts = exactly(fast=107, steady=103, both=100, same=100.1)
    assert choose_in_both(settled, bursts, ["fast", "steady", "same", "both"])[0] == "same"
    assert choose_in_both(settled, bursts, ["fast", "steady", "both", "same"])[0] == "both"
    level = exactly(fast=103, steady=103, both=100, same=100.1)
    assert choose_in_both(settled, level, ["steady", "both", "same", "fast"])[0] == "fast"


@pytest.mark.parametrize(
    ("times", "winner"), [(1, "bursting"), (10, "bursting"), (20, "steady"), (40, "steady")]
)
def test_what_takes_long_is_seldom_in_a_burst(times: int, winner: str) -> None:
    """Beyond 2 ms a loss in bursts counts less, the less the longer."""
    settled = exactly(steady=200 * times, bursting=205 * times)
    bursts = exactly(steady=180 * times, bursting=172.5 * times)
    assert LONG_US == 2000 and choose_in_both(settled, bursts, ["steady", "bursting"])[0] == winner


def test_who_keeps_up_with_the_reference_in_both_comes_first() -> None:
    """Though others lose less beside the fastest; unless nobody does, or only who is out of reach."""
    settled, bursts = exactly(fast=100, level=104, far=106), exactly(fast=103, level=100, far=99)
    names = ["fast", "level", "far"]
    assert choose_in_both(settled, bursts, names)[0] == "fast"
    assert choose_in_both(settled, bursts, names, ["level"])[0] == "level"
    assert choose_in_both(settled, bursts, names, ["level", "fast"])[0] == "fast"
    assert choose_in_both(settled, bursts, names, ["far"])[0] == "fast"
    assert choose_in_both(settled, {}, names, ["level"])[0] == "fast"
    assert choose_in_both(settled, exactly(level=100, far=99), names)[0] == "level", "not timed in bursts"


@pytest.mark.parametrize(
    ("settled", "back_to_back", "winner"),
    [
        ({"a": 100, "b": 101.9}, {"a": 100, "b": 95}, "b"),
        ({"a": 100, "b": 102.1}, {"a": 100, "b": 50}, "a"),
        ({"a": 100, "b": 101}, {"a": 100, "b": 98.5}, "a"),
        ({"a": 100, "b": 101}, {"a": 100, "b": 97.5}, "b"),
        ({"a": 100, "b": 101, "c": 101.1}, {"a": 100, "b": 90.1, "c": 90}, "b"),
        ({"a": 100, "b": 101, "c": 101}, {"a": 100, "b": 92, "c": 90}, "c"),
        ({"a": 100, "b": 101}, {"b": 50}, "a"),
        ({"a": 100, "b": 101}, {}, "a"),
    ],
)
def test_who_is_near_the_winner_takes_its_place_if_it_saves_more_back_to_back(
    settled: dict[str, float], back_to_back: dict[str, float], winner: str
) -> None:
    """At most 2 % behind, with more than 1 % saved over both; of equal savings the preferred one."""
    names = ["a", "b", "c"]
    found, equals = choose_in_all(exactly(**settled), {}, exactly(**back_to_back), names)
    assert found == winner
    assert equals == choose(exactly(**settled), names)[1]


def test_who_saves_back_to_back_must_be_near_in_bursts_too() -> None:
    """And keep up with the reference if the winner does."""
    settled, others, names = exactly(a=100, b=100.5), exactly(a=100, b=80), ["a", "b"]
    assert choose_in_all(settled, exactly(a=90, b=91), others, names)[0] == "b"
    assert choose_in_all(settled, exactly(a=90, b=92), others, names)[0] == "a"
    assert choose_in_all(settled, exactly(a=90), others, names)[0] == "a", "not timed in bursts"
    assert choose_in_all(settled, exactly(a=90, b=91), others, names, ["a"])[0] == "a"
    assert choose_in_all(settled, exactly(a=90, b=91), others, names, ["a", "b"])[0] == "b"


def test_rivals_are_ranked_by_their_time() -> None:
    """The fastest first, up to the band."""
    assert within(exactly(a=102, b=100, c=101, d=101.1), 0.01) == ("b", "c")
    assert within({}, 0.01) == ()
