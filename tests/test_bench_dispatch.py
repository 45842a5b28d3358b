"""Laws of tools/bench_dispatch.py that need no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.errors import ResourceError
from tools import bench_dispatch
from tools.benchmark.turns import Turns


def test_statements_take_turns_and_the_queue_is_emptied() -> None:
    """Every round runs each statement equally often, with a wait before each; the first round is dropped."""
    events: list[str] = []
    namespace: dict[str, Any] = {"f": lambda: events.append("f"), "g": lambda: events.append("g")}
    times = bench_dispatch.host_times(
        {"one": "f()", "two": "g()"}, namespace, lambda: events.append("|"), rounds=2, calls=3
    )
    assert "".join(events) == "|fff|ggg" * 3 + "|"
    assert [len(samples) for samples in times.values()] == [2, 2]


def test_a_checkout_that_cannot_be_called_is_named(tmp_path: Path) -> None:
    """Here it has no cutegen of its own, so that another one would be timed in its name."""
    with pytest.raises(ResourceError, match=str(tmp_path)):
        Turns(tmp_path, tmp_path / "cache", (64, 64, 64))
