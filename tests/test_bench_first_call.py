"""The benchmark of first calls: its shapes, and what it writes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import H200, FakeGpu  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import ResourceError, UsageError  # noqa: E402
from cutegen.runtime.warming import Warming  # noqa: E402
from cutegen.runtime.workspace import Workspaces  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from tools import bench_first_call as tool  # noqa: E402
from tools import bench_first_call_host as host_tool  # noqa: E402
from tools.benchmark import host_child  # noqa: E402
from tools.benchmark.first_call_table import FIRST_CALLS, FirstCalls, HostCalls  # noqa: E402
from tools.benchmark.stopwatch import COLLECTOR, Stopwatch  # noqa: E402


def test_shapes_are_different_and_valid() -> None:
    """The same for the same seed; few and many rows; operands that kernels take."""
    shapes = tool.random_shapes(300, 5)
    assert shapes == tool.random_shapes(300, 5) != tool.random_shapes(300, 6)
    assert len(set(shapes)) == 300
    rows = [m for m, _, _ in shapes]
    assert min(rows) < 4 and max(rows) > 4000 and any(m % 2 for m in rows)
    assert all(n % 64 == k % 64 == 0 < min(n, k) for _, n, k in shapes)


def test_what_calls_compile_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm-up that warms nothing shows; the times are of the calls that were made."""
    gpu = FakeGpu(tmp_path / "cache")
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    monkeypatch.setattr(tool, "Dispatcher", lambda kernels: gpu.dispatcher(build="background"))
    monkeypatch.setattr(cutegen, "warmup", lambda workers: Warming(()), raising=False)
    monkeypatch.setattr(tool, "_calls", lambda torch, gemm, shape: (float(shape[0]), 1.0))
    monkeypatch.setattr(
        tool, "_parts", lambda torch, gemm, shapes: [(shape, {"launch": 2.0}) for shape in shapes]
    )
    monkeypatch.setattr(tool, "_firsts_of_torch", lambda torch, shapes: [3.0] * len(shapes))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    keys = [("a",), ("a", "b")]
    monkeypatch.setattr(tool.Store, "keys", lambda self, arch: keys.pop(0))
    monkeypatch.setattr(tool, "session_facts", lambda device: {})
    monkeypatch.setattr(tool, "software", dict)
    try:
        results: Any = tool.measure(tool.parse(["--shapes", "20"]), H200, gpu.store)
    finally:
        cutegen.use(before)
    rows = sorted(m for m, _, _ in tool.random_shapes(25, 0)[5:])
    assert results["compiled_by_calls"] == 1 and not results["limit_kept"]
    assert results["first_us"]["most"] == rows[-1] and results["second_us"]["median"] == 1.0
    assert sum(each["shapes"] for each in results["by_answer"].values()) == 20
    assert set(results["warm_parts_s"]) - {COLLECTOR} == {"begin"} and results["compiled_by_warm_up"] == 0
    assert results["parts_us"] == {"launch": {"median": 2.0, "p95": 2.0, "most": 2.0}}
    assert "1 kernels compiled by calls" in tool.summary(results)


def test_results_are_rendered(tmp_path: Path) -> None:
    """Medians, limits and parts are in the document; a file that lacks something is refused."""
    spread = {"median": 11.11, "p95": 22.0, "most": 33.0}
    facts: dict[str, Any] = {
        "kind": tool.KIND,
        "shapes": 20,
        "kernels": 103,
        "compiled_by_calls": 0,
        "limit_us": 300.0,
        "choice_limit_us": 100.0,
        "by_answer": {"kernel": {"shapes": 18, **spread}, "torch": {"shapes": 2, **spread}},
        "parts_us": {"choice": {**spread, "median": 44.0}, "launch": spread, "collector": spread},
        "session": {"cpu": "a CPU", "cores": 16},
        "device": {"name": "NVIDIA H200"},
        "commit": "0123456789abcdef",
        "date": "2026-11-23",
        **dict.fromkeys(("first_us", "second_us", "choice_us", "torch_mm_first_us"), spread),
    }
    path = tmp_path / "first.json"
    path.write_text(json.dumps(facts), encoding="utf-8")
    text = FirstCalls.load(path).render()
    assert tool.KIND == FIRST_CALLS and "median **12 us**" in text  # never rounded in our favour
    assert "warmup" not in text
    facts |= {"warm_s": 1.061, "compiled_by_warm_up": 0, "warm_parts_s": {"load": 0.301, "launch": 0.25}}
    path.write_text(json.dumps(facts), encoding="utf-8")
    said = "0 kernels compiled: **1.07 s**: loading libraries 0.31, first launches 0.25"
    assert said in FirstCalls.load(path).render()
    assert "| part: lookup and choice | 44.0 | 22.0 | 33.0 |" in text and "collector" not in text
    path.write_text(json.dumps({**facts, "parts_us": None}), encoding="utf-8")
    with pytest.raises(UsageError, match="bench_first_call"):
        FirstCalls.load(path)


ROUNDS: list[dict[str, Any]] = [
    {"first_us": [9.0, 30.01, 7.0], "choice_us": [1.0, 2.0, 3.0], "later_us": 2.0, "kernels": 5},
    {"first_us": [8.0, 40.0, 70.0], "choice_us": [3.0, 2.0, 1.0], "later_us": 2.115, "kernels": 5},
]


@pytest.mark.parametrize("words", [[], ["--against", "."]])
def test_of_each_shape_the_shortest_round_counts(words: list[str], tmp_path: Path) -> None:
    """In each checkout; the document rounds ours up and the other down, and says that there was no GPU."""
    args = host_tool.parse(["--shapes", "3", "--commit", "a" * 40, "--against-commit", "b" * 40, *words])
    rounds = {"ours": ROUNDS, **({"against": ROUNDS} if words else {})}
    results: Any = host_tool.report(args, dict.fromkeys(rounds, Path()), rounds)
    assert results["first_us"] == {"median": 8.0, "p95": 30.0, "most": 30.0}
    assert results["choice_us"]["median"] == 1.0 and results["later_us"] == 2.0 and results["kernels"] == 5
    assert "host only, no GPU" in host_tool.summary(results)
    path = tmp_path / "host.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    text = HostCalls.load(path).render()
    assert "median **8 us**" in text and "no GPU" in text and ("(was 8)" in text) == bool(words)
    assert text.count("| first call") == len(rounds)
    path.write_text(json.dumps({**results, "first_us": None}), encoding="utf-8")
    with pytest.raises(UsageError, match="bench_first_call_host"):
        HostCalls.load(path)


def test_the_host_alone_is_measured_without_a_gpu(tmp_path: Path) -> None:
    """By a process that has all kernels of untuned products; one that imports another checkout is refused."""
    found = host_tool.measure({"ours": host_tool.ROOT}, shapes=3, seed=0, rounds=1)["ours"]
    assert len(found) == 1 and found[0]["kernels"] > 50
    assert len(found[0]["first_us"]) == len(found[0]["choice_us"]) == 3
    assert min(*found[0]["first_us"], *found[0]["choice_us"], found[0]["later_us"]) > 0
    assert host_child.random_shapes(3, 0) == tool.random_shapes(3, 0)
    with pytest.raises(ResourceError, match="in place of the checkout"):
        host_tool.measure({"other": tmp_path}, shapes=3, seed=0, rounds=1)


def test_parts_of_a_call_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a part of its own counts once; a plan that is there already has none but the launch."""
    gpu = FakeGpu(tmp_path / "cache")
    monkeypatch.setattr(tool, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    workspaces = Workspaces(lambda _, elements, zeroed: torch.zeros(elements), lambda _: 0, lambda _: False)
    cutegen.gemm  # noqa: B018  prepares the operators
    monkeypatch.setattr(ops, "_workspaces", workspaces)
    before, describe = ops.default_dispatcher(), tool.gemm_plan.describe
    cutegen.use(gpu.dispatcher(fallback="expected"))
    try:
        parts = tool._parts(torch, cutegen.gemm, [(8, 64, 128), (300, 192, 256), (8, 64, 128)])
        slowest = tool._slowest(parts)
    finally:
        cutegen.use(before)
    assert tool.gemm_plan.describe is describe
    for _, each in parts[:2]:
        assert {"operands", "choice", "arguments", "plan", "launch"} <= set(each)
    assert set(parts[2][1]) == {"launch"}
    assert len(slowest) == 3 and {each["by"] for each in slowest} <= {"kernel", "torch"}


def test_a_stopwatch_counts_each_moment_once() -> None:
    """What runs inside a step is not counted again; errors end a step too; functions are put back."""

    class Owner:
        @staticmethod
        def outer(inner: Any) -> Any:
            return inner()

    before = Owner.outer
    with Stopwatch().watching({"outer": (Owner, "outer")}) as watch:
        inner = watch.timed(lambda: time.sleep(0.02), "inner")
        began = time.perf_counter()
        Owner.outer(inner)
        whole = (time.perf_counter() - began) * 1e6
        found = watch.take()
        with pytest.raises(ZeroDivisionError):
            Owner.outer(lambda: 1 / 0)
        after = watch.take()
    assert Owner.outer is before
    assert set(found) - {COLLECTOR} == {"outer", "inner"} and found["inner"] >= 20_000
    assert sum(found.values()) <= whole
    assert set(after) - {COLLECTOR} == {"outer"} and watch.take() == {}
