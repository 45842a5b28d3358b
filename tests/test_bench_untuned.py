"""Laws of tools/bench_untuned.py that need no GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from fake_kernels import H200

from cutegen.cli.exit_codes import EXIT_ENVIRONMENT
from cutegen.errors import DeviceError, UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.device import Device
from tools import bench_untuned
from tools.benchmark.model_products import KINDS, draw, weights
from tools.benchmark.untuned_table import UNTUNED, UntunedResults
from tools.results_table import main as render


def test_a_draw_is_the_same_for_its_seed_and_even_over_the_doublings() -> None:
    """And holds no product twice."""
    problems = draw("bf16 kk", 200, 5)
    assert problems == draw("bf16 kk", 200, 5) != draw("bf16 kk", 200, 6)
    assert len(set(problems)) == 200 and {(p.n, p.k) for p in problems} <= set(weights())
    assert 70 < sum(p.m <= 90 for p in problems) < 130  # 90 is half of the doublings of 1 to 8192
    assert max(p.m for p in problems) <= 8192 and len({p.m for p in problems if p.m > 64}) > 80


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_of_its_dtype_layout_and_epilogue(kind: str) -> None:
    """Whatever the sizes."""
    for problem in draw(kind, 30, 1):
        words = str(problem).split()
        assert words[0] == "gemm" and " ".join(words[2:]) == KINDS[kind]


def _row(ratio: float, m: int, *left: str, kind: str = "bf16 kk") -> dict[str, object]:
    return {"kind": kind, "problem": str(Problem(m, 512, 512)), "m": m, "ratio": ratio, "left_to_torch": left}


def _file(path: Path, *rows: dict[str, object]) -> Path:
    facts = {
        "kind": UNTUNED,
        "measured_at": "2026-11-22T00:00:00+00:00",
        "commit": "0" * 40,
        "gpu": "NVIDIA H200",
        "machine": {"driver": "1.2"},
        "conditions": {"drawing": {"seed": 3, "drawn": 9}, "policy": {"context": "behind"}},
        "rows": rows,
        "failures": [],
    }
    path.write_text(json.dumps(facts))
    return path


def test_what_is_left_to_pytorch_counts_as_one(tmp_path: Path) -> None:
    """Under the settings that leave it, and only there; nothing is rounded in favour of cutegen."""
    path = _file(
        tmp_path / "untuned.json",
        _row(0.5, 4, "expected", "torch"),
        _row(0.9, 40, "torch"),
        _row(1.2999, 4000),
    )
    found = UntunedResults.load(path)
    assert [line.split("smallest ")[1] for line in found.summary()] == ["0.500", "0.900", "1.000"]
    text = found.render()
    rows = {row.split(" | ")[0].lstrip("| "): row for row in text.splitlines() if row.startswith("| m ")}
    assert "| expected | 1 | 1 | 1.000 | 1.000 |" in rows["m 1 to 8"]
    assert "| expected | 1 | 0 | 0.900 | 0.900 | 0.0 %" in rows["m 33 to 64"]
    assert "| expected | 1 | 0 | 1.299 |" in rows["m 2049 to 8192"] and "seed 3" in text
    document = tmp_path / "doc.md"
    document.write_text("<!-- results: untuned -->\n<!-- end results: untuned -->\n")
    assert render([str(path), "--into", str(document)]) == 0 and "m 33 to 64" in document.read_text()


def test_another_file_is_refused(tmp_path: Path) -> None:
    """By the name of the tool that writes the right ones."""
    path = tmp_path / "other.json"
    path.write_text('{"kind": "untuned products", "rows": [{}]}')
    with pytest.raises(UsageError, match=r"not a file of tools/bench_untuned\.py"):
        UntunedResults.load(path)


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, and nothing is written."""

    def absent() -> Device:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr(bench_untuned, "present_device", absent)
    assert bench_untuned.main(["--out", str(tmp_path / "out.json")]) == EXIT_ENVIRONMENT
    assert capsys.readouterr().err == "cutegen: error: no NVIDIA driver on this machine\n"
    assert not list(tmp_path.iterdir())


def test_every_answer_knows_the_settings_that_leave_it_to_pytorch() -> None:
    """The strict setting leaves whatever the default one leaves."""
    found = bench_untuned.asked(argparse.Namespace(count=40, others=5, seed=2), H200.arch, H200.sm_count)
    assert len(found) == 40 + 5 * (len(KINDS) - 1) and len({one.problem for one in found}) == len(found)
    assert all("torch" in one.left_to_torch for one in found if "expected" in one.left_to_torch)
    assert any(one.left_to_torch for one in found) and not all(one.left_to_torch for one in found)
