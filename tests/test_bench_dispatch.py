"""Laws of tools/bench_dispatch.py that need no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import H200, FakeGpu, operators_ask

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.errors import ResourceError
from cutegen.families.gemm.problem import Problem
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


def test_modes_are_timed_beside_calls_without_them() -> None:
    """In every round, each statement is called alike without and with it, behind calls that settle it."""
    events: list[str] = []

    @contextmanager
    def mode() -> Iterator[None]:
        events.append("(")
        yield
        events.append(")")

    def call(*_: object, **__: object) -> None:
        events.append(".")

    namespace = dict.fromkeys(("gemm", "linear"), call) | dict.fromkeys(("a", "b", "c", "w", "weight"))
    found = bench_dispatch.added_times(mode, namespace, lambda: events.append("|"), rounds=2, calls=2)
    assert "".join(events) == "...|..(...|..)" * 2 * len(bench_dispatch.IN_MODES) + "|"
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys(
        bench_dispatch.IN_MODES, 2
    )


@pytest.mark.parametrize("mode", [bench_dispatch.recording, bench_dispatch.freezing])
def test_the_modes_take_the_calls_that_are_timed(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels on the CPU; afterwards the dispatcher of before answers."""
    torch = pytest.importorskip("torch")
    import cutegen
    from cutegen.torch_ops.gemm import default_dispatcher

    a, w = (torch.rand(64, 64).to(torch.bfloat16) for _ in range(2))
    names = {
        "gemm": cutegen.gemm,
        "linear": cutegen.linear,
        "a": a,
        "b": w.t(),
        "w": w,
        "c": torch.empty_like(a),
    }
    with operators_ask(FakeGpu(tmp_path), monkeypatch):
        before = default_dispatcher()
        weight = torch.nn.Parameter(w)
        found = bench_dispatch.added_times(mode, {**names, "weight": weight}, lambda: None, rounds=2, calls=2)
        assert default_dispatcher() is before
    assert {len(samples) for samples in found.values()} == {2}


def test_the_report_says_what_gradients_modes_and_declared_kernels_cost() -> None:
    """Of cutegen's layer over torch's, with gradients; of the slowest call in a mode; of a user's kernel."""
    times = {name: [2.0, 2.0, 2.0] for name in bench_dispatch.STATEMENTS}
    times.update(linear_grad=[3.0, 3.0, 3.0], torch_linear_grad=[4.0, 4.0, 4.0], declared=[2.25, 2.5, 3.0])
    times.update(step=[6.0, 6.0, 6.0])
    added = {
        "recording": {"gemm": [1.0] * 3, "linear": [0.5] * 3, "linear_grad": [1.5] * 3},
        "freezing": {"gemm": [0.25] * 3, "linear": [0.0] * 3, "linear_grad": [-0.5] * 3},
    }
    args = argparse.Namespace(commit="0" * 40, rounds=3, calls=200)
    found: Any = bench_dispatch.report(Problem(256, 256, 256), H200, times, added, [9.0], args)
    assert found["linear_grad_over_torch"]["median"] == 0.75
    assert found["step_over_torch"]["median"] == 3.0
    assert found["declared_adds_us"] == {"median": 0.5, "interval": [0.25, 1.0]}
    assert {name: each["median"] for name, each in found["recording_adds_us"].items()} == {
        "gemm": 1.0,
        "linear": 0.5,
        "linear_grad": 1.5,
    }
    lines = bench_dispatch.summary(found)
    assert "recording adds at most 1.50 us to a call" in lines
    assert "freezing adds at most 0.25 us to a call" in lines
    assert "a declared kernel takes 0.50 us [0.25, 1.00] more than cutegen.gemm" in lines
    assert "linear with gradients, cutegen / torch: 0.750" in lines


def test_a_checkout_that_cannot_be_called_is_named(tmp_path: Path) -> None:
    """Here it has no cutegen of its own, so that another one would be timed in its name."""
    turns = Turns(tmp_path, tmp_path / "cache", (64, 64, 64))
    with turns, pytest.raises(ResourceError, match=str(tmp_path)):
        turns.wait()


def test_turns_alone_measure_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the calls of two checkouts; without another checkout there is none to take turns with."""
    monkeypatch.setattr(bench_dispatch, "present_device", lambda: H200)
    monkeypatch.setattr(bench_dispatch, "session_facts", lambda device: {})
    taken = {name: ([2.0] * 3, [4.0] * 3) for name in bench_dispatch.COMMON}
    monkeypatch.setattr(bench_dispatch, "take_turns", lambda *arguments: taken)
    out = tmp_path / "turns.json"
    words = ["--turns-only", "--commit", "a" * 40, "--against-commit", "b" * 40, "--out", str(out)]
    assert bench_dispatch.main([*words, "--against", str(tmp_path)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["against"]["statements"]["gemm"]["ratio"] == 0.5 and "host_us" not in found
    assert bench_dispatch.main(words) == 2
