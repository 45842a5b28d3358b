"""Results of kernels that others wrote: joined from one file for each, and shown beside authors' defaults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.errors import StoreError
from cutegen.families import registry
from cutegen.families.registry import find_space
from cutegen.families.shapes import NamedProblem, read_shapes
from cutegen.measure import Candidate, CheckResult
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.measure.timing_run import TimingRun
from cutegen.search.defaults import default_config
from cutegen.space import Launch
from cutegen.tuning.result import Row, TuneResult
from tools import bench_family, bench_foreign, results_table
from tools.benchmark.family_child import call_names
from tools.benchmark.foreign_table import ForeignResults
from tools.benchmark.results import write_json


@pytest.fixture(autouse=True)
def nothing_stays_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded here is not known to other tests."""
    monkeypatch.setattr(registry, "_registered", dict(registry._all()))


def part(problem: str, **entries: tuple[float, float]) -> dict[str, Any]:
    """A results file of one row: time and ratio of each entry."""
    row = {
        "name": "row",
        "problem": problem,
        "config": "threads=128",
        "candidates": 14,
        "entries": {
            name.replace("_", " "): {"median_us": us, "over_cutegen": ratio}
            for name, (us, ratio) in entries.items()
        },
    }
    return {
        "gpu": "NVIDIA H200",
        "machine": {"driver": "580"},
        "software": {"packages": {"torch": "2.11.0"}},
        "commit": "0123456789abcdef",
        "measured_at": "2026-11-22T20:00:00+00:00",
        "conditions": {"gpu": {"compute_capability": "90a"}},
        "rows": [row],
    }


def test_parts_are_joined_and_shown_with_ratios_that_favour_nobody(tmp_path: Path) -> None:
    norm = part(
        "quack_rmsnorm 16384x4096 bf16",
        cutegen=(100.001, 1.0),
        cutegen_default=(103.0625, 1.0305),
        torch=(90, 0.9),
    )
    soft = part("quack_softmax 2048x128256 bf16", cutegen=(50.0, 1.0), torch=(60, 1.25), copy=(49, 0.98))
    parts = {"quack_rmsnorm": norm, "quack_softmax": soft, "nvidia_gemm": {**norm, "rows": []}}
    for name, document in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    out = tmp_path / "foreign.json"
    write_json(out, bench_foreign.joined(tmp_path))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [*found["kernels"]] == ["quack_rmsnorm", "quack_softmax"]
    assert found["kernels"]["quack_rmsnorm"]["entry"] == "quack.rmsnorm:RMSNorm"
    assert found["kernels"]["quack_rmsnorm"]["rows"][0]["configs"] == 222
    rendered = ForeignResults.load(out).render()
    assert (
        "- quack_rmsnorm: author's default / winner at most **1.030**, at least 1.030; 1.03 or more"
        in rendered
    )
    assert "| 103.06 | 100.01 | 1.030 | 0.900 (torch) | 14 of 222 | `threads=128` |" in rendered
    assert "| 50.00 | 50.00 | 1.000 | 1.250 (torch) | 14 of 14 | the default |" in rendered
    assert "; exhaustive on 0 shapes, else 14 of 222 configs tried; torch" in rendered
    assert "; **exhaustive**: every valid config tried on every shape; torch" in rendered
    assert results_table.main([str(out)]) == 0


def test_the_table_says_what_became_of_what_was_tried(tmp_path: Path) -> None:
    norm = part("quack_softmax 2048x128256 bf16", cutegen=(100.0, 1.0))
    norm["rows"][0]["outcomes"] = {"ok": 6, "pruned": 5, "build_failed": 2, "wrong_result": 1}
    (tmp_path / "quack_softmax.json").write_text(json.dumps(norm), encoding="utf-8")
    out = tmp_path / "foreign.json"
    write_json(out, bench_foreign.joined(tmp_path))
    assert "| 14 of 14: 11 timed, 2 build_failed, 1 wrong_result |" in ForeignResults.load(out).render()


def test_kernels_that_are_not_measured_again_stay(tmp_path: Path) -> None:
    """As the results file has them; one of another kind is refused before anything is measured."""
    norm = part("quack_rmsnorm 16384x4096 bf16", cutegen=(100.0, 1.0))
    soft = part("quack_softmax 2048x128256 bf16", cutegen=(50.0, 1.0))
    before = {"nvidia_gemm": {"rows": [1]}, "quack_rmsnorm": {"rows": [2]}, "quack_softmax": {"rows": [3]}}
    for name, document in {"quack_rmsnorm": norm, "quack_softmax": {**soft, "rows": []}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    found: Any = bench_foreign.joined(tmp_path, before)["kernels"]
    assert [*found] == ["quack_rmsnorm", "quack_softmax", "nvidia_gemm"]
    assert found["quack_rmsnorm"]["rows"][0]["configs"] == 222
    assert found["quack_softmax"] is before["quack_softmax"] and found["nvidia_gemm"] is before["nvidia_gemm"]
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    assert bench_foreign.main(["--out", str(other), "--kernels", "quack_softmax"]) != 0


@pytest.mark.parametrize("name", bench_foreign.KERNELS)
def test_every_baseline_can_be_timed_beside_the_kernel(name: str) -> None:
    """Also one that is called torch, as what rounds are paired with is."""
    registry.load_kernel(bench_foreign.DECLARATIONS / f"{name}.py")
    for shape in read_shapes(bench_foreign.SHAPES / f"{name}.toml", name):
        names = call_names(shape.problem, peers=False)
        calls = [bench_family.call_candidate(shape.problem, each) for each in names]
        assert len({call.name for call in calls}) == len(names) > 2
        assert [json.loads(call.symbol)["name"] for call in calls] == names


class Times:
    """A measuring process in which the first entry takes 1 us, the next 2, and so on; the last cannot run."""

    opened: Any = None

    def open(self, problem: Any) -> None:
        self.opened = problem

    def check(self, candidate: Candidate, repeats: int) -> CheckResult:
        return CheckResult("ok")

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        *running, last = [candidate.name for candidate in candidates]
        timings = {name: Timing(at, at, at, 15) for at, name in enumerate(running, 1)}
        reference = Timing(1.0, 1.0, 1.0, 15, reference="torch")
        return TimingRun(timings, reference, {last: CheckResult("launch_failed", "no")}, 15)


def test_a_row_has_kernels_baselines_and_copies_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are called while they are timed."""
    registry.load_kernel(bench_foreign.DECLARATIONS / "quack_softmax.py")
    problem: Any = registry.parse_problem("quack_softmax 2048x4096 bf16")
    default = default_config(find_space("quack_softmax", find_arch("sm_90a")), problem)
    rows = tuple(
        Row(config, timing=Timing(2.0, 2.0, 2.0, 9)) for config in (default.replace(threads=256), default)
    )
    result = TuneResult(
        problem, "sm_90a", "NVIDIA H200", rows, outcomes={"ok": 2, "pruned": 1}, failed=("why",)
    )

    def compiled(kernels: Any, device: Any, name: str, problem: Any, config: Any) -> Candidate:
        return Candidate(name, Path("kernel.so"), "kernel", Launch((), 0), problem)

    monkeypatch.setattr(bench_family, "compiled_candidate", compiled)
    args = argparse.Namespace(peers="none", in_place=False, copies="all", burst_rounds=0)
    shape, bench, anything = (
        NamedProblem("row", problem),
        Times(),
        SimpleNamespace(name="NVIDIA H200", arch=find_arch("sm_90a"), sm_count=132),
    )
    choice = bench_family.Choice(result.config, bench_family._how(result))
    row: Any = bench_family._contest(bench, shape, choice, anything, anything, Policy(), args)
    assert [*row["entries"]] == ["cutegen", "cutegen default", "torch", "copy"]
    assert row["entries"]["torch"]["over_cutegen"] == 3.0 and row["failures"] == {"copy kernel": "no"}
    assert row["outcomes"] == {"ok": 2, "pruned": 1} and row["failed"] == ["why"] and row["candidates"] == 3


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "quack_rmsnorm.json").write_text("{", encoding="utf-8")
    with pytest.raises(StoreError, match=r"results file .*quack_rmsnorm\.json cannot be read"):
        bench_foreign.joined(tmp_path)


def test_a_kernel_that_is_not_declared_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench_foreign.main(["--out", str(tmp_path / "out.json"), "--kernels", "quack_rmsnorm,norm"]) == 2
    assert "unknown kernel 'norm'; valid: quack_rmsnorm, quack_softmax," in capsys.readouterr().err
