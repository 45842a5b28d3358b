"""The compile sweep: every kernel once, spread as asked, continued where it stopped."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from tools.benchmark.sweep_table import Sweep

TOOL = Path(__file__).resolve().parent.parent / "tools" / "sweep_compile.py"
SPACE = find_space("gemm", find_arch("sm_90a"))


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("sweep_compile", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep_compile"] = module
    spec.loader.exec_module(module)
    return module


def test_every_kernel_is_there_once(tool: Any) -> None:
    """Run-time knobs make no further kernels, except where a value is another kind of kernel."""
    problem = Problem(512, 512, 4096)
    tile = {"tile_shape_mn": [(64, 64)]}
    found = tool.classes(SPACE, [problem, problem.resized(256, 512, 4096)], tile)
    views = [SPACE.compile_view(config) for _, config in found]
    assert len(set(views)) == len(views)
    assert set(views) == {SPACE.compile_view(config) for config in SPACE.configs(problem, tile)}
    assert {view["split_k"] for view in views} == {1, 2}


def test_a_sample_is_spread_over_the_groups(tool: Any) -> None:
    """No group gets a second kernel before every group has one; the same seed chooses the same."""
    fixed = {"tile_shape_mn": [(64, 64), (64, 128), (128, 64)]}
    pairs = tool.classes(SPACE, [Problem(512, 512, 512)], fixed)
    chosen = tool.stratified(pairs, ["tile_shape_mn"], 7, 1)
    counts = Counter(config["tile_shape_mn"] for _, config in chosen)
    assert sorted(counts.values()) == [2, 2, 3]
    assert chosen == tool.stratified(pairs, ["tile_shape_mn"], 7, 1)
    assert len(tool.stratified(pairs, ["tile_shape_mn"], len(pairs), 1)) == len(pairs)


def test_a_covering_set_holds_every_two_values_that_meet(tool: Any) -> None:
    """Of compiled knobs, and of each with dtype and layout; a fraction of all kernels is enough for that."""
    space = find_space("gemm", find_arch("sm_100a"))
    fixed = {"mma_tiler_mn": [(128, 64), (256, 128), (64, 24)]}
    problems = tool.problems_of(["bf16", "tf32"], ["kk", "kn"], "", 1)
    pairs = tool.classes(space, list(problems), fixed)
    chosen = tool.pairwise(space, pairs, 1)

    def held(pairs: Any) -> set[object]:
        found: set[object] = set()
        for problem, config in pairs:
            named = [("", problem.ab_dtype, problem.layout), *space.compile_view(config).items()]
            found |= {(one, other) for one in named for other in named}
        return found

    assert held(chosen) == held(pairs)
    assert len(chosen) * 10 < len(pairs) and chosen == tool.pairwise(space, pairs, 1)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, ""),
        ({"outcome": "abort"}, "failed"),
        ({"spill_store_bytes": 4}, "spilled"),
        ({"spill_load_bytes": 4, "plain": False}, "spilled (fused)"),
        ({"smem_bytes": 2048}, "smem"),
        ({"registers": 256}, "registers"),
        ({"notes": ["C7514 serialized"]}, "noted"),
    ],
)
def test_what_is_wrong_gets_a_name(tool: Any, changes: dict[str, object], verdict: str) -> None:
    """Failures, spills, wrong predictions and notes of the assembler."""
    line = {
        "outcome": "ok",
        "plain": True,
        "notes": [],
        "smem_bytes": 1024,
        "predicted_smem_bytes": 1024,
        "registers": 255,
        "max_registers": 255,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
    }
    assert tool.verdict({**line, **changes}) == verdict


@pytest.mark.dsl
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL")
def test_a_sweep_continues_where_it_was_killed(tmp_path: Path) -> None:
    """Known results are not compiled again; a half-written line counts as not there."""
    out = tmp_path / "results.jsonl"
    command = [sys.executable, str(TOOL), "--out", str(out), "--sample", "2", "--set", "tile_shape_mn=64x8"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 chosen, 0 known" in first.stderr and "2 good" in first.stdout
    lines = out.read_text().splitlines(keepends=True)
    assert all(json.loads(line)["outcome"] == "ok" for line in lines)
    out.write_text(lines[0] + lines[1][:50])
    file = tmp_path / "summary.json"
    again = subprocess.run([*command, "--summary", str(file)], capture_output=True, text=True, check=True)
    assert "2 chosen, 1 known" in again.stderr and "2 good" in again.stdout
    found = json.loads(file.read_text())
    assert found["verdicts"] == {"good": 2} and found["kernels"]["chosen"] == 2 and not found["wrong"]
    assert found["compiled_now"]["kernels"] == 1 and found["compiled_now"]["per_s"] > 0
    assert found["values"]["tile_shape_mn"]["seen"] == 1 and found["asked"]["sample"] == 2


def test_families_are_swept_over_their_examples(tool: Any, tmp_path: Path) -> None:
    """Options count as knobs do, and a table says what came of each family."""
    args = tool.arguments(["--out", "unused", "--arch", "sm_103a", "--family", "gated,rope", "--pairs"])
    parts = [tool.choose(family, args) for family in ("gated", "rope")]
    for part in parts:
        found = list(part.by_id.values())
        assert 10 < len(found) == len(part.by_id) < part.total / 4
        every = tool.classes(part.space, part.problems, {})
        for option in ("dtype", "unaligned"):
            named = {str(getattr(problem, option)) for problem, _ in every}
            assert named == {str(getattr(case.problem, option)) for case in found}
        assert all(seen == of for seen, of in (one.values() for one in tool.values(part).values()))
    results = {
        name: {**tool.describe(case, tool.Failure("key", "abort", "signal 6", "log")), "outcome": "abort"}
        for part in parts
        for name, case in part.by_id.items()
    }
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(tool.summary(args, parts, results, tool.Pace(0, 0, 0.0, 0.0))))
    text = Sweep.load(file).render()
    assert f"| `rope` | {parts[1].total} | {len(parts[1].by_id)} |" in text and "failed" in text
    assert "sm_103a: example problems of each family" in text


def test_a_summary_names_what_is_wrong(tool: Any) -> None:
    """With the words behind it; how much of each knob was seen is counted; nothing compiled has no rate."""
    problem = Problem(512, 512, 512)
    cases = [
        tool.Case(f"{config}", problem, config, None, 1024, 255, True)
        for config in list(SPACE.configs(problem, {"tile_shape_mn": [(64, 64)]}))[:2]
    ]
    lines = [tool.describe(case, tool.Failure("key", "abort", "signal 6", "log")) for case in cases]
    args = tool.arguments(["--out", "unused", "--commit", "abc", "--set", "tile_shape_mn=64x64"])
    part = tool.Part(SPACE, [problem], 9, {case.id: case for case in cases})
    results = {case.id: line for case, line in zip(cases, lines, strict=True)}
    found = tool.summary(args, [part], results, tool.Pace(0, 0, 0.0, 0.0))
    assert found["verdicts"] == {"failed": 2} and found["commit"] == "abc"
    assert [one["detail"] for one in found["wrong"]] == ["abort: signal 6"] * 2
    assert found["wrong"][0]["config"] == str(cases[0].config)
    assert found["values"]["tile_shape_mn"] == {"seen": 1, "of": len(SPACE.domains["tile_shape_mn"])}
    every = list(SPACE.configs(Problem(4096, 4096, 4096), {"tile_shape_mn": [(64, 64)]}))
    kernels = len({SPACE.compile_view(config) for config in every})
    assert found["configs"] == [
        {"problem": "gemm 4096x4096x4096 bf16 kk", "legal": len(every), "kernels": kernels}
    ]
    assert len(every) > kernels > 10
    assert found["compiled_now"]["per_s"] is None and found["kernels"] == {"of_the_space": 9, "chosen": 2}
