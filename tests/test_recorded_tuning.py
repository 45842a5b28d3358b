"""``python -m cutegen.tune --recorded``: order, resumption, coverage, and what it refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from fake_engine import DEVICE
from fake_tuning import SMALL, TOOLCHAIN, FakeBench, FakeCompiler, quick_search  # noqa: F401

import cutegen.cli.tune
from cutegen.arch import find_arch
from cutegen.build.store import Store
from cutegen.cli.tune_recorded import varied
from cutegen.families.registry import parse_problem
from cutegen.families.shapes import NamedRange
from cutegen.records.recorded_calls import Call, append_calls
from cutegen.tuning import AutoTuner
from cutegen.tuning.backends import Backends
from cutegen.tuning.coverage import weigh

SMALL_GEMM, LARGE_GEMM = "gemm 256x256x256 bf16 kk", "gemm 4096x4096x4096 bf16 kk"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """A pretended GPU, whose bench is returned, and which a test may stop after some steps."""
    bench = FakeBench()
    tuner = partial(AutoTuner, backends=Backends(lambda: FakeCompiler(Store(tmp_path)), lambda: bench))

    def make(*args: object, **options: object) -> AutoTuner:
        return tuner(*args, **{**options, "toolchain": TOOLCHAIN, "effort": SMALL})

    monkeypatch.setattr(cutegen.cli.tune, "AutoTuner", make)
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: DEVICE)
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path))
    return bench


def recording(path: Path, counts: dict[str, int], how: str = "default", gpu: str = DEVICE.name) -> Path:
    calls = {Call(parse_problem(line), "forward", how, "cutegen"): n for line, n in counts.items()}
    append_calls(path, {"gpu": gpu}, calls)
    return path


def tune(*words: str | Path) -> int:
    return cutegen.cli.tune.main(["--quiet", *map(str, words)])


def test_problems_of_most_predicted_time_come_first(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of ranks add up; many short calls weigh more than a long one, few do not."""
    path = tmp_path / "model.jsonl"
    recording(path.with_name("model.rank0.jsonl"), {SMALL_GEMM: 2, LARGE_GEMM: 1})
    recording(path.with_name("model.rank1.jsonl"), {SMALL_GEMM: 3})
    assert tune("--recorded", path) == 0
    assert list(map(str, gpu.opened)) == [LARGE_GEMM, SMALL_GEMM]
    out = capsys.readouterr().out
    assert "answered exactly when recorded: 0% of the calls" in out
    before, after = (line for line in out.splitlines() if line.startswith("answered exactly by the table"))
    assert "0 of 2 problems, 0% of the calls" in before
    assert re.search(r"; tuning the others is expected to save [0-9.]+ us$", before)
    assert after.endswith("2 of 2 problems, 100% of the calls, 100% of the predicted time")
    [row] = [line for line in out.splitlines() if line.split()[:1] == ["5"]]
    assert SMALL_GEMM in row
    gpu.opened.clear()
    recording(path, {SMALL_GEMM: 10**6})
    assert tune("--recorded", path, "--again") == 0
    assert list(map(str, gpu.opened)) == [SMALL_GEMM, LARGE_GEMM]


def test_a_killed_run_continues_and_a_third_measures_nothing(gpu: FakeBench, tmp_path: Path) -> None:
    """What was finished before the interruption is not opened again."""
    path = recording(tmp_path / "model.jsonl", {SMALL_GEMM: 1, LARGE_GEMM: 1, "gemm 64x512x512 bf16 kn": 1})
    assert tune("--recorded", path) == 0
    steps, checked = gpu.steps, Counter(gpu.checked)
    assert checked.total() > 3
    for name in ("trials.db", "tables"):
        (tmp_path / name).rename(tmp_path / f"{name}.old")
    gpu.checked.clear()
    gpu.timed.clear()
    gpu.opened.clear()
    gpu.steps, gpu.stop_after = 0, steps // 2
    assert tune("--recorded", path) == 130
    timed = {name for _, names in gpu.timed for name in names}
    gpu.stop_after = None
    assert tune("--recorded", path) == 0
    assert not timed & (Counter(gpu.checked) - checked).keys(), "only what was not timed yet is checked twice"
    done = gpu.steps
    assert tune("--recorded", path) == 0
    assert gpu.steps == done


def test_coverage_counts_calls_and_time(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In JSON as well; a named family restricts the recording, and configs of the caller's are left out."""
    path = recording(tmp_path / "model.jsonl", {LARGE_GEMM: 1, "rmsnorm 8x4096 bf16": 7})
    recording(path, {SMALL_GEMM: 3}, how="exact", gpu="Another GPU")
    recording(path, {"gemm 128x128x128 bf16 kk": 5}, how="given")
    assert tune("gemm", "--recorded", path, "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert [result["problem"] for result in about["results"]] == [LARGE_GEMM, SMALL_GEMM]
    found = about["recorded"]
    assert (found["problems"], found["calls"], found["answered_calls"], found["answered_time"]) == (
        2,
        4,
        1,
        1,
    )
    assert "'Another GPU'" in found["notes"][0]


def test_without_a_gpu_a_recording_is_compiled(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "model.jsonl", {SMALL_GEMM: 1, LARGE_GEMM: 1})
    assert tune("--recorded", path, "--arch", "sm_90a") == 0
    out = capsys.readouterr().out
    assert out.index(f"{LARGE_GEMM}\n") < out.index(f"{SMALL_GEMM}\n") and not gpu.opened
    assert "answered exactly when recorded" in out and "by the table" not in out


def test_bad_recordings_and_arguments_are_named(
    gpu: FakeBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "model.jsonl", {SMALL_GEMM: 1})
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"cutegen_recording": 7}\n')
    for words, said in (
        (["--shape", "8x8x8"], "no FAMILY given; known: "),
        (["--recorded", path, "--shape", "8x8x8"], "--recorded says what to tune"),
        (["--recorded", path, empty, "--dtype", "fp16"], "empty.jsonl state it for each shape"),
        (["--recorded", tmp_path / "none.jsonl"], "none.jsonl does not exist"),
        (["--recorded", empty], "begins a section of version 7"),
        (["rmsnorm", "--recorded", path], "no call to tune for"),
    ):
        assert tune(*words) == 2
        assert said in capsys.readouterr().err
    assert not gpu.opened


def test_what_has_no_model_is_weighed_and_what_cannot_run_comes_last() -> None:
    lines = ["rmsnorm 8x4096 bf16", "rmsnorm 8192x4096 bf16", "gemm 64x64x64 tf32 kk"]
    arch = find_arch("sm_90a")
    found = weigh({parse_problem(line): 1 for line in lines}, arch, 132)
    assert [str(weight.problem) for weight in found] == [lines[1], lines[0], lines[2]]
    assert found[0].us > 10 * found[1].us > 0 and found[2].us == 0


def test_problems_that_differ_in_rows_are_a_range() -> None:
    """From four on; k of a weight's gradient too, and not k of other layers. Others stay as they are."""
    lines = [f"gemm {m}x512x256 bf16 kk bias=n" for m in (7, 64, 300, 2048)]
    lines += [f"gemm {m}x512x256 bf16 kk" for m in (1, 8, 64)]
    lines += [f"gemm 512x256x{k} bf16 mn" for k in (64, 128, 512, 4096)]
    lines += [f"gemm 64x512x{k} bf16 kk" for k in (64, 128, 512, 1024)]
    lines += [f"rmsnorm {m}x4096 bf16" for m in (1, 2, 3, 65536)]
    found = varied(weigh({parse_problem(line): 1 for line in lines}, find_arch("sm_90a"), 132))
    ranges = {"gemm 7..2048x512x256 bf16 kk bias=n", "gemm 512x256x64..4096 bf16 mn"}
    ranges.add("rmsnorm 1..65536x4096 bf16")
    names = [shape.name for shape in found]
    assert {shape.name for shape in found if isinstance(shape, NamedRange)} == ranges
    assert set(names) == ranges | set(lines[4:7]) | set(lines[11:15]) and len(names) == 10
    assert names[0] == "rmsnorm 1..65536x4096 bf16"
