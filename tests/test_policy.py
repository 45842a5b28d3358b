"""Laws of the measurement policy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from cutegen.errors import UsageError
from cutegen.measure.context import BACK_TO_BACK
from cutegen.measure.policy import OBJECTIVES, Policy


@pytest.mark.parametrize("policy", [Policy(), Policy.screen(), Policy.final(7, context="alone")])
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
        {"objective": "energy"},
        {"energy_s": 0.1},
        {"context": "behind"},
        {"context": "alone"},
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
        ({"energy_s": -1.0}, "must not be negative"),
        ({"objective": "watts"}, "valid: time, energy, edp"),
        ({"context": "between"}, "context is 'between'; valid: alone, behind, overlapping, back_to_back"),
        ({"clock": "burst", "energy_s": 0.1}, "energy for 0.1 s after a burst"),
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


def test_digests_of_stored_policies_are_those_of_version_0_1() -> None:
    """They knew launches back to back only; what was timed so then still answers."""
    then = {"context": BACK_TO_BACK}
    policies = [
        *(Policy.screen(**then), Policy.screen(loaded=True, **then)),
        *(Policy.final(**then), Policy.final(3, "energy", **then)),
    ]
    assert [policy.digest for policy in policies] == [
        "541b91a698f8",
        "3395f88ce5de",
        "e96df1551759",
        "a4704e4269ee",
    ]


def test_every_objective_measures_energy_and_screening_does_not() -> None:
    """Objectives that need energy look longer."""
    finals = [Policy.final(objective=name) for name in OBJECTIVES]
    assert [policy.objective for policy in finals] == ["time", "energy", "edp"]
    assert 0 < finals[0].energy_s < finals[1].energy_s == finals[2].energy_s
    assert Policy.screen().energy_s == Policy.screen(loaded=True).energy_s == 0
    with pytest.raises(UsageError, match="valid: time, energy, edp"):
        Policy.final(objective="joules")


def test_bursts_do_not_change_what_a_timing_means() -> None:
    """They add to it: a timing without them answers for a policy with, and the other way round.

    So do launches back to back.
    """
    final = Policy.final()
    for name in ("burst_rounds", "back_to_back_rounds"):
        plain = replace(final, **{name: 0})
        assert getattr(final, name) and (final, final.digest) == (plain, plain.digest)
        assert getattr(Policy.from_json(final.to_json()), name) == getattr(final, name)
        assert name not in plain.to_json()
        assert not getattr(Policy.final(objective="energy"), name)
        with pytest.raises(UsageError, match=f"{name} is -1; it must not be negative"):
            Policy(**{name: -1})
    assert not Policy.screen().burst_rounds


def test_a_policy_without_a_context_is_of_launches_back_to_back() -> None:
    """Version 0.1 wrote none. What decides is measured as in a model now."""
    assert Policy.from_json({"rounds": 9}).context == BACK_TO_BACK
    assert "context" not in Policy.final(context=BACK_TO_BACK).to_json()
    assert Policy.screen().context == Policy.final().context == "behind"
    assert Policy.final().to_json()["context"] == "behind"
