"""Default kernels of two checkouts: what the other one answers, and the table of what both take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import H200

from cutegen.arch import find_arch
from cutegen.errors import CutegenError
from cutegen.families.registry import find_space, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure.policy import Policy
from cutegen.search.defaults import default_config
from cutegen.space import Config
from tools.bench_checkouts import PROBLEMS, Pair, Renderer, _pairs
from tools.bench_checkouts import main as measure
from tools.benchmark.checkouts_table import AGAINST, CHECKOUTS, OURS, Checkouts
from tools.benchmark.drawn import DrawnRows
from tools.results_table import main

ROOT = Path(__file__).resolve().parent.parent
ARCH, SM_COUNT = find_arch("sm_90a"), 132


@pytest.fixture(scope="module")
def other() -> Iterator[Renderer]:
    with Renderer(ROOT, ARCH, SM_COUNT) as found:
        found.wait()
        yield found


#: By tiles, of few rows and with a split k; launches of two of them have run-time arguments.
PRODUCTS = ("gemm 2048x4096x4096 bf16 kk", "gemm 1x4096x4096 bf16 kk", "gemm 64x7168x16384 bf16 kk")
DEVICE = replace(H200, sm_count=132)


@pytest.mark.parametrize("line", [*PROBLEMS, *PRODUCTS])
def test_a_checkout_renders_the_kernel_that_it_would_run(line: str, other: Renderer) -> None:
    """This checkout beside itself: the same text, and launches that take the same."""
    problem = parse_problem(line)
    pair = Pair.of(problem, DEVICE, other)
    assert pair.sources[OURS] == pair.sources[AGAINST]
    assert pair.config == default_config(find_space(problem.family, ARCH), problem, SM_COUNT)
    launch = space_of(pair.config, problem.family, ARCH).launch(pair.config, problem, SM_COUNT)
    assert bool(launch.scalars) == line.startswith(("gemm 2048", "gemm 64"))


def test_launches_that_take_something_else_are_refused(
    other: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number more, as if the other checkout had a run-time argument that is gone."""
    problem, answer = parse_problem(PRODUCTS[0]), other.rendered
    monkeypatch.setattr(
        other, "rendered", lambda *given: {**answer(*given), "scalars": [1, 2, 3], "workspace_bytes": 0}
    )
    with pytest.raises(CutegenError, match=r"launches take \(\(1, 2, 3\), 0\) in the other checkout and"):
        Pair.of(problem, DEVICE, other)


def test_what_the_other_checkout_does_not_know_is_said(
    other: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its process goes on."""
    problem = parse_problem(PROBLEMS[0])
    with pytest.raises(CutegenError, match=r"the other checkout says: .*no_knob"):
        other.rendered(problem, Config({"no_knob": 1}))
    assert other.rendered(problem, None)["config"]


def test_a_file_is_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratios are rounded down."""
    rows = [
        {"problem": "rope 1x32x8x128x64x1 bf16", "bytes": 21000, "times": {OURS: 1.106, AGAINST: 1.163}},
        {"problem": "rmsnorm 1x4096 bf16", "bytes": 24576, "times": {OURS: 1.38, AGAINST: 1.379}},
    ]
    facts = {"kind": CHECKOUTS, "gpu": "A GPU", "commit": "0" * 40, "against_commit": "1" * 40, "rows": rows}
    facts |= {"measured_at": "2026-11-28T03:00:00+00:00", "machine": {"driver": "1.2"}}
    path = tmp_path / "checkouts.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    [summary] = Checkouts.load(path).summary()
    assert "2 problems: geometric mean **1.025**, smallest 0.999, largest 1.051" in summary
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| `rope 1x32x8x128x64x1 bf16` | 1.163 | 1.106 | 1.051 |" in printed


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(["--against", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 2
    assert "has no folder cutegen; give the root of a checkout" in capsys.readouterr().err


def test_a_problem_that_cannot_be_compared_is_noted_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here the first of two, of which the other checkout says something else."""
    first, second = map(parse_problem, PROBLEMS[:2])
    of = Pair.of

    def refusing(problem: Problem, *given: Any) -> Pair:
        if problem == first:
            raise CutegenError(f"{problem}: no")
        return of(problem, *given)

    monkeypatch.setattr(Pair, "of", refusing)
    found = DrawnRows(CHECKOUTS, DEVICE, "", Policy(), {})
    assert list(_pairs([first, second], DEVICE, ROOT, found)) == [second]
    assert found.failures == [f"{first}: no"] and f"{first}: no" in capsys.readouterr().err
