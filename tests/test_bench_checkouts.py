"""Default kernels of two checkouts: what the other one answers, and the table of what both take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.errors import CutegenError
from cutegen.families.registry import find_space, parse_problem
from cutegen.search.defaults import default_config
from tools.bench_checkouts import PROBLEMS, Renderer
from tools.bench_checkouts import main as measure
from tools.benchmark.checkouts_table import AGAINST, CHECKOUTS, OURS, Checkouts
from tools.results_table import main

ROOT = Path(__file__).resolve().parent.parent
ARCH, SM_COUNT = find_arch("sm_90a"), 132


@pytest.fixture(scope="module")
def other() -> Iterator[Renderer]:
    with Renderer(ROOT, ARCH, SM_COUNT) as found:
        found.wait()
        yield found


@pytest.mark.parametrize("line", PROBLEMS)
def test_a_checkout_renders_the_kernel_that_it_would_run(line: str, other: Renderer) -> None:
    """This checkout beside itself: the same text."""
    problem = parse_problem(line)
    config = default_config(find_space(problem.family, ARCH), problem, SM_COUNT)
    ours = render(problem, config, ARCH)
    assert other.source(problem, ours) == ours


def test_kernels_with_run_time_arguments_are_refused(other: Renderer) -> None:
    """Two checkouts may say other things by the same numbers. The process goes on."""
    problem = parse_problem("gemm 64x4096x4096 bf16 kk")
    config = default_config(find_space("gemm", ARCH), problem, SM_COUNT)
    with pytest.raises(CutegenError, match=r"64x4096x4096 .*: its launches have run-time arguments"):
        other.source(problem, render(problem, config, ARCH))
    assert json.loads(other.ask("rmsnorm 64x4096 bf16"))["config"]


def test_what_the_other_checkout_does_not_know_is_said(other: Renderer) -> None:
    assert "unknown_family" in json.loads(other.ask("unknown_family 64x4096 bf16"))["error"]


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
