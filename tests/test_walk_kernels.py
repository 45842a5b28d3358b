"""The walk over kernels: which dtypes it takes, and how it ends without the right GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from fake_tuning import FakeCompiler
from patient_bench import PatientBench

from cutegen.arch import find_arch
from cutegen.families.registry import find_space
from tools import walk_kernels


def test_a_target_is_walked_with_the_dtypes_that_it_multiplies() -> None:
    """tf32 is for Blackwell, int8 for all but B300."""
    hopper, blackwell = (find_space("gemm", find_arch(arch)) for arch in ("sm_90a", "sm_103a"))
    assert walk_kernels.dtypes_of(hopper) == ["bf16", "fp16", "e4m3", "e5m2", "int8"]
    assert walk_kernels.dtypes_of(blackwell) == ["bf16", "fp16", "e4m3", "e5m2", "tf32"]


class FakeBuilder:
    """Compiles nothing, and is interrupted after one kernel of fp16."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __enter__(self) -> FakeBuilder:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def build(self, sources: list[Any]) -> Any:
        compiler = FakeCompiler(self._store, lambda config: "ok", batch=1)
        compiler.submit(sources)
        for number, _ in enumerate(sources):
            if "fp16 operands" in sources[0].text and number == 1:
                raise KeyboardInterrupt
            yield from compiler.poll()


def test_what_was_walked_is_in_the_file_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during the second dtype: the first one is there, whole, and the exit code is 130."""
    monkeypatch.setattr(walk_kernels, "present_device", lambda: fake_engine.DEVICE)
    monkeypatch.setattr(walk_kernels, "Builder", FakeBuilder)
    monkeypatch.setattr(walk_kernels, "Bench", PatientBench)
    file = tmp_path / "walk.json"
    words = ["--dtypes", "bf16,fp16", "--pairs", "6", "--out", str(file), "--commit", "abc"]
    assert walk_kernels.main(words) == 130
    found = json.loads(file.read_text())
    assert found["outcomes"] == {"bf16": {"ok": 6, "same_bits": 6}} and len(found["pairs"]) == 6
    assert all(" bf16 " in pair["problem"] and pair["outcome"] == "ok" for pair in found["pairs"])
    assert "bf16: 6 pairs: {'ok': 6}" in capsys.readouterr().out
