"""Laws of tools/bench_dispatch.py that need no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import H200

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.errors import StoreError
from cutegen.families.gemm.problem import Problem
from tools import bench_dispatch


def test_statements_take_turns_and_the_queue_is_emptied() -> None:
    """Every round runs each statement equally often, with a wait before each; the first round is dropped."""
    events: list[str] = []
    namespace: dict[str, Any] = {"f": lambda: events.append("f"), "g": lambda: events.append("g")}
    times = bench_dispatch.host_times(
        {"one": "f()", "two": "g()"}, namespace, lambda: events.append("|"), rounds=2, calls=3
    )
    assert "".join(events) == "|fff|ggg" * 3 + "|"
    assert [len(samples) for samples in times.values()] == [2, 2]


def test_results_name_what_ran_and_where(tmp_path: Path) -> None:
    """The file holds date, commit, device, versions and every statement; the summary is made of it."""
    times = {name: [2.0, 2.0, 3.0] for name in bench_dispatch.STATEMENTS} | {"torch": [4.0, 4.0, 6.0]}
    args = argparse.Namespace(rounds=3, calls=5, commit="")
    results = bench_dispatch.report(Problem(256, 256, 256), H200, times, [7.0, 8.0, 9.0], args)
    bench_dispatch.write_json(tmp_path / "new" / "out.json", results)
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert {"date", "commit", "device", "software", "session", "problem", "host_us"} <= set(found)
    assert found["torch_over_gemm"]["median"] == 2.0
    assert found["pinned_first_call_ms"]["median"] == 8.0
    lines = bench_dispatch.summary(found)
    assert "   2.00 us  [2.00, 3.00]  gemm(a, b, out=c)" in lines[1]
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"out\.json cannot be written"):
        bench_dispatch.write_json(tmp_path / "file" / "out.json", results)
