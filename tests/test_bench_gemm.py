"""The benchmark command: results shape by shape, continued by the same command, never mixed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_kernels import FakeGpu
from fake_operators import operator, pretend_installed

from cutegen.errors import DeviceError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure import Bench
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from tools import bench_gemm
from tools.benchmark import lineup
from tools.benchmark.bandwidth import METHODS
from tools.benchmark.quack import quack_environment
from tools.benchmark.results import Results

HERE = Path(__file__).parent
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

    def make_bench(args: argparse.Namespace) -> Bench:
        return Bench(timeout_s=args.peer_budget, engine="fake_engine:make", search_path=[HERE])

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


def test_a_peer_that_is_not_there_is_recorded_and_stops_nobody(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row holds the reason."""

    def prepare(self: object, problems: Sequence[Problem]) -> None:
        raise DeviceError("out of order")

    monkeypatch.setattr(lineup.Quack, "prepare", prepare)
    assert run("--only", "A", peers="quack") == 0
    entries = Results.load(tmp_path / "r.json").shapes[0].entries
    assert entries["quack"].error == "out of order" and entries["cutegen"].ok


def test_a_new_peer_means_measuring_again(run: Run, tmp_path: Path) -> None:
    """All of a row must come from the same rounds: the file was for other peers."""
    assert run("--only", "A") == 0
    assert run("--only", "A", peers="quack") == 2


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


def test_a_table_may_name_an_operator_and_the_record_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise cutegen's column would not say whose kernel it times."""
    pretend_installed(monkeypatch)
    named = table(tmp_path / "t.json", config=operator("64x64", "2x1"), source="operators")
    assert run("--only", "A", "--table", named) == 0
    entry = Results.load(tmp_path / "r.json").shapes[0].entries["cutegen"]
    assert entry.config == "operators 64x64 2x1" and entry.details["table_gives_it_to"] == "operators"


def test_our_own_kernel_is_measured_even_where_torch_won(run: Run, tmp_path: Path) -> None:
    """The record says whom the table gives the problem to."""
    assert run("--only", "A", "--table", table(tmp_path / "t.json", source="torch")) == 0
    entry = Results.load(tmp_path / "r.json").shapes[0].entries["cutegen"]
    assert entry.choice["swizzle_size"] == 2 and entry.details["table_gives_it_to"] == "torch"


def test_tuning_seconds_come_from_what_the_tuner_printed(run: Run, tmp_path: Path) -> None:
    """Only problems that were tuned, not those answered from records, have them."""
    rows = [
        {"name": "A", "problem": "gemm 512x512x512 bf16 kk", "seconds": 12.5, "reused": False},
        {"name": "B", "problem": "gemm 4096x4096x4096 bf16 kk", "seconds": 0.1, "reused": True},
    ]
    (tmp_path / "tuned.json").write_text(json.dumps({"schema": 1, "results": rows}))
    assert run("--tuned", str(tmp_path / "tuned.json")) == 0
    shapes = Results.load(tmp_path / "r.json").shapes
    assert [row.entries["cutegen"].tuning_s for row in shapes] == [12.5, None]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "cublas"], "unknown peer cublas; known: quack, operators, copy"),
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


def test_a_dry_run_lists_the_work_without_a_gpu(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is compiled, measured or written."""

    def absent(index: int) -> None:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.undo()
    monkeypatch.setattr(bench_gemm, "present_device", absent)
    (tmp_path / "shapes.toml").write_text(SHAPES + FEW_ROWS)
    assert run("--dry-run", peers="quack,operators,copy") == 0
    out = capsys.readouterr().out
    copies = [line for line in out.splitlines() if "copy of" in line]
    assert [line[0] for line in copies] == ["C"] and "copy of 33685504 bytes" in copies[0]
    assert "A: gemm 512x512x512 bf16 kk: cutegen default: " in out
    assert "(not compiled yet); quack tunes; operators tunes" in out
    assert not (tmp_path / "r.json").exists()


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
