"""The benchmark command: results shape by shape, continued by the same command, never mixed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_kernels import FakeGpu
from patient_bench import PatientBench

from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from tools import bench_gemm
from tools.benchmark import lineup
from tools.benchmark.bandwidth import METHODS
from tools.benchmark.quack import quack_environment
from tools.benchmark.results import Results

SHAPES = """
[[shape]]
id = "A"
m = 512
n = 512
k = 512

[[shape]]
id = "B"
m = 4096
n = 4096
k = 4096
"""
FEW_ROWS = """
[[shape]]
id = "C"
m = 8
n = 4096
k = 4096
"""
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a fake GPU, with files of its own; returns the exit code."""
    (tmp_path / "shapes.toml").write_text(SHAPES)
    gpu = FakeGpu(tmp_path / "cache")

    def make_bench(args: argparse.Namespace) -> PatientBench:
        return PatientBench(args.peer_budget)

    monkeypatch.setattr(bench_gemm, "make_bench", make_bench)
    monkeypatch.setattr(bench_gemm, "present_device", lambda index: fake_engine.DEVICE)
    monkeypatch.setattr(lineup, "Kernels", lambda store, build: gpu.kernels())
    for variable in ("CUTEGEN_CACHE_DIR", *quack_environment(tmp_path, 1)):
        monkeypatch.setenv(variable, "restored afterwards")

    def call(*arguments: str, peers: str = "none") -> int:
        files = ["--shapes", str(tmp_path / "shapes.toml"), "--out", str(tmp_path / "r.json")]
        return bench_gemm.main([*files, "--cache-dir", str(tmp_path / "cache"), "--peers", peers, *arguments])

    return call


def test_every_shape_gets_a_row_with_all_that_is_promised(run: Run, tmp_path: Path) -> None:
    """Conditions, sessions, times, ratio, config, clock and power are in the file."""
    assert run("--commit", "abc") == 0
    results: Any = Results.load(tmp_path / "r.json")
    assert results.conditions["gpu"]["name"] == "Fake GPU"
    assert results.conditions["policy"]["clock"] == "settled" and results.conditions["software"]["packages"]
    assert results.sessions[0]["commit"] == "abc" and results.sessions[0]["driver"] == "1.2"
    assert [row.name for row in results.shapes] == ["A", "B"]
    entry = results.shapes[1].entries["cutegen"]
    assert entry.ok and entry.timing.ratio == pytest.approx(0.5) and entry.timing.sm_clock_mhz
    assert results.shapes[1].reference.rounds_power_w and results.shapes[1].settled is not None
    assert entry.details["lookup"] == "default" and entry.details["called_through_gemm"] == "ok"
    assert entry.choice["tile_shape_mn"] and entry.config


def test_the_same_command_again_measures_only_what_is_missing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First one shape, then the other; a third time nothing."""
    assert run("--only", "B") == 0
    first = Results.load(tmp_path / "r.json").shapes[0]
    assert run() == 0
    results = Results.load(tmp_path / "r.json")
    assert [row.name for row in results.shapes] == ["B", "A"]
    assert results.shapes[0] == first and len(results.sessions) == 2
    before = (tmp_path / "r.json").read_text()
    assert run() == 0
    assert (tmp_path / "r.json").read_text() == before
    assert "2 shapes, 2 of them in" in capsys.readouterr().out


def test_results_of_other_conditions_are_not_mixed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another policy is named; --fresh begins anew."""
    assert run("--only", "A") == 0
    assert run("--only", "A", "--rounds", "30") == 2
    assert "policy.rounds is 61 in the file but 30 here" in capsys.readouterr().err
    assert run("--only", "A", "--rounds", "30", "--fresh") == 0


def table(path: Path, **fields: object) -> str:
    fingerprint = Fingerprint.of(fake_engine.DEVICE)
    problem = Problem(512, 512, 512)
    config = find_space("gemm", fake_engine.DEVICE.arch).default(problem).replace(swizzle_size=2)
    values = {"config": config, "time_us": 5.0, "artifact_key": "", **fields}
    Table(fingerprint, [Entry(problem, **values)]).save(path)  # type: ignore[arg-type]
    return str(path)


def test_the_table_decides_what_is_measured(run: Run, tmp_path: Path) -> None:
    """Its config is run for the problem it names, and the lookup is recorded."""
    assert run("--only", "A", "--table", table(tmp_path / "t.json")) == 0
    entry = Results.load(tmp_path / "r.json").shapes[0].entries["cutegen"]
    assert entry.choice["swizzle_size"] == 2
    assert (entry.details["lookup"], entry.details["table_us"]) == ("exact", 5.0)
    assert entry.details["table_gives_it_to"] == "cutegen"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "cublas"], "unknown peer cublas; known: quack, operators, cublaslt, max_autotune, copy"),
        (["--only", "A,Z"], "has no shape Z"),
        (["--table", "absent.json"], "dispatch table absent.json does not exist"),
        (["--tuned", "absent.json"], "absent.json cannot be read"),
        (["--reuse", "absent.json", "--peers", "quack"], "absent.json cannot be read"),
    ],
)
def test_bad_usage_is_explained(
    run: Run, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured."""
    assert run(*arguments) in (2, 3)
    assert words in capsys.readouterr().err


def test_copies_run_beside_products_of_few_rows_only(run: Run, tmp_path: Path) -> None:
    """A file that was begun without them is continued where they belong."""
    (tmp_path / "shapes.toml").write_text(SHAPES + FEW_ROWS)
    assert run() == 0
    before = Results.load(tmp_path / "r.json")
    assert [sorted(row.entries) for row in before.shapes] == [["cutegen"]] * 3
    assert run(peers="copy") == 0
    after = Results.load(tmp_path / "r.json")
    assert [sorted(row.entries) for row in after.shapes] == [["cutegen"], ["cutegen"], ["copy", "cutegen"]]
    assert after.shapes[:2] == before.shapes[:2]
    entry = after.shapes[2].entries["copy"]
    assert entry.ok and entry.config in METHODS and entry.choice == {"method": entry.config}
    assert set(entry.details["finalists_us"]) == set(METHODS)
    assert run(peers="copy") == 0 and Results.load(tmp_path / "r.json") == after


def test_an_interrupted_run_keeps_its_rows(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the second shape leaves the first in the file."""
    original = bench_gemm.run_contest

    def contest(arena: Any, named: Any, *rest: Any, **options: Any) -> Any:
        if named.name == "B":
            raise KeyboardInterrupt
        return original(arena, named, *rest, **options)

    monkeypatch.setattr(bench_gemm, "run_contest", contest)
    assert run() == 130
    assert [row.name for row in Results.load(tmp_path / "r.json").shapes] == ["A"]
