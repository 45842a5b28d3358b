"""The tool of the first hour: its tiers, what it makes of a broken one, and what it writes down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_tuning import FakeCompiler
from patient_bench import PatientBench

from cutegen.arch import find_arch
from cutegen.build import Builder, Result, Toolchain
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.errors import DeviceError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure import Bench
from cutegen.measure.device import Device
from tools import bringup
from tools.bringup_parts.points import Point
from tools.bringup_parts.tiers import TIERS, Scope, Tier, plan

HOPPER, BLACKWELL = (find_space("gemm", find_arch(name)) for name in ("sm_90a", "sm_100a"))
SQUARE = Problem(4096, 4096, 1024)
B200 = replace(fake_engine.DEVICE, name="Fake B200", compute_capability=(10, 0), sm_count=148)
#: What a kernel does, by its text and its config.
Act = Callable[[Source], str]


class ActingCompiler(FakeCompiler):
    """What a kernel does may depend on its text."""

    def __init__(self, store: Store, act: Act) -> None:
        super().__init__(store, batch=10_000)
        self._act = act

    def _result(self, source: Source) -> Result:
        self.behaviour = lambda config: self._act(source)
        return super()._result(source)


@cache
def remembered_plan(space_arch: str, scope: Scope) -> tuple[Tier, ...]:
    """Plans take seconds; a test run needs few of them."""
    return plan(find_space("gemm", find_arch(space_arch)), scope)


def use_gpu(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """Give the tool a fake GPU."""
    monkeypatch.setattr(bringup, "present_device", lambda: device)
    monkeypatch.setattr(bringup, "bench_of", PatientBench)


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
        monkeypatch.setattr(bringup, "plan", lambda space, scope, _: remembered_plan(space.arch.name, scope))
        use_gpu(monkeypatch, fake_engine.DEVICE)

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
    rig.act = lambda s: "wrong" if s.config["pingpong"] and s.config["cluster_shape_mn"] == (4, 1) else "ok"
    assert rig("--races", "40") == 1
    assert rig.results["broken"] == "races"
    [finding] = rig.results["findings"]
    assert {cause["name"]: cause["value"] for cause in finding["causes"]} == {
        "pingpong": "true",
        "cluster_shape_mn": "4x1",
    }
    assert " together with " in finding["sentence"]
    [cluster] = [cause for cause in finding["causes"] if cause["name"] == "cluster_shape_mn"]
    assert set(cluster["passes_with"]) == {"1x1", "2x1", "1x2", "2x2", "1x4", "4x2", "2x4"}


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
    import cutegen.cli.tune

    bundle, out = tmp_path / "b.tar", tmp_path / "out.json"
    words = ["gemm", "--arch", "sm_100a", "--shape", "512x1024x1024", "--candidates", "2", "--quiet"]
    words += ["--set", "cluster_shape_mn=1x1", "--set", "mma_tiler_mn=128x64"]  # one tile is a problem then
    files = ["--cache-dir", str(tmp_path / "here"), "--export", str(bundle)]
    assert cutegen.cli.tune.main([*words, *files]) == 0
    monkeypatch.setattr(Builder, "_require_compiler", lambda self: pytest.fail("it compiled"))
    elsewhere = replace(Toolchain.current(), packages=())
    monkeypatch.setattr(Toolchain, "current", lambda: elsewhere)
    use_gpu(monkeypatch, B200)
    there = ["--import", str(bundle), "--cache-dir", str(tmp_path / "there"), "--out", str(out)]
    assert bringup.main([*there, "--pairs", "4", "--races", "4"]) == 0
    results = json.loads(out.read_text())
    assert [tier["name"] for tier in results["tiers"]] == list(TIERS) and results["bundle"] == "b.tar"
    assert {t["outcome"] for t in results["trials"]} == {"ok"} and results["arch"] == "sm_100a"
    brought = [t for t in results["trials"] if t["problem"] == "gemm 512x1024x1024 bf16 kk"]
    each = len(brought) // len(TIERS[2:])
    assert each >= 2 and [t["tier"] for t in brought] == [tier for tier in TIERS[2:] for _ in range(each)]
    monkeypatch.setattr(bringup, "present_device", lambda: fake_engine.DEVICE)
    assert bringup.main(there) == 3
    assert "kernels are for sm_100a, the GPU is Fake GPU (sm_90a)" in capsys.readouterr().err


@pytest.mark.dsl
def test_what_the_tiers_need_is_compiled_here_and_tried_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--export and --import: the same trials, with tiers cut down to a few points."""
    use_gpu(monkeypatch, B200)
    whole = plan(BLACKWELL, Scope(pairs=1))
    few = tuple(replace(tier, points=tier.points[:2]) for tier in whole)
    monkeypatch.setattr(bringup, "plan", lambda *arguments: few)
    bundle, out = tmp_path / "b.tar", tmp_path / "out.json"
    assert bringup.main(["--arch", "sm_100a", "--export", str(bundle)]) == 0
    monkeypatch.setattr(Builder, "_require_compiler", lambda self: pytest.fail("it compiled"))
    assert bringup.main(["--import", str(bundle), "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    tried = [(t["problem"], t["config"]) for t in results["trials"]]
    assert tried == [(str(p.problem), str(p.config)) for tier in few for p in tier.points]
