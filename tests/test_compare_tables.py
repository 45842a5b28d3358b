"""Winners of several tables in one run: same, tied, faster, slower or failed, and the table of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from patient_bench import PatientBench
from test_bench_energy import FakeBuilder

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.space import Config
from tools import compare_tables, results_table
from tools.benchmark import fixed, tables_table
from tools.benchmark.results import TABLES, Results

SPACE = find_space("gemm", find_arch("sm_90a"))
SQUARE, WIDE = Problem(4096, 4096, 4096), Problem(2048, 8192, 4096)
BASE = SPACE.default(SQUARE)
#: What the fake builder's kernels do: 20 us, 21 us, 30 us, wrong.
USUAL, CLOSE, SLOW, WRONG = (
    BASE.replace(tile_shape_mn=tile, mma_warpgroups=groups)
    for tile, groups in (((128, 256), 2), ((128, 128), 2), ((64, 128), 1), ((256, 128), 2))
)
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a fake GPU: tables are given as configs by name and problem; returns the exit code."""

    def make_bench(args: argparse.Namespace) -> PatientBench:
        return PatientBench()

    monkeypatch.setattr(compare_tables, "make_bench", make_bench)
    monkeypatch.setattr(compare_tables, "present_device", lambda index: fake_engine.DEVICE)
    monkeypatch.setattr(fixed, "Builder", FakeBuilder)

    def call(tables: dict[str, dict[Problem, Config]], *arguments: str) -> int:
        words = []
        for name, configs in tables.items():
            entries = [Entry(problem, config) for problem, config in configs.items()]
            Table(Fingerprint.of(fake_engine.DEVICE), entries).save(tmp_path / f"{name}.json")
            words += ["--table", f"{name}={tmp_path / f'{name}.json'}"]
        files = ["--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "tables.json")]
        return compare_tables.main([*words, *files, "--rounds", "5", *arguments])

    return call


def test_each_table_is_compared_with_the_first(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One winner is the same, one takes half as long again; the exit code says that something is slower."""
    tables = {"here": {SQUARE: USUAL, WIDE: USUAL}, "there": {SQUARE: USUAL, WIDE: SLOW}}
    assert run(tables, "--commit", "abc") == 1
    results: Any = Results.load(tmp_path / "tables.json")
    assert results.kind == TABLES and results.sessions[0]["commit"] == "abc"
    assert results.sessions[0]["arguments"]["table"] == {"here": "here.json", "there": "there.json"}
    assert str(tmp_path) not in (tmp_path / "tables.json").read_text()
    found = {row.problem: tables_table.verdicts(row) for row in results.shapes}
    assert found == {SQUARE: {"there": "same config"}, WIDE: {"there": "slower"}}
    printed = capsys.readouterr().out
    assert "there beside here, 2 shapes: 1 slower, 1 same config; time in geometric mean 1.2" in printed
    assert "torch.mm / there: geometric mean" in printed and "torch.mm / there in bursts: " in printed
    assert "winners come from cutegen 2" in results_table.render(results)


def test_what_the_tuner_would_call_tied_is_tied(run: Run, tmp_path: Path) -> None:
    """5 % apart is not, the same kernel under another swizzle is; the faster one is no reason to complain."""
    assert (
        run({"a": {SQUARE: CLOSE}, "b": {SQUARE: USUAL}, "c": {SQUARE: CLOSE.replace(swizzle_size=4)}}) == 0
    )
    [row] = Results.load(tmp_path / "tables.json").shapes
    assert tables_table.verdicts(row) == {"b": "faster", "c": "tied"}
    file, page = tmp_path / "tables.json", tmp_path / "PAGE.md"
    page.write_text("<!-- results: tables -->\n<!-- end results: tables -->\n")
    assert results_table.main([str(file), "--into", str(page)]) == 0
    [cells] = [line for line in page.read_text().splitlines() if str(SQUARE) in line and line.startswith("|")]
    assert "| faster |" in cells and "| tied |" in cells and "0.95" in cells


def test_seconds_of_tuning_come_from_what_the_command_printed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the tables that are named; what was answered from records took none."""
    rows = [{"problem": str(problem), "seconds": s} for problem, s in ((SQUARE, 3.0), (WIDE, 1.0))]
    for name, reused in (("a", False), ("b", True)):
        printed = {"results": [{**row, "reused": reused} for row in rows]}
        (tmp_path / f"tuned_{name}.json").write_text(json.dumps(printed))
    files = [word for name in "ab" for word in ("--tuned", f"{name}={tmp_path / f'tuned_{name}.json'}")]
    both = {SQUARE: USUAL, WIDE: USUAL}
    assert run({"a": both, "b": both}, *files) == 0
    assert {row.entries["a"].tuning_s for row in Results.load(tmp_path / "tables.json").shapes} == {1.0, 3.0}
    assert str(tmp_path) not in (tmp_path / "tables.json").read_text()
    lines = capsys.readouterr().out.splitlines()
    assert "- a: tuned in 2.00 s a shape in the median of 2, 3.0 s at most" in lines
    assert not [text for text in lines if text.startswith("- b: tuned")]
    assert run({"a": both, "b": both}, "--tuned", f"c={tmp_path / 'tuned_a.json'}") == 2
    assert "with the name of a --table" in capsys.readouterr().err


def test_a_winner_that_fails_is_named(run: Run, tmp_path: Path) -> None:
    """A wrong result has no time."""
    assert run({"a": {SQUARE: USUAL}, "b": {SQUARE: WRONG}}) == 1
    [row] = Results.load(tmp_path / "tables.json").shapes
    assert tables_table.verdicts(row) == {"b": "failed"}
    assert "**wrong_result**" in results_table.render(Results.load(tmp_path / "tables.json"))


def test_only_problems_that_all_tables_name_are_measured(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With none in common there is nothing to do."""
    assert run({"a": {SQUARE: USUAL, WIDE: USUAL}, "b": {WIDE: USUAL}}) == 0
    assert [row.problem for row in Results.load(tmp_path / "tables.json").shapes] == [WIDE]
    assert run({"a": {SQUARE: USUAL}, "b": {WIDE: USUAL}}) == 2
    assert "no problem is in all of a, b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--table", "x"], "'x' must be NAME=FILE.json"), ([], "--table must be given twice or more")],
)
def test_mistakes_are_named(
    run: Run, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    """Bad usage exits with 2."""
    assert run({"a": {SQUARE: USUAL}}, *words) == 2
    assert message in capsys.readouterr().err
