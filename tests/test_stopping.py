"""Laws of the two rules that end measuring: the race of entries, and the settling of the clock."""

from __future__ import annotations

import pytest

from cutegen.measure.stopping import Race, Settling


def race(names: list[str], **changes: float) -> Race:
    settings = {"min_rounds": 3, "max_rounds": 10, "precision": 0.01, "prune": 0.0, **changes}
    return Race(names, **settings)  # type: ignore[arg-type]


def test_race_stops_as_soon_as_everyone_is_precise() -> None:
    """Equal samples stop at the fewest rounds, noisy ones run to the most."""
    quiet, noisy = race(["a"]), race(["a"])
    rounds = 0
    while not quiet.finished:
        quiet.observe(10.0, {"a": 5.0})
    while not noisy.finished:
        rounds += 1
        noisy.observe(10.0, {"a": 5.0 + rounds % 2})
    assert (quiet.rounds, noisy.rounds) == (3, 10)
    assert quiet.ratio("a").mid == 2


def test_race_drops_the_hopeless_and_keeps_their_samples() -> None:
    """Whoever is more than the margin behind the best runs no more but has a result."""
    contest = race(["fast", "near", "slow"], prune=0.3)
    contest.observe(10.0, {"fast": 5.0, "near": 6.0, "slow": 7.0})
    assert contest.alive == ("fast", "near")
    contest.observe(11.0, {"fast": 5.5, "near": 6.6})
    assert contest.samples("slow") == (7.0,) and contest.ratio("slow").mid == pytest.approx(10 / 7)
    assert contest.samples("near") == (6.0, 6.6)


def test_race_drops_for_half_as_much_once_medians_are_known() -> None:
    """After three of five rounds a slower one is out that the first round left in; a tenth behind stays."""
    contest = race(["fast", "near", "slow"], min_rounds=5, prune=0.3)
    for alive in (3, 3, 2):
        contest.observe(10.0, {"fast": 5.0, "near": 5.5, "slow": 6.0})
        assert len(contest.alive) == alive
    assert contest.alive == ("fast", "near")


def test_extra_rounds_run_the_statistically_tied() -> None:
    """After three rounds the slow one is out; the two that are alike run until they are told apart."""
    contest = race(["first", "twin", "slow"], max_rounds=3, precision=0.0, extra_rounds=20)
    wobble = [0.02, -0.02, 0.01, -0.01]
    while not contest.finished:
        by = wobble[contest.rounds % 4]
        known = {"first": 5.0 * (1 + by), "twin": 5.05 * (1 - by), "slow": 6.0}
        contest.observe(10.0, {name: known[name] for name in contest.alive})
    assert len(contest.samples("slow")) == 3
    assert contest.alive == ("first", "twin") and contest.rounds == 23
    apart = race(["first", "twin", "slow"], max_rounds=3, precision=0.0, extra_rounds=20)
    while not apart.finished:
        apart.observe(10.0, {"first": 5.0, "twin": 5.1, "slow": 6.0})
    assert apart.alive == ("first",) and apart.rounds == 3


def test_the_drift_of_all_tells_entries_apart() -> None:
    """Everyone slows down together by 10 %: 2 % between two of them still decide."""
    contest = race(["fast", "near"], max_rounds=6, precision=0.0, extra_rounds=20)
    while not contest.finished:
        by = 1 + 0.1 * (contest.rounds % 3)
        contest.observe(10.0 * by, {"fast": 5.0 * by, "near": 5.1 * by})
    assert contest.alive == ("fast",) and contest.rounds == 6


def test_race_goes_on_without_a_withdrawn_runner() -> None:
    """A failure takes nobody else along; a race of nobody ends after the fewest rounds."""
    contest = race(["a", "b"])
    contest.observe(1.0, {"a": 1.0, "b": 1.0})
    contest.withdraw("b")
    contest.observe(1.0, {"a": 1.0})
    assert contest.alive == ("a",) and contest.samples("b") == (1.0,)
    empty = race([])
    while not empty.finished:
        empty.observe(1.0, {})
    assert empty.rounds == 3


def run_settling(clock: list[float], limited: bool, step_s: float = 0.01, limit_s: float = 3.0) -> Settling:
    settling = Settling(limit_s)
    for i in range(10_000):
        if settling.done:
            break
        settling.observe(i * step_s, clock[min(i, len(clock) - 1)], limited)
    return settling


def test_settling_ends_soon_at_a_steady_clock() -> None:
    """A clock that never moves is settled after two windows."""
    settling = run_settling([1980.0], limited=False)
    assert settling.settled and settling.elapsed_s == pytest.approx(0.4, abs=0.03)


def test_settling_waits_for_the_fall_under_load() -> None:
    """A clock that falls at 0.3 s settles only when both windows lie behind the fall."""
    settling = run_settling([1980.0] * 30 + [1980.0 - 10 * i for i in range(50)] + [1480.0], limited=True)
    assert settling.settled and settling.elapsed_s > 0.8


def test_a_clock_before_the_limit_of_power_says_nothing_of_the_one_under_it() -> None:
    """A GPU may hold its highest clock above its limit of power for a while, and report the limit later."""
    for reported, least in ((35, 0.75), (0, 0.4)):
        settling = Settling(3.0)
        for at in range(300):
            if settling.done:
                break
            settling.observe(at * 0.01, 1950.0 if at < 50 else 1450.0, at >= reported)
        assert settling.settled and settling.elapsed_s >= least - 0.001
    settling = run_settling([1950.0], limited=True)
    assert settling.settled and settling.elapsed_s == pytest.approx(0.4, abs=0.03)


def test_settling_gives_up_at_its_limits() -> None:
    """A restless clock gets the short limit without a power limit and the whole limit with one."""
    restless = [1500.0 + 3 * i for i in range(1000)]
    for limited, limit in ((False, 1.0), (True, 3.0)):
        settling = Settling(3.0, tolerance=0.001)
        for i, clock in enumerate(restless):
            if settling.done:
                break
            settling.observe(i * 0.01, clock, limited)
        assert not settling.settled and settling.elapsed_s == pytest.approx(limit, abs=0.02)


def test_settling_without_readings_takes_the_short_limit() -> None:
    """Where no clock can be read, time alone decides."""
    settling = Settling(3.0)
    at = 0.0
    while not settling.done:
        settling.observe(at, None, False)
        at += 0.01
    assert not settling.settled and settling.elapsed_s == pytest.approx(1.0, abs=0.02)
