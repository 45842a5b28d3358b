"""What a sweep of the compiler came to: rendered into a document, with everything that was wrong named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cutegen.errors import UsageError
from tools import results_table
from tools.benchmark.sweep_table import SWEEP, Sweep

WRONG = {"verdict": "spilled", "problem": "gemm 8x8x8 bf16 tn", "config": "64x8", "detail": "spills 8+8 B"}


def facts(**changes: Any) -> dict[str, Any]:
    """A results file of a sweep that went well."""
    found: dict[str, Any] = {
        "kind": SWEEP,
        "measured_at": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "software": {"cutegen": "0.1.0", "python": "3.11", "packages": {"nvidia-cutlass-dsl": "4.8.1"}},
        "machine": {"cpu": "Some Processor", "cores": 2},
        "arch": "sm_100a",
        "asked": {"dtype": "bf16", "layout": "tn", "pairs": True, "sample": 0},
        "configs": [{"problem": "gemm 4096x4096x4096 bf16 tn", "legal": 900, "kernels": 90}],
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


def test_a_part_of_a_covering_set_is_called_a_sample() -> None:
    """It does not hold every two values."""
    asked = {**facts()["asked"], "sample": 70}
    assert "a sample of 70" in Sweep(facts(asked=asked)).summary()[1]


def test_what_is_wrong_is_named() -> None:
    """With its problem and config."""
    lines = Sweep(facts(verdicts={"good": 69, "spilled": 1}, wrong=[WRONG])).summary()
    assert "**69 good**, **1 spilled**" in lines[1]
    assert lines[2] == "- **spilled**: gemm 8x8x8 bf16 tn 64x8: spills 8+8 B"


def test_where_nothing_was_compiled_there_is_no_rate() -> None:
    """As when all results were known."""
    pace = {"kernels": 0, "workers": 0, "seconds": 0.0, "cpu_s": 0.0, "per_s": None}
    assert not any("a second" in line for line in Sweep(facts(compiled_now=pace)).summary())


def test_a_sweep_goes_into_its_place(tmp_path: Path) -> None:
    """And a document that holds another one is out of date."""
    file, document = tmp_path / "sweep_x.json", tmp_path / "D.md"
    file.write_text(json.dumps(facts()), encoding="utf-8")
    document.write_text("<!-- results: sweep_x -->\n<!-- end results: sweep_x -->\n", encoding="utf-8")
    words = [str(file), "--into", str(document)]
    assert results_table.main(words) == 0
    assert "commit 0123456789ab; 2026-01-02" in document.read_text(encoding="utf-8")
    assert results_table.main([*words, "--check"]) == 0
    file.write_text(json.dumps(facts(commit="other")), encoding="utf-8")
    assert results_table.main([*words, "--check"]) == 1


@pytest.mark.parametrize("changes", [{"kind": "other"}, {"configs": None}, {"machine": {}}])
def test_a_file_of_another_kind_or_with_something_missing_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Before anything is rendered from it."""
    file = tmp_path / "file.json"
    file.write_text(json.dumps(facts(**changes)), encoding="utf-8")
    with pytest.raises(UsageError, match=r"not a file of tools/sweep_compile\.py"):
        Sweep.load(file)
