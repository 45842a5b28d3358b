"""How a fault is pinned down: points, the plan of tiers, bisection, failures that come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Space, parse_value
from tools.bringup_parts.inquiry import Inquiry, inquire
from tools.bringup_parts.lab import Record
from tools.bringup_parts.pin_down import Finding, explains, holds, pin_down
from tools.bringup_parts.points import Point, difference, features, nearest, with_values
from tools.bringup_parts.random_problems import random_config
from tools.bringup_parts.tiers import KNOBS, SCALED_KNOBS, TIERS, Scope, Tier, plan

HOPPER, BLACKWELL = (find_space("gemm", find_arch(name)) for name in ("sm_90a", "sm_100a"))
SCALED = find_space("gemm_blockscaled", find_arch("sm_100a"))
SQUARE = Problem(4096, 4096, 1024)
SCALED_SQUARE = Problem.parse("gemm_blockscaled 4096x4096x1024 mxfp8_e4m3 kk")


# --- points ---


@pytest.mark.parametrize("space", [HOPPER, BLACKWELL], ids=lambda space: space.arch.name)
def test_a_point_is_its_features(space: Space) -> None:
    """Whatever is changed can be changed back, and what is not legal is no point."""
    problem = Problem.parse("gemm 3x336x392x200 bf16 mn out=fp32 alpha bias=n act=gelu any_order")
    point = Point(problem, space.default(problem))
    assert with_values(point, {}, space) == point and difference(point, point) == []
    other = with_values(point, {"k": 400, "activation": "", "swizzle_size": 4}, space)
    assert other is not None and difference(point, other) == ["k", "activation", "swizzle_size"]
    assert other.problem.k == 400 and other.problem.epilogue.bias == "n" and other.config["swizzle_size"] == 4
    assert with_values(other, features(point), space) == point
    assert with_values(point, {"ab_dtype": "int8"}, space) is None, "bytes have no such layout"
    assert with_values(point, {"split_k": 32}, space) is None, "not that deep"


def test_the_nearest_config_changes_as_little_as_rules_allow() -> None:
    """Swizzle goes alone; ping-pong takes the warpgroups and a narrower tile along."""
    base = HOPPER.default(SQUARE)
    alone = nearest(HOPPER, SQUARE, base, "swizzle_size", 2)
    assert alone == base.replace(swizzle_size=2)
    both = nearest(HOPPER, SQUARE, base, "pingpong", True)
    assert both is not None and HOPPER.explain(SQUARE, both) == ()
    changed = {knob: both[knob] for knob in both if both[knob] != base[knob]}
    assert changed == {"tile_shape_mn": (128, 200), "mma_warpgroups": 1, "pingpong": True} or (
        changed.keys() == {"tile_shape_mn", "mma_warpgroups", "pingpong"}
    )
    tall = SQUARE.with_sizes(m=8192)
    assert nearest(HOPPER, tall, HOPPER.default(tall), "swap_ab", True) is None, "m is not narrow"


# --- tiers ---


@pytest.mark.parametrize("space", [HOPPER, BLACKWELL, SCALED], ids=lambda s: f"{s.family} {s.arch.name}")
def test_every_point_of_the_plan_is_legal_and_every_value_of_a_knob_is_tried(space: Space) -> None:
    lines, square = (SCALED_KNOBS, SCALED_SQUARE) if space is SCALED else (KNOBS, SQUARE)
    tiers = plan(space, Scope(pairs=20, shapes=(square,)))
    assert tuple(tier.name for tier in tiers) == TIERS
    for tier in tiers:
        assert tier.points and len(set(tier.points)) == len(tier.points)
        assert all(space.explain(point.problem, point.config) == () for point in tier.points)
        opened = [point.problem for point in tier.points]
        assert sum(a != b for a, b in pairwise(opened)) == len(set(opened)) - 1
    tried = {(knob, value) for point in tiers[2].points for knob, value in point.config.items()}
    there = {(knob, value) for knob, domain in space.domains.items() for value in domain}
    for knob, value in there - tried:
        for line in lines:
            problem = Problem.parse(line.format(byte="int8"))
            assert next(space.configs(problem, {knob: [value]}), None) is None, f"{knob}={value} was left out"
    single = tiers[0].points[0]
    tile = single.config.get("tile_shape_mn") or single.config["mma_tiler_mn"]
    k = 128 if space is SCALED else 64
    assert (single.problem.m, single.problem.n, single.problem.k) == (*tile, k)  # type: ignore[misc]
    assert not tiers[0].tail and tiers[3].repeats == 50 and tiers[1].repeats is None
    assert any(p.problem == square for p in tiers[4].points)


def test_tails_cover_what_a_problem_can_say() -> None:
    """Every dtype, layout and output of the target, odd n, batches, every part of an epilogue."""
    problems = [point.problem for point in plan(BLACKWELL, Scope(pairs=1))[1].points]
    assert {p.ab_dtype for p in problems} == {"bf16", "fp16", "tf32", "e4m3", "e5m2", "int8"}
    assert {p.layout for p in problems} == {"kk", "kn", "mn", "mk"}
    assert {p.out_dtype for p in problems} == {"bf16", "fp16", "fp32", "int32"}
    for wanted in ("unaligned_out", "promote"):
        assert {getattr(p, wanted) for p in problems} == {False, True}
    assert {p.epilogue.activation for p in problems} == {"", "relu", "gelu", "gelu_tanh", "silu"}
    assert {p.batch for p in problems} == {1, 2, 3}


def test_what_a_bundle_brings_is_tried_in_every_tier() -> None:
    """On one tile of its own, on tails, on its problem; what is planned anyway is not tried twice."""
    problem = Problem(640, 640, 4096)
    config = BLACKWELL.default(problem).replace(mma_tiler_mn=(128, 48), use_pdl=True)
    theirs = config.replace(source="operators")
    tiers = plan(BLACKWELL, Scope(pairs=1), {problem: [config, theirs]})
    assert not any(point.config == theirs for tier in tiers for point in tier.points)
    mine = [[point.problem for point in tier.points if point.config == config] for tier in tiers]
    assert [str(p) for p in mine[0]] == [f"gemm 128x48x{k} bf16 kk" for k in (64, 192, 2560)]
    assert mine[1][0].m % 2 and mine[2:] == [[problem]] * 3
    planned = tiers[2].points[0]
    assert plan(BLACKWELL, Scope(pairs=1), {planned.problem: [planned.config]}) == plan(
        BLACKWELL, Scope(pairs=1)
    )


# --- pinning down ---


def broken_if(**values: str) -> Callable[[Point], bool]:
    """An oracle: points with all these features fail; ``!`` in front means any other value."""

    def fails(point: Point) -> bool:
        own = features(point)
        return all(
            (own[name] != parse_value(text[1:])) if text[0] == "!" else (own[name] == parse_value(text))
            for name, text in values.items()
        )

    return fails


NARROW = Problem(300, 4096, 4096, any_order=True)


@pytest.mark.parametrize(
    ("space", "problem", "values"),
    [
        (HOPPER, SQUARE, {"pingpong": "true"}),
        (HOPPER, SQUARE, {"use_tma_store": "true"}),
        (HOPPER, SQUARE, {"cluster_shape_mn": "!1x1"}),
        (HOPPER, SQUARE, {"mma_warpgroups": "2"}),
        (HOPPER, SQUARE, {"pingpong": "true", "cluster_shape_mn": "!1x1"}),
        (HOPPER, SQUARE, {"use_tma_store": "false", "use_pdl": "true", "tile_k": "64"}),
        (HOPPER, NARROW, {"swap_ab": "true", "use_tma_store": "false"}),
        (HOPPER, NARROW, {"split_k": "!1"}),
        (HOPPER, NARROW, {"reduction": "arrival"}),
        (BLACKWELL, SQUARE, {"use_2cta_instrs": "true"}),
        (BLACKWELL, SQUARE, {"use_clc": "true", "use_pdl": "true"}),
        (BLACKWELL, SQUARE, {"use_2cta_instrs": "true", "use_tma_store": "false"}),
        (BLACKWELL, NARROW, {"split_k": "!1", "use_clc": "true"}),
    ],
)
def test_what_breaks_is_named_wherever_it_is_met(
    space: Space, problem: Problem, values: dict[str, str]
) -> None:
    """From any failing config of several, the knobs named are those that break, with their values."""
    fails, generator = broken_if(**values), random.Random(3)
    drawn = [random_config(space, problem, generator) for _ in range(150)]
    points = [Point(problem, config) for config in drawn if config is not None]
    failing, known = [p for p in points if fails(p)], [p for p in points if not fails(p)]
    assert failing and known
    for point in failing[:2]:
        for passing in (known, []):
            finding = pin_down(point, space, passing, fails)
            assert {cause.name for cause in finding.causes} == values.keys(), str(finding)
            assert finding.failing is not None and fails(finding.failing)
            assert finding.passing is not None and not fails(finding.passing)
            assert space.explain(problem, finding.failing.config) == ()
            for cause in finding.causes:
                assert cause.value == features(finding.failing)[cause.name] == cause.breaks_with[0]
                assert all(
                    not fails(p)
                    for v in cause.passes_with
                    if (p := with_values(finding.failing, {cause.name: v}, space))
                )
            assert len(finding.differing) == 1 and finding.differing[0] in values
            assert explains(finding, point) and all(explains(finding, p) for p in failing)
            assert not any(holds(finding, p) for p in known)


def test_a_fault_of_the_problem_is_named_too() -> None:
    """A dtype, or a k range of more than 2000, that no knob mends."""
    deep = Problem(4096, 4096, 4096, ab_dtype="e4m3")
    known = [Point(SQUARE, HOPPER.default(SQUARE))]
    point = Point(deep, HOPPER.default(deep))
    finding = pin_down(point, HOPPER, known, lambda p: p.problem.ab_dtype == "e4m3")
    assert [cause.name for cause in finding.causes] == ["ab_dtype"] or finding.differing == (
        "ab_dtype",
        "tile_k",
    )
    finding = pin_down(point, HOPPER, known, lambda p: p.problem.k > 2000)
    [cause] = finding.causes
    assert (cause.name, cause.value, cause.passes_with) == ("k", 4096, (1024,))
    assert str(finding).startswith("k=4096 breaks; with k=1024 it passes; first seen on problem gemm 4096x")


def test_kernels_that_are_not_at_hand_are_gone_round() -> None:
    """With half of the kernels missing the pair is further apart, but never rests on what nobody tried."""
    fails = broken_if(pingpong="true")
    generator = random.Random(5)
    drawn = [random_config(HOPPER, SQUARE, generator) for _ in range(40)]
    there = {Point(SQUARE, config) for config in drawn if config is not None}
    failing, known = [p for p in there if fails(p)], [p for p in there if not fails(p)]
    finding = pin_down(failing[0], HOPPER, known, lambda p: fails(p) if p in there else None)
    assert finding.failing in there and finding.passing in there
    assert "pingpong" in finding.differing and finding.pinned


# --- inquiries ---


class FlakyLab:
    """Points with pingpong fail now and then; everything else passes."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.generator = random.Random(7)

    def attempt(self, point: Point, tier: Tier, name: str = "") -> Record | None:
        wrong = point.config["pingpong"] is True and self.generator.random() < self.share
        return Record(name, point, "wrong_result" if wrong else "ok")


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_what_fails_now_and_then_is_asked_more_often(share: float) -> None:
    """However rare, the knob is named, in most of three tries; what never fails again is said to."""
    config = nearest(HOPPER, SQUARE, HOPPER.default(SQUARE), "pingpong", True)
    assert config is not None
    point, fine = Point(SQUARE, config.replace(use_pdl=True)), Point(SQUARE, HOPPER.default(SQUARE))
    lab: Any = FlakyLab(share)
    records = [Record("races", point, "wrong_result"), Record("races", fine, "ok")]
    named = []
    for _ in range(3):
        inquiry = Inquiry(lab, Tier("races", (point,)), HOPPER)
        [verdict] = inquire(inquiry, records, [fine], 3, lambda _: None)
        named.append([cause.name for cause in verdict.finding.causes])
        assert verdict.contradicted == 0
    assert named.count(["pingpong"]) >= 2, named
    inquiry = Inquiry(lab, Tier("races", (point,)), HOPPER)
    [verdict] = inquire(inquiry, [Record("races", fine, "wrong_result")], [], 3, lambda _: None)
    assert verdict.finding == Finding(fine) and "never again" in str(verdict)
