"""What a sweep of the compiler came to: rendered into a document, with everything that was wrong named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutegen.errors import UsageError
from tools.benchmark.sweep_table import SWEEP, Sweep

WRONG = {"verdict": "spilled", "problem": "gemm 8x8x8 bf16 kk", "config": "64x8", "detail": "spills 8+8 B"}


def facts(**changes: Any) -> dict[str, Any]:
    """A results file of a sweep that went well."""
    found: dict[str, Any] = {
        "kind": SWEEP,
        "measured_at": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "software": {"cutegen": "0.1.0", "python": "3.11", "packages": {"nvidia-cutlass-dsl": "4.8.1"}},
        "machine": {"cpu": "Some Processor", "cores": 2},
        "arch": "sm_100a",
        "asked": {"dtype": "bf16", "layout": "kk", "pairs": True, "sample": 0},
        "configs": [{"problem": "gemm 4096x4096x4096 bf16 kk", "legal": 900, "kernels": 90}],
        "kernels": {"of_the_space": 300, "chosen": 70},
        "values": {"use_clc": {"seen": 2, "of": 2}, "mma_tiler_mn": {"seen": 8, "of": 9}},
        "verdicts": {"good": 70},
        "wrong": [],
        "compiled_now": {"kernels": 60, "workers": 2, "seconds": 30.1, "cpu_s": 54.01, "per_s": 1.9999},
    }
    return {**found, **changes}


def test_the_size_of_the_space_the_verdicts_and_the_pace_are_told() -> None:
    """A rate is rounded down, what a kernel costs up."""
    space, verdicts, pace = Sweep(facts()).summary()
    assert "900 legal configs, made of 90 kernels" in space
    assert "300 kernels a covering set of 70, with 10 of the 11 values of its knobs: **70 good**" in verdicts
    assert "60 of them in 30.1 s, 2 at a time on 2 cores (Some Processor)" in pace
    assert "**1.99 kernels a second**, 0.91 CPU seconds each" in pace


def test_what_is_wrong_is_named() -> None:
    """With its problem and config."""
    lines = Sweep(facts(verdicts={"good": 69, "spilled": 1}, wrong=[WRONG])).summary()
    assert "**69 good**, **1 spilled**" in lines[1]
    assert lines[2] == "- **spilled**: gemm 8x8x8 bf16 kk 64x8: spills 8+8 B"


@pytest.mark.parametrize("changes", [{"kind": "other"}, {"configs": None}, {"machine": {}}])
def test_a_file_of_another_kind_or_with_something_missing_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Before anything is rendered from it."""
    file = tmp_path / "file.json"
    file.write_text(json.dumps(facts(**changes)), encoding="utf-8")
    with pytest.raises(UsageError, match=r"not a file of tools/sweep_compile\.py"):
        Sweep.load(file)
