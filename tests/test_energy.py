"""Energy of one entry at a time, with a device whose counter moves in steps and whose time is virtual."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from fake_engine import LAUNCHES, READING_S, STEP_S, FakeEngine, FakeFeed

from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.candidate import Candidate
from cutegen.measure.energy import IsolatedEnergy, isolated_energy, join
from cutegen.measure.engine import Prepared
from cutegen.measure.policy import Policy
from cutegen.measure.rounds import BrokenDeviceError
from cutegen.measure.statistics import Interval
from cutegen.measure.timed_rounds import time_in_rounds
from cutegen.measure.timing_run import TimingRun
from cutegen.space import Launch

PROBLEM = Problem(256, 256, 256)
EVERYONE = Policy(rounds=3, min_rounds=3, objective="energy", energy_s=0.1)
FINAL = Policy(rounds=3, min_rounds=3, energy_s=0.1)


def candidate(name: str, symbol: str = "ok") -> Candidate:
    return Candidate(name, Path("k.so"), symbol, Launch((), 0), PROBLEM)


class Recorder(FakeEngine):
    """Remembers who alone, in order."""

    def __init__(self, **settings: float) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.announced: list[str] = []
        self.alone: list[str] = []

    def feed(self, prepared: Prepared) -> FakeFeed:
        self.alone.append(self.announced[-1])
        return super().feed(prepared)


class Warming(Recorder):
    """Draws 1 % more power for each second that passes."""

    def pass_time(self, seconds: float, watts: float) -> None:
        super().pass_time(seconds, watts * (1 + 0.01 * self.clock_s))


def run(engine: Recorder, *candidates: Candidate, policy: Policy = EVERYONE, keep: str = "") -> TimingRun:
    return time_in_rounds(engine, candidates, policy, "torch.mm", engine.announced.append, keep.split())


def test_power_is_taken_from_edge_to_edge() -> None:
    """Whatever the phase of the counter, the truth lies in the interval, as wide as readings take."""
    for start in (0.0, 0.003, 0.0117, 0.0199):
        engine = FakeEngine()
        engine.pass_time(start, 700)
        found = isolated_energy(engine, Prepared("ok@300", LAUNCHES, 20.0), 0.1)
        assert found is not None
        assert found.energy_mj.low <= 300 * 20e-3 <= found.energy_mj.high
        assert found.power_w == pytest.approx(300, rel=0.01)
        # An edge lies within two readings, the last before and the first after it; there are two edges.
        assert found.energy_mj.half_width == pytest.approx(2 * READING_S / 0.1, rel=0.01)


def test_what_another_drew_just_before_does_not_count() -> None:
    """700 W up to the very start leave no trace in an entry of 300 W."""
    engine = FakeEngine()
    engine.pass_time(STEP_S * 1.5, 700)
    found = isolated_energy(engine, Prepared("ok@300", LAUNCHES, 20.0), 0.02)
    assert found is not None and found.energy_mj.low <= 6.0 <= found.energy_mj.high
    assert found.energy_mj.high < 6.6


def test_energy_of_a_kept_entry_is_measured_though_it_lost_before_the_extra_rounds() -> None:
    """The default has its energy read, as the winner and torch.mm have, and nobody else."""
    engine = Recorder()
    final = Policy(rounds=3, min_rounds=3, precision=0, extra_rounds=5, energy_s=0.1)
    entries = [candidate("default", "ok:30"), candidate("best", "ok:8"), candidate("other", "ok:9")]
    result = run(engine, *entries, policy=final, keep="default")
    assert result.timings["default"].samples == 3
    assert engine.alone == ["torch", "default", "best"]
    assert result.timings["default"].energy is not None and result.timings["other"].energy is None


def test_a_measurement_lasts_as_long_as_asked_and_ends_at_an_edge() -> None:
    """A lead-in, then at least the time that was asked for, and no more than three steps beyond."""
    engine = FakeEngine()
    engine.pass_time(0.001, 500)
    begun = engine.clock_s
    assert isolated_energy(engine, Prepared("ok@500", LAUNCHES, 20.0), 0.1) is not None
    assert 0.1 + STEP_S <= engine.clock_s - begun <= 0.1 + 3 * STEP_S


@pytest.mark.parametrize("settings", [{"counts": False}, {"step_s": math.inf}, {"step_s": 0.4}])
def test_a_counter_that_does_not_move_gives_no_number(settings: dict[str, float]) -> None:
    """Unreadable, stuck, or stepping once in a long while: None, after a quarter of a second at most."""
    engine = FakeEngine(**settings)  # type: ignore[arg-type]
    assert isolated_energy(engine, Prepared("ok@500", LAUNCHES, 20.0), 0.1) is None
    assert engine.clock_s < 0.27
    recorder = Recorder(**settings)
    result = run(recorder, candidate("a"), candidate("b"))
    assert recorder.alone == ["torch"], "nobody else is tried in vain"
    assert all(t.energy is None and t.power_w is None for t in (*result.values(), result.reference))


def test_a_counter_that_runs_backwards_gives_no_number() -> None:
    """A driver that is loaded anew begins at zero."""

    class Backwards(FakeEngine):
        def energy_mj(self) -> float | None:
            value = super().energy_mj()
            return None if value is None else -value

    assert isolated_energy(Backwards(), Prepared("ok@500", LAUNCHES, 20.0), 0.1) is None


def test_passes_are_joined_with_an_interval_around_both() -> None:
    """The mean of two, from the lowest to the highest."""
    one, two = (
        IsolatedEnergy(Interval(9.0, 10.0, 11.0), 400.0),
        IsolatedEnergy(Interval(9.5, 12.0, 12.5), 500.0),
    )
    assert join([one, two]) == IsolatedEnergy(Interval(9.0, 11.0, 12.5), 450.0)


def test_everyone_has_energy_of_its_own() -> None:
    """Millijoules are watts while it ran alone times microseconds, for each entry and the reference."""
    result = run(Recorder(), candidate("hot", "ok:20@700"), candidate("cool", "ok:25@400"))
    for name, watts, us in (("hot", 700, 20.0), ("cool", 400, 25.0), ("torch", 500, 10.0)):
        timing = result.reference if name == "torch" else result[name]
        assert timing.energy is not None
        assert timing.energy.low <= watts * us * 1e-3 <= timing.energy.high
        assert timing.power_w == pytest.approx(watts, rel=0.01)
    assert result.timings["hot"].rounds_power_w == result.timings["cool"].rounds_power_w


def test_the_second_pass_is_in_the_opposite_order() -> None:
    """The reference opens and closes."""
    engine = Recorder()
    run(engine, candidate("a"), candidate("b"), candidate("c"))
    assert engine.alone == ["torch", "a", "b", "c", "c", "b", "a", "torch"]


def test_one_measurement_of_two_is_no_energy() -> None:
    """A counter that stops between the passes leaves everyone without, not with half of the evidence."""

    class Stopping(Recorder):
        def feed(self, prepared: Prepared) -> FakeFeed:
            self.counts = len(self.alone) < 3
            return super().feed(prepared)

    result = run(Stopping(), candidate("a"), candidate("b"))
    assert all(timing.energy is None for timing in (*result.values(), result.reference))


def test_a_steady_drift_of_power_favours_nobody() -> None:
    """Equal entries of a GPU that warms up come out equal, though each pass alone would rank them."""
    engine = Warming()
    names = [f"e{i}" for i in range(6)]
    result = run(engine, *(candidate(name, "ok:20@500") for name in names))
    energies = [result.timings[name].energy_mj or 0.0 for name in names]
    assert max(energies) / min(energies) < 1.003, "one pass alone has them 0.8 % apart"
    first, last = (result.timings[name].energy for name in (names[0], names[-1]))
    assert first is not None and last is not None and first.half_width > last.half_width + 0.003


def test_for_time_only_the_winners_energy_is_measured() -> None:
    """The first of those that are tied for fastest, those that the caller names, and the reference; once."""
    entries = [candidate("fast", "ok:10"), candidate("tied", "ok:10.03"), candidate("slow", "ok:12")]
    default = candidate("default", "ok:15")
    engine = Recorder()
    result = run(engine, *entries, default, policy=FINAL, keep="default")
    assert engine.alone == ["torch", "fast", "default"]
    assert result.timings["slow"].energy is None and result.timings["slow"].median_us == 12
    engine = Recorder()
    run(engine, *entries, default, policy=EVERYONE)
    assert set(engine.alone) == {"torch", "fast", "tied", "slow", "default"}


def test_of_many_equals_the_first_is_measured() -> None:
    """A long tie does not take long; whoever wins it comes first, and has its energy after one pass."""
    engine = Recorder()
    result = run(engine, *(candidate(f"e{i}", "ok:10@500") for i in range(9)), policy=FINAL, keep="e8")
    assert engine.alone == ["torch", "e0", "e8"]
    assert result.timings["e0"].energy_mj == pytest.approx(5.0, rel=0.05)
    assert result.timings["e1"].energy_mj is None


def test_without_seconds_no_energy_is_measured() -> None:
    """Screening reads no energy."""
    engine = Recorder()
    result = run(engine, candidate("a"), policy=Policy.screen())
    assert engine.alone == [] and result.timings["a"].energy is None


def test_failing_in_a_measurement_costs_that_candidate_only() -> None:
    """It has no timing then, and a reason; the others have their energy."""
    engine = Recorder()
    result = run(engine, candidate("bad", "energy-refuses"), candidate("a"))
    assert set(result) == {"a"} and "mismatched" in result.failures["bad"].error
    assert result.timings["a"].energy is not None and result.reference.energy is not None
    assert engine.alone.count("bad") == 1
    with pytest.raises(BrokenDeviceError, match="illegal memory access"):
        run(engine := Recorder(), candidate("a"), candidate("bad", "energy-breaks"))
    assert engine.announced[-1] == "bad"


def test_a_failing_reference_ends_the_run() -> None:
    """Without it nothing compares."""

    class NoReference(Recorder):
        def feed(self, prepared: Prepared) -> FakeFeed:
            raise LaunchError("replay failed")

    with pytest.raises(LaunchError, match="replay failed"):
        run(NoReference(), candidate("a"))
