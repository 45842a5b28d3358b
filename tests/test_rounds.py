"""Laws of interleaved rounds and settling, with an engine whose time is virtual."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FAST_MHZ, PREDECESSOR_US, FakeEngine

from cutegen.errors import LaunchError, MeasureError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.candidate import Candidate
from cutegen.measure.context import CONTEXTS, PREDECESSOR
from cutegen.measure.engine import Prepared
from cutegen.measure.nvml import ClockReading
from cutegen.measure.policy import Policy
from cutegen.measure.rounds import BrokenDeviceError
from cutegen.measure.timed_rounds import time_in_rounds
from cutegen.measure.timing_run import TimingRun
from cutegen.space import Launch

PROBLEM = Problem(256, 256, 256)


def candidate(name: str, symbol: str = "ok") -> Candidate:
    return Candidate(name, Path("k.so"), symbol, Launch((), 0), PROBLEM)


class Recorder(FakeEngine):
    """Remembers what ran, in order."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)
        self.ran: list[tuple[str, float]] = []
        self.announced: list[str] = []

    def measure(self, prepared: Prepared, replays: int) -> float:
        self.ran.append((self.announced[-1], prepared.replay_us * replays))
        return super().measure(prepared, replays)


def run(engine: Recorder, candidates: list[Candidate], policy: Policy) -> TimingRun:
    return time_in_rounds(engine, candidates, policy, "torch.mm", engine.announced.append)


def test_every_round_runs_everyone_and_the_reference_once() -> None:
    """Rounds interleave: each holds the same names, in an order that changes."""
    engine = Recorder()
    policy = Policy(clock="burst", settle_s=0, rounds=6, min_rounds=6)
    result = run(engine, [candidate("a"), candidate("b"), candidate("c")], policy)
    names = [name for name, _ in engine.ran]
    rounds = [tuple(names[i : i + 4]) for i in range(0, len(names), 4)]
    assert result.rounds == len(rounds) == 6
    assert all(sorted(order) == ["a", "b", "c", "torch"] for order in rounds)
    assert len(set(rounds)) > 1


def test_extra_rounds_run_the_statistically_tied_and_the_reference() -> None:
    """The slow one is out after three rounds; twins and torch.mm take up to five more."""
    engine = Recorder(noise=0.01)
    policy = Policy(clock="burst", settle_s=0, rounds=3, min_rounds=3, precision=0, extra_rounds=5)
    result = run(engine, [candidate("a"), candidate("slow", "ok:30"), candidate("twin")], policy)
    assert result.rounds == 8
    assert Counter(name for name, _ in engine.ran) == {"a": 8, "twin": 8, "torch": 8, "slow": 3}
    assert result.timings["slow"].samples == 3 and result.timings["twin"].samples == 8
    assert run(Recorder(noise=0.01), [candidate("a"), candidate("b")], Policy(rounds=7)).rounds == 7


def test_order_follows_the_seed() -> None:
    """The same seed gives the same order, another seed another one."""
    orders = []
    for seed in (1, 1, 2):
        engine = Recorder()
        run(engine, [candidate("a"), candidate("b"), candidate("c")], Policy(clock="burst", seed=seed))
        orders.append([name for name, _ in engine.ran])
    assert orders[0] == orders[1] != orders[2]


def test_ratios_survive_a_drifting_clock() -> None:
    """With times that grow by half during the run, paired ratios stay within 2 % of the truth."""
    engine = Recorder(drift=0.8, noise=0.001)
    policy = Policy(clock="burst", rounds=15, min_rounds=15)
    result = run(engine, [candidate("a", "ok:8"), candidate("b", "ok:12")], policy)
    assert engine.clock_s * 0.8 > 0.2
    for name, truth in (("a", 10 / 8), ("b", 10 / 12)):
        assert result.timings[name].ratio == pytest.approx(truth, rel=0.02)
    assert result.timings["a"].interval.half_width > 0.05


def test_round_time_is_respected() -> None:
    """Each sample takes about the GPU time that the policy asks for, at least one graph."""
    engine = Recorder()
    run(engine, [candidate("a", "ok:20")], Policy(clock="burst", settle_s=0, round_us=6000))
    assert dict(engine.ran) == {"torch": 6000.0, "a": 6000.0}


def test_settled_burns_in_until_the_clock_holds_and_burst_does_not() -> None:
    """Burn-in loads everyone in turn and is reported; a burst only leaves the idle clock."""
    engine = Recorder()
    result = run(engine, [candidate("a")], Policy(rounds=3, min_rounds=3))
    assert result.settled is True and 0.4 <= result.settle_s <= 1.0
    assert Counter(name for name, _ in engine.ran)["a"] > 10
    assert result.timings["a"].sm_clock_mhz == 1500
    burst = run(Recorder(), [candidate("a")], Policy(clock="burst", rounds=3, min_rounds=3))
    assert burst.settled is None and burst.settle_s == pytest.approx(0.05, abs=0.011)


def test_everyone_is_announced_before_it_runs() -> None:
    """Whatever hangs was announced last."""
    engine = Recorder()
    run(engine, [candidate("a")], Policy(clock="burst", settle_s=0, rounds=2, min_rounds=2))
    assert engine.announced[:2] == ["torch", "a"]
    assert len(engine.announced) == 2 + len(engine.ran)


def test_failing_candidate_leaves_the_race_with_its_reason() -> None:
    """On a healthy device a failed launch costs one candidate; it has no timing."""
    result = run(Recorder(), [candidate("a"), candidate("bad", "time-refuses")], Policy.screen())
    assert set(result) == {"a"} and "mismatched" in result.failures["bad"].error
    early = run(Recorder(), [candidate("bad", "refuses"), candidate("a")], Policy.final())
    assert set(early) == {"a"} and set(early.failures) == {"bad"}


def test_broken_device_ends_the_run() -> None:
    """A sticky error is not survived in this process."""
    engine = Recorder()
    with pytest.raises(BrokenDeviceError, match="illegal memory access"):
        run(engine, [candidate("a"), candidate("bad", "time-breaks")], Policy.screen())
    assert engine.announced[-1] == "bad"


def test_screen_drops_the_hopeless_after_one_round() -> None:
    """Thrice slower is measured once; it still has a timing."""
    engine = Recorder()
    result = run(engine, [candidate("a", "ok:10"), candidate("slow", "ok:30")], Policy.screen())
    assert result.timings["slow"].samples == 1 and result.timings["a"].samples == 3


def test_mean_power_over_the_rounds_is_nobodys_own() -> None:
    """500 J per second of virtual time are 500 W; no energy of an entry is made out of that."""
    result = run(Recorder(), [candidate("a")], Policy(clock="burst", rounds=15, min_rounds=15))
    timing = result.timings["a"]
    assert timing.rounds_power_w == pytest.approx(500)
    assert timing.power_w is None and timing.energy is None


@pytest.mark.parametrize("context", CONTEXTS)
def test_what_runs_before_a_launch_is_timed_in_the_same_rounds_and_taken_off(context: str) -> None:
    """Everyone shows its own time: only who counts on a launch before it pays."""
    engine = Recorder()
    policy = Policy(clock="burst", settle_s=0, rounds=4, min_rounds=4, context=context)
    result = run(engine, [candidate("a", "ok:8"), candidate("counts on it", "ok:8~9.5")], policy)
    apart = context != "back_to_back"
    assert result.reference.median_us == pytest.approx(10)
    assert result.timings["a"].median_us == pytest.approx(8)
    assert result.timings["a"].ratio == pytest.approx(10 / 8)
    assert result.timings["counts on it"].median_us == pytest.approx(9.5 if apart else 8)
    assert result.timings["a"].predecessor_us == (PREDECESSOR_US if apart else None)
    counts = Counter(name for name, _ in engine.ran)
    assert counts == {"torch": 4, "a": 4, "counts on it": 4, **({PREDECESSOR: 4} if apart else {})}
    assert PREDECESSOR not in result.timings


def test_drift_is_taken_off_with_what_runs_before() -> None:
    """Both slow down together, so a launch keeps its share."""
    engine = Recorder(drift=0.8)
    policy = Policy(clock="burst", rounds=15, min_rounds=15, context="behind")
    result = run(engine, [candidate("a", "ok:8")], policy)
    assert result.timings["a"].ratio == pytest.approx(10 / 8, rel=0.02)


def test_energy_is_that_of_launches_back_to_back() -> None:
    """What runs before draws power too, and nobody knows how much."""
    engine = Recorder()
    policy = Policy(rounds=3, min_rounds=3, energy_s=0.1, context="behind")
    timing = run(engine, [candidate("a", "ok:8~9@300")], policy).timings["a"]
    assert timing.median_us == pytest.approx(9) and timing.energy is not None
    assert timing.energy.mid == pytest.approx(8 * 300 / 1000, rel=0.02)


def test_without_what_runs_before_nobody_is_timed() -> None:
    """It is nobody's fault; a launch that is not longer than nothing is no time either."""

    class Refuses(Recorder):
        def prepare_predecessor(self, context: str) -> Prepared:
            raise LaunchError("no memory left")

    class Shrinks(Recorder):
        def prepare_predecessor(self, context: str) -> Prepared:
            return Prepared("@500", 100, 30.0)

    policy = Policy(clock="burst", rounds=2, min_rounds=2, context="behind")
    with pytest.raises(LaunchError, match="no memory left"):
        run(Refuses(), [candidate("a")], policy)
    with pytest.raises(MeasureError, match=r"no longer than the 30\.00 us .* measure launches back_to_back"):
        run(Shrinks(), [candidate("a")], policy)
    with pytest.raises(MeasureError, match="cannot be named 'predecessor'"):
        candidate(PREDECESSOR)


BOTH = Policy(rounds=7, min_rounds=7, burst_rounds=3, context="behind")


def test_those_that_may_win_are_timed_in_bursts_too() -> None:
    """Within 5 % of the fastest, and the reference: after idling, at the clock that no limit holds down."""
    engine = Recorder()
    entries = [candidate("a", "ok:20!15"), candidate("b", "ok:20.1!14"), candidate("c", "ok:21.1!10")]
    result = run(engine, entries, BOTH)
    timings = result.timings
    assert timings["a"].median_us == pytest.approx(20) and timings["a"].sm_clock_mhz == 1500
    assert (timings["a"].burst_us, timings["a"].burst_clock_mhz) == (pytest.approx(15), FAST_MHZ)
    assert timings["b"].burst_us == pytest.approx(14)
    assert timings["b"].burst_ratio == pytest.approx(10 / 14)
    assert result.reference.burst_us == pytest.approx(10) and timings["c"].bursts is None
    assert [event for event in engine.events if event.startswith("idle")] == [
        *("idle 0.15 s", "idle 0.05 s", "idle 0.05 s", "idle 0.05 s")
    ]
    bursts = Counter(name for name, _ in engine.ran[-15:])
    assert bursts == {"torch": 6, "a": 3, "b": 3, PREDECESSOR: 3}, "the reference also wakes the device"


def test_who_is_asked_for_is_timed_in_bursts_too() -> None:
    """However far behind when settled: a benchmark wants to know all of its entries."""
    engine = Recorder()
    entries = [candidate("a", "ok:20!15"), candidate("c", "ok:21!10"), candidate("d", "ok:22!12")]
    timings = time_in_rounds(engine, entries, BOTH, "torch.mm", engine.announced.append, ["c"]).timings
    assert timings["c"].burst_us == pytest.approx(10) and timings["c"].burst_ratio == pytest.approx(1)
    assert timings["d"].bursts is None


def test_variants_of_a_kernel_do_not_crowd_others_out_of_the_bursts() -> None:
    """Of each kernel the fastest comes first; of one kernel alone as many as there is time for.

    Of more kernels than that the fastest half, and others up to the last that may win.
    """
    variants = [candidate(f"v{at}", f"ok:{20 + at / 1000}!15") for at in range(15)]
    same = [replace(each, symbol="ok:20!15") for each in variants]
    other = candidate("other", "ok:20.1!14")
    timings = run(Recorder(), [*same, other], BOTH).timings
    assert timings["other"].bursts is not None
    assert sum(timings[each.name].bursts is not None for each in same) == 11
    timings = run(Recorder(), variants, BOTH).timings
    some = (*range(6), 6, 8, 9, 11, 12, 14)
    assert [name for name, timing in timings.items() if timing.bursts] == [f"v{at}" for at in some]


def test_fewer_long_kernels_fit_into_a_burst() -> None:
    """A burst is over before a limit of power would end it."""
    for us, count in ((20, 12), (37, 7), (200, 4)):  # of a hundred launches in a replay, each behind 3 us
        variants = [candidate(f"v{at}", f"ok:{us + at / 1000}") for at in range(15)]
        timings = run(Recorder(), variants, BOTH).timings
        assert sum(timing.bursts is not None for timing in timings.values()) == count


BESIDE = Policy(rounds=7, min_rounds=7, back_to_back_rounds=3, context="behind")


def test_those_that_may_win_are_timed_back_to_back_too() -> None:
    """Within 5 % of the fastest, who is asked for, and the reference; what runs before is not in it."""
    engine = Recorder()
    entries = [candidate("a", "ok:15~20"), candidate("b", "ok:14~20.1"), candidate("c", "ok:10~21.1")]
    result = run(engine, [*entries, candidate("d", "ok:30~40")], BESIDE)
    timings = result.timings
    assert [timings[name].median_us for name in "abc"] == [pytest.approx(us) for us in (20, 20.1, 21.1)]
    assert (timings["a"].back_to_back_us, timings["b"].back_to_back_us) == (15, 14)
    assert timings["b"].back_to_back_ratio == pytest.approx(10 / 14)
    assert result.reference.back_to_back_us == pytest.approx(10)
    assert timings["c"].back_to_back is None and timings["d"].back_to_back is None
    assert Counter(name for name, _ in engine.ran[-9:]) == {"torch": 3, "a": 3, "b": 3}
    engine = Recorder()
    asked = time_in_rounds(engine, entries, BESIDE, "torch.mm", engine.announced.append, ["c"]).timings
    assert asked["c"].back_to_back_us == 10


def test_nobody_is_timed_back_to_back_twice_or_for_nothing() -> None:
    """Not where that decides, for a lone entry, or where launches are long."""
    two = [candidate("a"), candidate("b")]
    for policy in (replace(BESIDE, context="back_to_back"), replace(BESIDE, back_to_back_rounds=0)):
        assert run(Recorder(), two, policy).timings["a"].back_to_back is None
    assert run(Recorder(), two[:1], BESIDE).timings["a"].back_to_back is None
    for us, timed in ((499, True), (501, False)):
        entries = [candidate("a", f"ok:{us}"), candidate("b", f"ok:{us}")]
        assert (run(Recorder(), entries, BESIDE).timings["a"].back_to_back is not None) == timed


def test_who_fails_back_to_back_has_failed() -> None:
    """It has no timing then, and no energy; the others have theirs of launches as before."""

    class Fragile(Recorder):
        def prepare(self, candidate: Candidate | None, context: str = "back_to_back") -> Prepared:
            if candidate is not None and candidate.name == "b" and context == "back_to_back":
                raise LaunchError("too close")
            return super().prepare(candidate, context)

    entries = [candidate("a", "ok:15~20"), candidate("b", "ok:14~20.1")]
    result = run(Fragile(), entries, replace(BESIDE, energy_s=0.1))
    assert set(result.timings) == {"a"} and result.failures["b"].error == "too close"
    assert result.timings["a"].back_to_back_us == 15 and result.timings["a"].energy is not None


def test_energy_is_that_of_the_winner_back_to_back() -> None:
    """The winner is the one that the tuner will choose."""
    entries = [candidate("a", "ok:15~20"), candidate("b", "ok:14~20.1")]
    timings = run(Recorder(), entries, replace(BESIDE, energy_s=0.1)).timings
    assert timings["b"].energy is not None and timings["a"].energy is None


def test_what_runs_before_is_given_less_time_than_the_rest_under_load() -> None:
    """So that it does not keep the GPU cool; in bursts its time is as exact as that of the others."""
    for clock, share in (("settled", 0.25), ("burst", 1.0)):
        engine = Recorder()
        policy = Policy(clock=clock, settle_s=0, rounds=2, min_rounds=2, context="behind")
        run(engine, [candidate("a", "ok:20")], policy)
        took = dict(engine.ran)
        assert took[PREDECESSOR] == pytest.approx(share * policy.round_us, rel=0.1)
        assert took["a"] == pytest.approx(policy.round_us, rel=0.2)


def test_without_a_limit_of_power_bursts_tell_nothing_new() -> None:
    """The clock is as high under load; nobody waits for it to come back."""

    class Cool(Recorder):
        def read_clocks(self) -> ClockReading:
            return ClockReading(FAST_MHZ, 0.0, 100.0, ())

    engine = Cool()
    assert run(engine, [candidate("a")], BOTH).timings["a"].bursts is None
    assert "idle 0.05 s" not in engine.events


def test_energy_is_that_of_the_winner_in_bursts() -> None:
    """The winner is the one that the tuner will choose."""
    engine = Recorder()
    entries = [candidate("a", "ok:20!15"), candidate("b", "ok:20.1!14")]
    timings = run(engine, entries, replace(BOTH, energy_s=0.1)).timings
    assert timings["b"].energy is not None and timings["a"].energy is None


def test_who_fails_in_bursts_has_failed() -> None:
    """It has no timing then."""

    class Fragile(Recorder):
        def measure(self, prepared: Prepared, replays: int) -> float:
            if self.announced[-1] == "b" and "idle 0.15 s" in self.events:
                raise LaunchError("too hasty")
            return super().measure(prepared, replays)

    result = run(Fragile(), [candidate("a"), candidate("b")], BOTH)
    assert set(result.timings) == {"a"} and result.failures["b"].error == "too hasty"
    assert result.timings["a"].burst_us == pytest.approx(20)
