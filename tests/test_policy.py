"""Laws of the measurement policy and of the summary of a timing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cutegen.errors import MeasureError, UsageError
from cutegen.policy import Policy, Timing


@pytest.mark.parametrize("policy", [Policy(), Policy.screen(), Policy.final(7)])
def test_policy_survives_json(policy: Policy) -> None:
    """JSON text and back is the same policy, with the same digest."""
    again = Policy.from_json(json.loads(json.dumps(policy.to_json())))
    assert again == policy and again.digest == policy.digest


def test_every_field_is_part_of_the_identity() -> None:
    """Two policies that differ in anything have different digests, so their timings never mix."""
    changes: list[dict[str, Any]] = [
        {"clock": "burst"},
        {"rounds": 20},
        {"min_rounds": 5},
        {"round_us": 1.0},
        {"settle_s": 1.0},
        {"precision": 0.1},
        {"prune": 0.1},
        {"seed": 1},
    ]
    policies = [Policy(), *(replace(Policy(), **change) for change in changes)]
    assert len({policy.digest for policy in policies}) == len(policies)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"launch": "eager"}, "launch is 'eager'; valid: graph"),
        ({"l2": "warm"}, "valid: cold"),
        ({"clock": "locked"}, "valid: settled, burst"),
        ({"distribution": "zeros"}, "valid: uniform"),
        ({"rounds": 2}, "7 to 2 rounds"),
        ({"min_rounds": 0}, "0 to 15 rounds"),
        ({"precision": float("nan")}, "precision is nan"),
        ({"round_us": -1.0}, "must not be negative"),
    ],
)
def test_invalid_policies_are_refused_with_what_is_valid(change: dict[str, Any], words: str) -> None:
    """A policy that nobody can measure under does not exist."""
    with pytest.raises(UsageError, match=words):
        Policy(**change)


def test_unknown_fields_are_named() -> None:
    """Data of another version says what is not understood."""
    with pytest.raises(UsageError, match="policy has no field zest"):
        Policy.from_json({"zest": 1})
    with pytest.raises(UsageError, match="timing has no field zest"):
        Timing.from_json({"zest": 1})


def test_timing_summarises_pairs() -> None:
    """Ratio is the median of paired ratios, energy is power times time."""
    timing = Timing.of([10.0, 11.0, 12.0], [20.0, 22.0, 24.0], clocks_mhz=[1500, 1510, 1490], power_w=600.0)
    assert (timing.median_us, timing.low_us, timing.high_us, timing.samples) == (11.0, 10.0, 12.0, 3)
    assert (timing.ratio, timing.ratio_low, timing.ratio_high, timing.reference_us) == (2.0, 2.0, 2.0, 22.0)
    assert (timing.sm_clock_mhz, timing.power_w, timing.energy_mj) == (1500, 600.0, pytest.approx(6.6))
    assert Timing.from_json(json.loads(json.dumps(timing.to_json()))) == timing


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
