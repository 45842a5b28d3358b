"""The first hour on a B200 for the block-scaled family: its tiers, and a run of them on a fake GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from blockscaled import SPACE
from test_bringup import B200, Rig, use_gpu

from cutegen.families.gemm.problem import BLOCK_SCALED, BLOCK_SCALED_FAMILY
from tools import bringup
from tools.bringup_parts.tiers import Scope, Tier, plan

FAMILY = ["--family", BLOCK_SCALED_FAMILY]


@pytest.fixture(scope="module")
def tiers() -> tuple[Tier, ...]:
    return plan(SPACE, Scope(pairs=9, races=8))


def test_one_tile_and_tails_cover_what_a_problem_can_say(tiers: tuple[Tier, ...]) -> None:
    """Every format; one k tile of 128 bytes and more; outputs, batches, odd n, alpha."""
    first = [point.problem for point in tiers[0].points]
    assert [(p.ab_dtype, p.k) for p in first] == [
        (dtype, tile * depth)
        for dtype, tile in (("mxfp8_e4m3", 128), ("mxfp8_e5m2", 128), ("nvfp4", 256))
        for depth in (1, 3, 40)
    ]
    tails = [point.problem for point in tiers[1].points]
    for dtype in BLOCK_SCALED:
        mine = [p for p in tails if p.ab_dtype == dtype]
        assert {p.out_dtype for p in mine} == {"bf16", "fp16", "fp32"}
        assert {p.batch for p in mine} == {1, 3} and {p.epilogue.alpha for p in mine} == {False, True}
        assert {p.unaligned_out for p in mine} == {False, True}
        assert all(p.k % 128 for p in mine), "no whole tile of scale factors"


def test_the_tiers_run_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[Tier, ...]
) -> None:
    """One command; a knob that is broken is named as for gemm."""
    rig = Rig(tmp_path, monkeypatch)
    seen: list[tuple[str, Scope]] = []

    def remembered(space: object, scope: Scope, bundle: object) -> tuple[Tier, ...]:
        seen.append((space.family, scope))  # type: ignore[attr-defined]
        return tiers

    monkeypatch.setattr(bringup, "plan", remembered)
    use_gpu(monkeypatch, B200)
    assert rig(*FAMILY) == 0
    [(family, scope)] = seen
    assert family == BLOCK_SCALED_FAMILY and {p.ab_dtype for p in scope.shapes} == set(BLOCK_SCALED)
    assert rig.results["family"] == BLOCK_SCALED_FAMILY and rig.results["arch"] == "sm_100a"
    assert {trial["outcome"] for trial in rig.results["trials"]} == {"ok"}
    rig.act = lambda source: "wrong" if source.config["use_pdl"] else "ok"
    assert rig(*FAMILY) == 1
    [finding] = rig.results["findings"]
    assert [(cause["name"], cause["value"]) for cause in finding["causes"]] == [("use_pdl", "true")]
