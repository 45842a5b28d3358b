"""The tool of the first hour: its tiers, what it makes of a broken one, and what it writes down."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_tuning import FakeCompiler
from walk import random_config

from cutegen.arch import find_arch
from cutegen.build import Builder, Result, Toolchain
from cutegen.catalog import find_space
from cutegen.errors import DeviceError
from cutegen.measure import Bench
from cutegen.problem import Problem
from cutegen.render import Source
from cutegen.space import Space, parse_value
from cutegen.store import Store
from tools import bringup
from tools.bringup_parts.inquiry import Inquiry, inquire
from tools.bringup_parts.lab import Record
from tools.bringup_parts.pin_down import Finding, explains, holds, pin_down
from tools.bringup_parts.points import Point, difference, features, groups, nearest, with_values
from tools.bringup_parts.tiers import KNOBS, TIERS, Extent, Tier, plan

HERE = Path(__file__).parent
HOPPER, BLACKWELL = (find_space("gemm", find_arch(name)) for name in ("sm_90a", "sm_100a"))
SQUARE = Problem(4096, 4096, 1024)
B200 = replace(fake_engine.DEVICE, name="Fake B200", compute_capability=(10, 0), sm_count=148)
#: What a kernel does, by its text and its config.
Act = Callable[[Source], str]
Run = Callable[..., int]


# --- points ---


@pytest.mark.parametrize("space", [HOPPER, BLACKWELL], ids=lambda space: space.arch.name)
def test_a_point_is_its_features(space: Space) -> None:
    """Whatever is changed can be changed back, and what is not legal is no point."""
    problem = Problem.parse("gemm 3x336x392x200 bf16 nt out=fp32 alpha bias=n act=gelu any_order")
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
    assert nearest(HOPPER, SQUARE, base, "swap_ab", True) is None, "m is not narrow, whatever follows"


def test_parts_are_halves_then_single_ones_then_pairs() -> None:
    assert list(groups("abc")) == [
        ("a", "b"),
        ("c",),
        ("a",),
        ("b",),
        ("c",),
        ("a", "b"),
        ("a", "c"),
        ("b", "c"),
    ]
    assert list(groups("ab")) == [("a",), ("b",)] and list(groups("a")) == []


# --- tiers ---


@pytest.mark.parametrize("space", [HOPPER, BLACKWELL], ids=lambda space: space.arch.name)
def test_every_point_of_the_plan_is_legal_and_every_value_of_a_knob_is_tried(space: Space) -> None:
    tiers = plan(space, Extent(pairs=20, shapes=(SQUARE,)))
    assert tuple(tier.name for tier in tiers) == TIERS
    for tier in tiers:
        assert tier.points and len(set(tier.points)) == len(tier.points)
        assert all(space.explain(point.problem, point.config) == () for point in tier.points)
        opened = [point.problem for point in tier.points]
        assert sum(a != b for a, b in pairwise(opened)) == len(set(opened)) - 1
    tried = {(knob, value) for point in tiers[2].points for knob, value in point.config.items()}
    there = {(knob, value) for knob, domain in space.domains.items() for value in domain}
    for knob, value in there - tried:
        for line in KNOBS:
            problem = Problem.parse(line.format(byte="int8"))
            assert next(space.configs(problem, {knob: [value]}), None) is None, f"{knob}={value} was left out"
    single = tiers[0].points[0]
    tile = single.config.get("tile_shape_mn") or single.config["mma_tiler_mn"]
    assert (single.problem.m, single.problem.n, single.problem.k) == (*tile, 64)  # type: ignore[misc]
    assert not tiers[0].tail and tiers[3].repeats == 50 and tiers[1].repeats is None
    assert any(p.problem == SQUARE for p in tiers[4].points)


def test_tails_cover_what_a_problem_can_say() -> None:
    """Every dtype, layout and output of the target, odd n, batches, every part of an epilogue."""
    problems = [point.problem for point in plan(BLACKWELL, Extent(pairs=1))[1].points]
    assert {p.ab_dtype for p in problems} == {"bf16", "fp16", "tf32", "e4m3", "e5m2", "int8"}
    assert {p.layout for p in problems} == {"tn", "nn", "nt", "tt"}
    assert {p.out_dtype for p in problems} == {"bf16", "fp16", "fp32", "int32"}
    for wanted in ("unaligned_out", "promote"):
        assert {getattr(p, wanted) for p in problems} == {False, True}
    assert {p.epilogue.activation for p in problems} == {"", "relu", "gelu", "gelu_tanh", "silu"}
    assert {p.batch for p in problems} == {1, 2, 3}


def test_what_a_bundle_brings_is_tried_in_every_tier() -> None:
    """On one tile of its own, on tails, on its problem; what is planned anyway is not tried twice."""
    problem = Problem(640, 640, 4096)
    config = BLACKWELL.default(problem).replace(mma_tiler_mn=(128, 48), use_pdl=True)
    tiers = plan(BLACKWELL, Extent(pairs=1), {problem: [config]})
    mine = [[point.problem for point in tier.points if point.config == config] for tier in tiers]
    assert [str(p) for p in mine[0]] == [f"gemm 128x48x{k} bf16 tn" for k in (64, 192, 2560)]
    assert mine[1][0].m % 2 and mine[2:] == [[problem]] * 3
    planned = tiers[2].points[0]
    assert plan(BLACKWELL, Extent(pairs=1), {planned.problem: [planned.config]}) == plan(
        BLACKWELL, Extent(pairs=1)
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


def test_values_that_need_each_other_are_named_together() -> None:
    """Knobs of which none can change alone: no cause, but the smallest difference."""

    def fails(point: Point) -> bool:
        tile = point.config["tile_shape_mn"]
        return bool(tile == (192, 64) and point.config["mma_warpgroups"] == 3)

    base = HOPPER.default(SQUARE)
    point = Point(
        SQUARE, base.replace(tile_shape_mn=(192, 64), mma_warpgroups=3, swizzle_size=1, use_pdl=True)
    )
    assert HOPPER.explain(SQUARE, point.config) == ()
    finding = pin_down(point, HOPPER, [], fails)
    assert finding.pinned and {"swizzle_size", "use_pdl"}.isdisjoint(finding.differing)
    assert {c.name for c in finding.causes} <= {"tile_shape_mn", "mma_warpgroups"}


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


def test_nothing_that_passes_is_said_plainly() -> None:
    point = Point(SQUARE, HOPPER.default(SQUARE))
    finding = pin_down(point, HOPPER, [], lambda p: True)
    assert not finding.pinned and "nothing near it passes" in str(finding)


# --- inquiries ---


class FlakyLab:
    """Points with pingpong fail at every third run; everything else passes."""

    def __init__(self) -> None:
        self.runs = 0

    def attempt(self, point: Point, tier: Tier, name: str = "") -> Record | None:
        self.runs += 1
        wrong = point.config["pingpong"] is True and self.runs % 3 == 0
        return Record(name, point, "wrong_result" if wrong else "ok")


def test_what_fails_now_and_then_is_asked_more_often() -> None:
    """Two failures in six runs are enough to name the knob; what never fails again is said to."""
    config = nearest(HOPPER, SQUARE, HOPPER.default(SQUARE), "pingpong", True)
    assert config is not None
    point, fine = Point(SQUARE, config.replace(use_pdl=True)), Point(SQUARE, HOPPER.default(SQUARE))
    lab: Any = FlakyLab()
    inquiry = Inquiry(lab, Tier("races", (point,)), HOPPER)
    records = [Record("races", point, "wrong_result"), Record("races", fine, "ok")]
    [verdict] = inquire(inquiry, records, [fine], 3, lambda _: None)
    assert [cause.name for cause in verdict.finding.causes] == ["pingpong"]
    assert verdict.finding.again == (2, 2, 2) and (verdict.explained, verdict.contradicted) == (1, 0)
    [verdict] = inquire(inquiry, [Record("races", fine, "wrong_result")], [], 3, lambda _: None)
    assert verdict.finding == Finding(fine) and "never again" in str(verdict)


# --- the command ---


class ActingCompiler(FakeCompiler):
    """What a kernel does may depend on its text."""

    def __init__(self, store: Store, act: Act) -> None:
        super().__init__(store, batch=10_000)
        self._act = act

    def _result(self, source: Source) -> Result:
        self.behaviour = lambda config: self._act(source)
        return super()._result(source)


@cache
def remembered_plan(space_arch: str, extent: Extent) -> tuple[Tier, ...]:
    """Plans take seconds; a test run needs few of them."""
    return plan(find_space("gemm", find_arch(space_arch)), extent)


class Rig:
    """The tool on a fake GPU: what kernels do, and what was written."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = folder / "results" / "bringup.json"
        self.act: Act = lambda source: "ok"
        self.compiled = 0
        rig = self

        class FakeBuilder:
            def __init__(self, store: Store, toolchain: object = None) -> None:
                self._compiler = ActingCompiler(store, lambda source: rig.act(source))

            def __enter__(self) -> FakeBuilder:
                return self

            def __exit__(self, *error: object) -> None:
                return None

            def build(self, sources: Iterable[Source]) -> Iterator[tuple[Source, Result]]:
                wanted = list(sources)
                rig.compiled += len(wanted)
                self._compiler.submit(wanted)
                return iter(self._compiler.poll())

        monkeypatch.setattr(bringup, "Builder", FakeBuilder)
        monkeypatch.setattr(
            bringup, "plan", lambda space, extent, _: remembered_plan(space.arch.name, extent)
        )
        monkeypatch.setattr(bringup, "present_device", lambda: fake_engine.DEVICE)
        monkeypatch.setattr(
            bringup,
            "bench_of",
            lambda limit: Bench(engine="fake_engine:make", search_path=[HERE], timeout_s=limit),
        )

    def __call__(self, *words: str) -> int:
        small = ["--pairs", "10", "--races", "12", "--timeout", "5", "--out", str(self.out)]
        return bringup.main([*small, *words])

    @property
    def results(self) -> Any:
        return json.loads(self.out.read_text())


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def knob(name: str, value: object) -> Callable[[Source], bool]:
    return lambda source: source.config[name] == value


def test_all_tiers_pass_and_are_written_down(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig("--commit", "abc", "--repeats", "7") == 0
    results = rig.results
    assert [tier["name"] for tier in results["tiers"]] == list(TIERS) and results["broken"] == ""
    assert all(tier["passed"] and tier["outcomes"] == {"ok": tier["planned"]} for tier in results["tiers"])
    assert len(results["trials"]) == sum(tier["planned"] for tier in results["tiers"]) > 250
    assert {t["repeats"] for t in results["trials"] if t["tier"] == "races"} == {7}
    assert not any(t["tail"] for t in results["trials"] if t["tier"] == "one tile")
    assert all(t["tail"] for t in results["trials"] if t["tier"] == "tails")
    assert (results["commit"], results["gpu"], results["arch"]) == ("abc", "Fake GPU", "sm_90a")
    assert results["machine"]["gpu_uuid"] == "GPU-fake" and results["software"]["cutegen"]
    assert results["findings"] == [] and results["edited_kernels"] == 0
    assert "all 5 tiers passed" in capsys.readouterr().out


def test_a_broken_knob_is_named_and_later_tiers_do_not_run(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ping-pong needs other knobs to change with it, and is named alone all the same."""
    rig.act = lambda source: "wrong" if source.config["pingpong"] else "ok"
    assert rig() == 1
    results = rig.results
    assert results["broken"] == "every knob" and len(results["tiers"]) == 3
    assert not results["tiers"][2]["passed"] and results["explained"]
    [finding] = results["findings"]
    assert finding["causes"] == [
        {"name": "pingpong", "value": "true", "passes_with": ["false"], "breaks_with": ["true"]}
    ]
    assert finding["differing"] == ["pingpong"] and finding["again"] == {"failed": 2, "passed": 2, "runs": 2}
    assert (
        finding["contradicted"] == 0
        and finding["explained"] == results["tiers"][2]["outcomes"]["wrong_result"]
    )
    out = capsys.readouterr().out
    assert (
        "==> pingpong=true breaks; with pingpong=false it passes; first seen on problem gemm 4096x4096" in out
    )
    assert {t["tier"] for t in results["trials"]} == {*TIERS[:3], "bisection of every knob"}


def test_two_knobs_that_break_together_are_both_named(rig: Rig) -> None:
    """Neither alone fails, so one knob at a time shows nothing; random kernels do."""
    rig.act = lambda s: "wrong" if s.config["pingpong"] and s.config["cluster_shape_mn"] == (1, 2) else "ok"
    assert rig("--races", "40") == 1
    assert rig.results["broken"] == "races"
    [finding] = rig.results["findings"]
    assert {cause["name"]: cause["value"] for cause in finding["causes"]} == {
        "pingpong": "true",
        "cluster_shape_mn": "1x2",
    }
    assert " together with " in finding["sentence"]
    [cluster] = [cause for cause in finding["causes"] if cause["name"] == "cluster_shape_mn"]
    assert set(cluster["passes_with"]) == {"1x1", "2x1", "2x2", "4x1", "1x4"}


def test_two_faults_are_two_findings(rig: Rig) -> None:
    """One in a knob, another in another; a failing trial belongs to the one that explains it."""
    rig.act = lambda s: "wrong" if s.config["use_pdl"] else "refuses" if s.config["stream_k"] else "ok"
    assert rig("--enough", "50") == 1
    named = [[cause["name"] for cause in finding["causes"]] for finding in rig.results["findings"]]
    assert sorted(named) == [["stream_k"], ["use_pdl"]]


def test_a_default_that_is_broken_is_mended_by_the_knob_at_fault(rig: Rig) -> None:
    """Everything with a TMA store fails, the default of the first tier among it."""
    rig.act = lambda source: "wrong" if source.config["use_tma_store"] else "ok"
    assert rig() == 1
    assert rig.results["broken"] == "one tile"
    [finding] = rig.results["findings"]
    assert [(c["name"], c["passes_with"]) for c in finding["causes"]] == [("use_tma_store", ["false"])]


@pytest.mark.parametrize(
    ("evil", "outcome"),
    [("crashes", "launch_failed"), ("breaks", "launch_failed"), ("error", "build_failed")],
)
def test_kernels_that_crash_or_do_not_compile_are_pinned_down(rig: Rig, evil: str, outcome: str) -> None:
    """The child is replaced, the others go on, and the tier is left after so many failures."""
    rig.act = lambda source: evil if source.config["cluster_shape_mn"] == (2, 2) else "ok"
    assert rig("--enough", "1") == 1
    [finding] = rig.results["findings"]
    assert [(c["name"], c["value"]) for c in finding["causes"]] == [("cluster_shape_mn", "2x2")]
    broken = [t for t in rig.results["trials"] if t["outcome"] != "ok"]
    assert {t["outcome"] for t in broken} == {outcome}
    assert sum(rig.results["tiers"][2]["outcomes"].values()) < rig.results["tiers"][2]["planned"]


def test_a_kernel_that_hangs_costs_its_time_limit_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial is a timeout, the trials after it run in a new child, and its knob is named."""
    tile = HOPPER.default(SQUARE).replace(tile_shape_mn=(64, 64), mma_warpgroups=1)
    few = [Point(SQUARE, tile.replace(cluster_shape_mn=c)) for c in ((1, 1), (2, 2), (1, 2))]
    tier = Tier("every knob", tuple(few))
    monkeypatch.setattr(bringup, "plan", lambda *arguments: (tier,))
    monkeypatch.setattr("tools.bringup_parts.pin_down.GLANCE", 0)
    rig.act = lambda source: "hangs" if source.config["cluster_shape_mn"] == (2, 2) else "ok"
    assert rig("--timeout", "1") == 1
    ran = [t["outcome"] for t in rig.results["trials"] if t["tier"] == "every knob"]
    assert ran == ["ok", "timeout", "ok"]
    [finding] = rig.results["findings"]
    assert [(c["name"], c["value"]) for c in finding["causes"]] == [("cluster_shape_mn", "2x2")]


def test_what_cannot_be_checked_is_no_fault_of_a_kernel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem that does not open leaves its tier broken, without a finding."""
    huge = Problem(64, 64, 2**30)
    tier = Tier("tails", (Point(huge, HOPPER.default(huge)), Point(SQUARE, HOPPER.default(SQUARE))))
    monkeypatch.setattr(bringup, "plan", lambda *arguments: (tier,))
    assert rig() == 4
    assert rig.results["tiers"][0]["outcomes"] == {"unmeasured": 1, "ok": 1}
    assert "out of memory" in rig.results["trials"][0]["error"] and rig.results["findings"] == []


def test_when_nothing_passes_no_knob_is_blamed(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.act = lambda source: "wrong"
    assert rig("--enough", "2") == 4
    assert not rig.results["explained"] and len(rig.results["tiers"]) == 1
    assert "nothing near it passes" in capsys.readouterr().out


def test_a_template_broken_on_purpose_is_pinned_to_its_knob(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edit of the hand-over between ping-pong groups touches kernels with ping-pong only."""
    seen: set[bool] = set()

    def act(source: Source) -> str:
        edited = "barrier_id=8 + group, number_of_threads=2 * WG)" in source.text
        seen.add(edited)
        return "wrong" if edited else "ok"

    rig.act = act
    assert rig("--break", "hand the turn") == 1
    assert seen == {False, True}
    [finding] = rig.results["findings"]
    assert [(c["name"], c["value"]) for c in finding["causes"]] == [("pingpong", "true")]
    edited = [t for t in rig.results["trials"] if t["edited"]]
    assert edited and all("pingpong=true" in t["config"] for t in edited)
    assert rig.results["edited_kernels"] == len(edited) and rig.results["break"] == "hand the turn"
    assert "trials had the broken place" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second tier: exit code 130, and a file with every trial so far."""
    check, count = Bench.check, iter(range(10_000))

    def interrupted(bench: Bench, *arguments: Any) -> Any:
        if next(count) == 20:
            raise KeyboardInterrupt
        return check(bench, *arguments)

    monkeypatch.setattr(Bench, "check", interrupted)
    assert rig() == 130
    assert len(rig.results["trials"]) == 20 and rig.results["broken"] == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--break", "no such"], 2, "names 0 edits; valid: arrivals of one block only;"),
        (["--break", "stages released"], 2, "names 2 edits; valid: stages released twice"),
        (["--break", "twice", "--import", "b.tar"], 2, "does not go with --import"),
        (["--arch", "sm_100a"], 3, "kernels are for sm_100a, the GPU is Fake GPU (sm_90a)"),
        (["--arch", "sm_1"], 2, "unknown architecture 'sm_1'"),
        (["--shapes", "none.toml"], 2, "none.toml does not exist"),
        (["--import", "none.tar"], 3, "cannot read bundle none.tar"),
    ],
)
def test_mistakes_are_named(
    rig: Rig, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    """Before anything compiles."""
    assert rig(*words) == code
    assert message in capsys.readouterr().err and rig.compiled == 0 and not rig.out.exists()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_a_dry_run_lists_the_tiers_of_any_target_without_a_gpu(
    arch: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr(bringup, "present_device", none)
    assert bringup.main(["--dry-run", "--arch", arch, "--pairs", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ", 1)[1].split(" on ")[0] for line in lines[:5]] == list(TIERS)
    assert "60 trials" in lines[3] and "50 further runs each" in lines[3]
    assert lines[4].endswith("kernels") and "60 trials" in lines[4], "30 pairs and 30 shapes"
    assert bringup.main(["--dry-run"]) == 3
    assert "no NVIDIA driver" in capsys.readouterr().err


# --- bundles ---


@pytest.mark.dsl
def test_kernels_of_a_bundle_are_tried_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cutegen.tune exported for sm_100a here is tried there, in every tier that suits it."""
    import cutegen.cli_tune

    bundle, out = tmp_path / "b.tar", tmp_path / "out.json"
    words = ["gemm", "--arch", "sm_100a", "--shape", "512x1024x1024", "--candidates", "2", "--quiet"]
    files = ["--cache-dir", str(tmp_path / "here"), "--export", str(bundle)]
    assert cutegen.cli_tune.main([*words, *files]) == 0
    monkeypatch.setattr(Builder, "_require_compiler", lambda self: pytest.fail("it compiled"))
    elsewhere = replace(Toolchain.current(), packages=())
    monkeypatch.setattr(Toolchain, "current", lambda: elsewhere)
    monkeypatch.setattr(bringup, "present_device", lambda: B200)
    monkeypatch.setattr(
        bringup,
        "bench_of",
        lambda limit: Bench(engine="fake_engine:make", search_path=[HERE], timeout_s=limit),
    )
    there = ["--import", str(bundle), "--cache-dir", str(tmp_path / "there"), "--out", str(out)]
    assert bringup.main([*there, "--pairs", "4", "--races", "4"]) == 0
    results = json.loads(out.read_text())
    assert [tier["name"] for tier in results["tiers"]] == list(TIERS) and results["bundle"] == "b.tar"
    assert {t["outcome"] for t in results["trials"]} == {"ok"} and results["arch"] == "sm_100a"
    brought = [t for t in results["trials"] if t["problem"] == "gemm 512x1024x1024 bf16 tn"]
    assert [t["tier"] for t in brought] == [tier for tier in TIERS[2:] for _ in range(2)]
    monkeypatch.setattr(bringup, "present_device", lambda: fake_engine.DEVICE)
    assert bringup.main(there) == 3
    assert "kernels are for sm_100a, the GPU is Fake GPU (sm_90a)" in capsys.readouterr().err


@pytest.mark.dsl
def test_what_the_tiers_need_is_compiled_here_and_tried_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--export and --import: the same trials, with tiers cut down to a few points."""
    monkeypatch.setattr(bringup, "present_device", lambda: B200)
    monkeypatch.setattr(
        bringup,
        "bench_of",
        lambda limit: Bench(engine="fake_engine:make", search_path=[HERE], timeout_s=limit),
    )
    whole = plan(BLACKWELL, Extent(pairs=1))
    few = tuple(replace(tier, points=tier.points[:2]) for tier in whole)
    monkeypatch.setattr(bringup, "plan", lambda *arguments: few)
    bundle, out = tmp_path / "b.tar", tmp_path / "out.json"
    assert bringup.main(["--arch", "sm_100a", "--export", str(bundle)]) == 0
    monkeypatch.setattr(Builder, "_require_compiler", lambda self: pytest.fail("it compiled"))
    assert bringup.main(["--import", str(bundle), "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    tried = [(t["problem"], t["config"]) for t in results["trials"]]
    assert tried == [(str(p.problem), str(p.config)) for tier in few for p in tier.points]
