"""The benchmark of first calls: its shapes, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import H200, FakeGpu  # noqa: E402

import cutegen  # noqa: E402
from cutegen.runtime.warming import Warming  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from tools import bench_first_call as tool  # noqa: E402


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
    assert "1 kernels compiled by calls" in tool.summary(results)
