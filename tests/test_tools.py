"""What all tools that measure have in common."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from cutegen.errors import DeviceError
from tools import model_accuracy


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("bench_cold", "--shape 64x64x64 --out {out}"),
        ("bench_dispatch", "--out {out}"),
        ("bench_energy", "--out {out}"),
        ("bench_first_call", "--out {out}"),
        ("bench_gemm", "--shapes tools/shapes/gemm_dev.toml --out {out}"),
        ("bench_model", "--out {out}"),
        ("break_template", "--out {out}"),
        ("bringup", "--out {out}"),
        ("check_range", "--table none.json --out {out}"),
        ("profile_gemm", "--shape 64x64x64 --table none.json --out {out}"),
        ("walk_kernels", "--out {out}"),
    ],
)
def test_without_a_gpu_nothing_is_measured_or_written(
    tool: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 3 and one line."""

    def absent(index: int = 0) -> None:
        raise DeviceError("no NVIDIA driver on this machine")

    module, out = importlib.import_module(f"tools.{tool}"), tmp_path / "out.json"
    monkeypatch.setattr(module, "present_device", absent)
    assert module.main(words.format(out=out).split()) == 3
    assert "no NVIDIA driver on this machine" in capsys.readouterr().err and not out.exists()


def test_what_is_said_of_predictions_follows_from_the_results_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of the model: python tools/model_accuracy.py --write. A third of the shapes shows it."""
    assert model_accuracy.main(["--check", "--every", "3"]) == 0
    facts = json.loads(model_accuracy.FILE.read_text(encoding="utf-8"))
    assert facts["shapes"] == len(facts["rows"]) == 30
    changed = tmp_path / "accuracy.json"
    monkeypatch.setattr(model_accuracy, "FILE", changed)
    for wrong in ({"worst_rank": 1}, {"rows": facts["rows"][:-1]}):
        changed.write_text(json.dumps({**facts, **wrong}, indent=1) + "\n")
        assert model_accuracy.main(["--check", "--every", "30"]) == 1
