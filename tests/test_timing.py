"""Laws of the summary of one entry's samples, and of costs that are compared."""

from __future__ import annotations

import json

import pytest

from cutegen.errors import MeasureError, UsageError
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import Interval
from cutegen.measure.timing import Timing, against, cost_ratio


def test_timing_summarises_pairs() -> None:
    """Ratio is the median of paired ratios; energy and the power beside it are those of ``with_energy``."""
    rounds = Timing.of(
        [10.0, 11.0, 12.0], [20.0, 22.0, 24.0], clocks_mhz=[1500, 1510, 1490], rounds_power_w=600.0
    )
    assert (rounds.power_w, rounds.energy_mj, rounds.energy) == (None, None, None)
    timing = rounds.with_energy(Interval(5.0, 6.0, 6.5), 550.0)
    assert (timing.median_us, timing.low_us, timing.high_us, timing.samples) == (11.0, 10.0, 12.0, 3)
    assert (timing.ratio, timing.ratio_low, timing.ratio_high, timing.reference_us) == (2.0, 2.0, 2.0, 22.0)
    assert (timing.sm_clock_mhz, timing.rounds_power_w, timing.power_w) == (1500, 600.0, 550.0)
    assert timing.energy == Interval(5.0, 6.0, 6.5)
    assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing


def test_old_records_lose_the_energy_that_was_nobodys_own() -> None:
    """The mean over all rounds keeps its value under its right name; the product with the time goes."""
    old = {
        "median_us": 10.0,
        "low_us": 9.0,
        "high_us": 11.0,
        "samples": 9,
        "power_w": 600.0,
        "energy_mj": 6.0,
    }
    timing = Timing.from_json(old)
    assert (timing.rounds_power_w, timing.power_w, timing.energy_mj) == (600.0, None, None)
    assert Policy.from_json({"rounds": 9}) == Policy(rounds=9, objective="time", energy_s=0.0)


def test_costs_are_time_energy_and_their_product() -> None:
    """Without energy there is no cost that needs it; a ratio above 1 means that the second costs less."""
    plain = Timing.of([10.0] * 7)
    timing = plain.with_energy(Interval(5.0, 6.0, 7.0), 600.0)
    assert timing.cost("time") == Interval(10.0, 10.0, 10.0)
    assert timing.cost("energy") == Interval(5.0, 6.0, 7.0)
    assert timing.cost("edp") == Interval(50.0, 60.0, 70.0)
    assert plain.cost("energy") is None and plain.cost("edp") is None
    reference = plain.with_energy(Interval(12.0, 12.0, 14.0), 1200.0)
    assert cost_ratio(reference, timing, "energy") == Interval(12 / 7, 2.0, 14 / 5)
    assert cost_ratio(plain, timing, "energy") is None
    assert against(reference, timing, "time") is None, "times pair with the reference of the same rounds"
    paired = Timing.of([10.0] * 7, [15.0] * 7)
    assert against(reference, paired, "time") == Interval(1.5, 1.5, 1.5)
    assert against(None, timing, "energy") is None


def test_paired_interval_removes_the_drift_of_the_reference() -> None:
    """A drift that both share widens the plain interval but not the paired one."""
    timing = Timing.of([10.0, 11.0, 12.0], [20.0, 22.0, 24.0])
    assert timing.interval.half_width > 0.09
    assert (timing.paired.low, timing.paired.mid, timing.paired.high) == (11.0, 11.0, 11.0)


def test_timing_without_reference_or_readings_says_none() -> None:
    """What was not measured is None, never a made-up number."""
    timing = Timing.of([3.0])
    assert timing.ratio is None and timing.reference_us is None and timing.energy_mj is None
    assert timing.sm_clock_mhz is None and timing.paired == timing.interval
    with pytest.raises(MeasureError, match="must be positive"):
        Timing.of([0.0])


def test_unknown_fields_are_named() -> None:
    """Data of another version says what is not understood."""
    with pytest.raises(UsageError, match="timing has no field zest"):
        Timing.from_json({"zest": 1})
