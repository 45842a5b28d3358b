"""tools/bench_untuned_families.py on a pretended GPU: what is drawn, what is timed, what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import DEVICE
from fake_tuning import timing

from cutegen.families.registry import find_family, parse_problem, space_of
from cutegen.family import Problem
from cutegen.measure import Candidate, CheckResult, TimingRun
from cutegen.search.defaults import default_config
from cutegen.space import Config, Launch
from tools import bench_untuned_families as tool
from tools.benchmark.untuned_table import UntunedFamilies


class PretendedBench:
    """Defaults of one head take 10 us, whatever else 8; ``wrong`` kernels are found."""

    wrong = ""

    def __init__(self, **options: Any) -> None:
        self.opened: Problem | None = None

    def __enter__(self) -> PretendedBench:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self) -> None:
        pass

    def open(self, problem: Problem, seed: int = 0) -> None:
        self.opened = problem

    def check(self, candidate: Candidate, repeats: int | None = None) -> CheckResult:
        assert candidate.problem == self.opened
        config, few = Config.parse(candidate.symbol), candidate.problem.with_sizes(m=64)
        fits = not space_of(config, candidate.problem.family, DEVICE.arch).explain(few, config)
        assert candidate.problem.sizes["m"] <= 64 or not fits, "few rows are enough"
        return CheckResult("wrong_result", "it is") if candidate.symbol == self.wrong else CheckResult("ok")

    def time(self, candidates: Sequence[Candidate], policy: Any) -> TimingRun:
        assert {candidate.problem for candidate in candidates} == {self.opened}
        times = {c.name: timing(10.0 if at == 0 else 8.0) for at, c in enumerate(candidates)}
        return TimingRun(times, timing(9.0))


class Nothing:
    """Compiles nothing."""

    def __init__(self, *given: object) -> None:
        pass

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidate(kernels: Any, device: Any, name: str, problem: Problem, config: Config) -> Candidate:
        return Candidate(name, Path("none"), str(config), Launch((), 0), problem)

    monkeypatch.setattr(tool, "Bench", PretendedBench)
    monkeypatch.setattr(tool, "Compilation", Nothing)
    monkeypatch.setattr(tool, "compiled_candidate", candidate)
    monkeypatch.setattr(tool, "present_device", lambda: DEVICE)


@pytest.mark.parametrize("family", tool.DRAWS)
def test_a_draw_is_the_same_for_its_seed(family: str) -> None:
    """So many signatures and sizes; the default leads what is tried."""
    problems = tool.drawn(family, 3, 10, 1)
    assert problems == tool.drawn(family, 3, 10, 1) != tool.drawn(family, 3, 10, 2)
    assert len(problems) == 10 and len({problem.signature for problem in problems}) <= 3
    products = find_family(family).metric == "TFLOP/s"
    most = 2**32 if products else 2**30  # weights are read whatever the rows
    assert max(problem.min_bytes for problem in problems) <= most
    configs = tool.asked(problems[0], DEVICE.arch, DEVICE.sm_count, 4)
    assert configs[0] == default_config(tool.find_space(family, DEVICE.arch), problems[0])
    overlap = "use_pdl" if products else "pdl"
    assert len(configs) <= 4 and len({config[overlap] for config in configs}) == 1


def test_answers_stand_beside_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "untuned_rope.json"
    assert tool.main(["rope", "--sizes", "4", "--widths", "2", "--out", str(path), "--commit", "0" * 40]) == 0
    assert "rope: 4 sizes, 0.800, smallest 0.800" in capsys.readouterr().out
    found = UntunedFamilies.load(path)
    assert "| `rope` | 4 | 0.800 | 0.800 | 0.0 % | 0.0 % | 0.0 % |" in found.render()
    assert found.summary() == ["- rope: 4 sizes, geometric mean **0.800**, smallest 0.800"]


def test_a_wrong_kernel_and_an_unknown_family_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (problem, *_) = tool.drawn("rope", 1, 1, 0)
    monkeypatch.setattr(PretendedBench, "wrong", str(tool.asked(problem, DEVICE.arch, DEVICE.sm_count, 1)[0]))
    words = ["--sizes", "1", "--widths", "1", "--out", str(tmp_path / "none.json")]
    assert tool.main(["rope", *words]) == 1
    assert "it is" in capsys.readouterr().err
    assert tool.main(["gemm_blocks", *words]) == 2
    assert "sizes of gemm_blocks cannot be drawn" in capsys.readouterr().err


def test_the_same_kernels_are_compiled_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what needs no GPU; of a product with few rows those of both algorithms."""
    asked: list[list[tuple[Problem, Config]]] = []

    class Noted(Nothing):
        def __init__(self, store: object, arch: object, wanted: list[tuple[Problem, Config]]) -> None:
            asked.append(wanted)

        def finish(self) -> tuple[int, int]:  # type: ignore[override]
            return 7, 0

    monkeypatch.setattr(tool, "Compilation", Noted)
    words = ["gated_gemm", "--sizes", "2", "--widths", "1", "--candidates", "3", "--seed", "4"]
    assert tool.main([*words, "--compile-for", "sm_90a"]) == 0
    assert "7 kernels for sm_90a, 0 could not" in capsys.readouterr().out
    assert tool.main([*words, "--out", str(tmp_path / "untuned.json")]) == 0
    assert asked[0] == asked[1] and len(asked[0]) == 6
    assert tool.main(words) == 2 and "--out is missing" in capsys.readouterr().err


def test_a_kernel_is_checked_by_the_rules_of_its_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those for few rows have other knobs."""
    few = parse_problem("gated_gemm 1x14336x4096 bf16")
    monkeypatch.setattr(tool, "drawn", lambda *given: [few])
    words = ["gated_gemm", "--candidates", "3", "--out", str(tmp_path / "untuned.json")]
    assert tool.main([*words, "--commit", "0" * 40]) == 0
    [row] = json.loads((tmp_path / "untuned.json").read_text())["rows"]
    assert "algorithm=few_rows" in row["default"] and row["tried"] == 3 and row["ratio"] == 0.8


def test_gemms_of_few_rows_are_tried_with_both_algorithms(tmp_path: Path) -> None:
    """And no problem has more rows than were asked for, which the file says."""
    path = tmp_path / "untuned.json"
    words = ["gemm", "--most-rows", "4", "--sizes", "3", "--widths", "3", "--candidates", "6"]
    assert tool.main([*words, "--out", str(path), "--commit", "0" * 40]) == 0
    found = json.loads(path.read_text())
    assert found["conditions"]["drawing"]["most_rows"] == 4 and len(found["rows"]) == 3
    for row in found["rows"]:
        assert parse_problem(row["problem"]).sizes["m"] <= 4
        few = [config for config in row["times"] if "algorithm=few_rows" in config]
        assert 2 <= len(few) <= 4


def test_knobs_that_decide_nothing_are_left_alone() -> None:
    """The default leads, whatever it has; a family that lacks a knob is asked without it."""
    gpu = DEVICE.arch, DEVICE.sm_count
    fixed: dict[str, Any] = {"vectors_per_thread": [2], "ctas_per_sm": [0]}
    default, *others = tool.asked(parse_problem("gated 8192x4096 bf16"), *gpu, 64, fixed)
    assert default["vectors_per_thread"] != 2 and len(others) == 6
    assert {(config["vectors_per_thread"], config["ctas_per_sm"]) for config in others} == {(2, 0)}
    turned = parse_problem("rope 8192x32x8x128x64x1 bf16")
    assert tool.asked(turned, *gpu, 64, fixed) == tool.asked(turned, *gpu, 64)


def test_one_knob_alone_may_vary() -> None:
    """The default with each valid value of it; a family without that knob has its default."""
    gpu = DEVICE.arch, DEVICE.sm_count
    default, *others = tool.asked(parse_problem("softmax 64x4096 bf16"), *gpu, 16, vary="pdl")
    assert default["pdl"] == "off"
    assert [str(c) for c in others] == [str(default.replace(pdl=value)) for value in ("early", "late")]
    assert len(tool.asked(parse_problem("gated_gemm 8x4096x4096 bf16"), *gpu, 16, vary="pdl")) == 1
