"""The cold-start benchmark: what it runs, what it keeps, and how a command that fails shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from tools import bench_cold, results_table
from tools.bench_cold import Timed

ARCH = find_arch("sm_90a")
RESULT = {
    "problem": "gemm 512x512x512 bf16 kk",
    "winner": {},
    "candidates": [{"chosen": False, "trial": "a"}, {"chosen": True, "trial": "b"}],
}
PRINTED = json.dumps({"schema": 1, "results": [RESULT]})


def arguments(tmp_path: Path, *more: str) -> list[str]:
    return ["--shape", "512x512x512", "--arch", "sm_90a", "--out", str(tmp_path / "cold.json"), *more]


def test_the_command_is_one_that_the_tuner_understands(tmp_path: Path) -> None:
    """An argument that the tuner does not know would end in bad usage."""
    from cutegen.cli import tune as cli_tune

    args = bench_cold.parse(arguments(tmp_path, "--workers", "3", "--effort", "quick"))
    words = bench_cold.tune_command(args, ARCH, tmp_path)
    assert words[:3] == [sys.executable, "-m", "cutegen.tune"]
    parsed = cli_tune._parser().parse_args(words[3:])
    assert (parsed.family, parsed.shape, parsed.cache_dir) == ("gemm", ["512x512x512"], tmp_path)
    assert parsed.effort == "quick"


def test_a_command_that_fails_keeps_what_it_said() -> None:
    """One that works does not."""
    bad = bench_cold.timed([sys.executable, "-c", "import sys; print('out'); sys.exit('reason')"], {})
    assert bad.code == 1 and "reason" in str(bad.to_json()["output"]) and "out" in bad.output
    good = bench_cold.timed([sys.executable, "-c", "print('fine')"], {})
    assert good.code == 0 and good.output == "fine\n" and "output" not in good.to_json()


def test_kernels_for_the_rate_are_different_ones() -> None:
    """Compiling one twice would take nothing."""
    sources = bench_cold.some_sources(Problem(512, 512, 512), ARCH, None, 6)
    assert 1 < len({source.text for source in sources}) == len(sources) <= 6


def test_what_is_imported_is_byte_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip does; what cannot be compiled is told, and what is not installed left out."""
    for name, text in (("good_one", "x = 1"), ("bad_one", "x = = 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert bench_cold.byte_compile(["good_one", "bad_one", "no_such"]) == {"good_one": True, "bad_one": False}
    assert list((tmp_path / "good_one" / "__pycache__").glob("*.pyc"))
    assert "good_one" not in sys.modules


def test_files_are_read_by_a_process_that_imports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any process that is timed; one that fails is no measurement."""
    compile(bench_cold._FIRST_IMPORTS, "first imports", "exec")
    monkeypatch.setattr(bench_cold, "_FIRST_IMPORTS", "import time; time.sleep(0.05)")
    assert bench_cold.first_imports() >= 0.05
    monkeypatch.setattr(bench_cold, "_FIRST_IMPORTS", "import no_such_module")
    with pytest.raises(subprocess.CalledProcessError):
        bench_cold.first_imports()


def test_importing_is_measured_in_new_processes() -> None:
    """No GPU library comes along."""
    found = bench_cold.time_imports()
    assert found["gpu_libraries"] == []
    assert 0 < found["median_s"] <= found["worst_s"]  # type: ignore[operator]


@pytest.mark.parametrize(("code", "status", "limit"), [(0, 0, 20.0), (3, 1, 20.0), (0, 0, 6.0)])
def test_the_file_holds_everything_and_failures_show(
    code: int,
    status: int,
    limit: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seconds, exit codes, versions, commit and rates; the exit code tells of a failed command."""
    rate = {"kernels": 8, "failed": 0, "workers": 2, "seconds": 4.0, "per_s": 2.0, "per_s_once_started": 3.0}
    runs = (Timed(19.5, code, "the reason"), Timed(2.5, code, "the reason"), bench_cold.what_won(PRINTED))
    monkeypatch.setattr(bench_cold, "time_tuning", lambda args, arch: runs)
    monkeypatch.setattr(bench_cold, "time_compiling", lambda *rest: rate)
    monkeypatch.setattr(bench_cold, "_IMPORTS", 1)
    monkeypatch.setattr(bench_cold, "_PACKAGES", ("jinja2",))
    monkeypatch.setattr(bench_cold, "_FIRST_IMPORTS", "import json")
    effort = "quick" if limit == bench_cold.QUICK_COLD_S else "standard"
    assert bench_cold.main(arguments(tmp_path, "--commit", "abc", "--effort", effort)) == status
    document = json.loads((tmp_path / "cold.json").read_text())
    assert (document["commit"], document["target"], document["gpu"]) == ("abc", "sm_90a", "")
    assert (document["effort"], document["limits"]["cold_s"]) == (effort, limit)
    assert document["cold"]["seconds"] == 19.5 and document["again"]["exit_code"] == code
    assert document["compile"] == rate and document["software"]["cutegen"]
    assert list(document["within"]) == ["import_s"]
    out = capsys.readouterr().out
    assert "cold cache: 19.5 s" in out and ("the reason" in out) == (code != 0)
    assert results_table.main([str(tmp_path / "cold.json")]) == 0
    shown = capsys.readouterr().out
    assert f"{effort}: **19.5 s** with an empty cache, 2.5 s again" in shown
    assert f"| the command, with an empty cache | 19.500 | {limit:g} |" in shown
    assert "8 kernels, 2 at a time: 4.0 s; 3.0 a second once the first is there." in shown
    assert "cores, modules byte-compiled, files of PyTorch and the DSL read before (in " in shown
    assert "s); commit abc; " in shown
