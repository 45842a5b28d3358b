"""Tuning and pinning a declared kernel, by a pretended compiler and a measuring process without a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deployments import Workshop, load
from fake_engine import DEVICE
from fake_torch import Torch
from fake_tuning import SMALL, TOOLCHAIN, FakeCompiler
from own_registry import without_user_families
from patient_bench import PatientBench

import cutegen.cli.pin
import cutegen.cli.tune
from cutegen.build import Artifact, Result, Toolchain
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.cli.main import main
from cutegen.families import registry
from cutegen.records.table import Table
from cutegen.space import Config
from cutegen.tuning import AutoTuner
from cutegen.tuning.backends import Backends

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_kernel"
Behave = Callable[[Config], str]


class TracingCompiler(FakeCompiler):
    """One that says which kernels are the same: threads do not matter where a warp has a row."""

    facts: dict[str, int] = {}

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        return [(source, self._traced(source, result)) for source, result in super().poll(timeout_s)]

    def _traced(self, source: Source, result: Result) -> Result:
        if not isinstance(result, Artifact):
            return result
        per_row = source.config["threads_per_row"]
        name = f"{per_row}" if per_row == 32 else f"{per_row} {source.config['threads']}"
        return replace(result, trace=name, **self.facts)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    shutil.copytree(EXAMPLE, folder)
    without_user_families(monkeypatch)
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: DEVICE)
    return folder


def tune(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Behave,
    facts: dict[str, int] | None = None,
    toolchain: Toolchain = TOOLCHAIN,
    knobs: str = "threads=128,256",
) -> tuple[int, list[FakeCompiler]]:
    """Run the command; return its exit code and the compilers that it made."""
    compilers: list[FakeCompiler] = []

    def make(*args: Any, **options: Any) -> AutoTuner:
        compiler = TracingCompiler(Store(folder.parent / "cache"), behaviour)
        compiler.facts = facts or {}
        compilers.append(compiler)
        backends = Backends(lambda: compiler, PatientBench)
        return AutoTuner(*args, **{**options, "toolchain": toolchain, "effort": SMALL, "backends": backends})

    monkeypatch.setattr(cutegen.cli.tune, "AutoTuner", make)
    words = ["--kernel", str(folder / "my_norm_kernel.py"), "--shape", "64x4096", "--quiet", "--json"]
    words += ["--set", knobs, "--table", str(folder / "table.json")]
    return main(["tune", *words]), compilers


def speed(config: Config) -> str:
    """More threads for a row are faster."""
    return f"ok:{3000 / int(str(config['threads_per_row']))}"


def results(capsys: pytest.CaptureFixture[str]) -> Any:
    (result,) = json.loads(capsys.readouterr().out)["results"]
    return result


def test_a_second_run_compiles_and_measures_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [first] = tune(folder, monkeypatch, speed)
    found = results(capsys)
    assert code == 0 and first.compiled and not found["reused"]
    assert found["winner"]["threads_per_row"] == 256
    code, [second] = tune(folder, monkeypatch, speed)
    again = results(capsys)
    assert code == 0 and again["reused"] and again["winner"] == found["winner"] and not second.compiled


def test_an_edit_of_a_comment_measures_nothing_and_one_of_code_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(folder, monkeypatch, speed)
    capsys.readouterr()
    for old, new, reused in (
        ("held = []", "held = []  # values", True),
        ("held = []", "held = list()", False),
    ):
        path = folder / "my_norm.py"
        path.write_text(path.read_text().replace(old, new))
        vars(registry.load_kernel(folder / "my_norm_kernel.py")).pop("closure")  # read again
        tune(folder, monkeypatch, speed)
        assert results(capsys)["reused"] is reused


def test_a_default_that_contradicts_its_reference_stops_before_anything_is_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def behaviour(config: Config) -> str:
        author = dict(config) == {"threads": 128, "threads_per_row": 128}
        return "wrong" if author else "time-crashes"

    for _ in range(2):  # the second time it is remembered
        code, _ = tune(folder, monkeypatch, behaviour)
        said = capsys.readouterr()
        assert code == 1
        assert "the default config disagrees with the reference, so nothing was timed" in said.out + said.err


def test_configs_that_are_one_kernel_are_measured_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(folder, monkeypatch, speed, knobs="threads_per_row=32,128")
    found = results(capsys)
    shown = [row["config"] for row in found["candidates"] if row["config"]["threads_per_row"] == 32]
    assert len(shown) <= 1 and found["outcomes"]["invalid"] == 1


def test_a_kernel_that_was_told_another_gpu_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = tune(folder, monkeypatch, speed, {"sm_count": 114})
    said = capsys.readouterr()
    assert code == 1 and "was told 114; this GPU has 132; declare sm_count=132" in said.out + said.err


def test_it_is_pinned_and_called_by_the_declared_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(folder, monkeypatch, speed, toolchain=Toolchain.current())
    (entry,) = Table.load(folder / "table.json").entries.values()
    assert str(entry.problem) == "my_rmsnorm 64x4096 bf16"
    workshop = Workshop(tmp_path / "kernels")
    monkeypatch.setattr(cutegen.cli.pin, "Kernels", lambda store, build: workshop.kernels(build=build))
    words = ["--kernel", str(folder / "my_norm_kernel.py"), "--table", str(folder / "table.json")]
    assert main(["pin", *words, "--out", str(tmp_path / "deploy")]) == 0
    capsys.readouterr()
    log = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(log))
    deployment, torch = load(tmp_path / "deploy", Torch(name=DEVICE.name))
    x, w = torch.tensor(64, 4096), torch.tensor(4096)
    y = deployment.call("my_rmsnorm", x=x, w=w, eps=0.5)
    lines = log.read_text().splitlines()
    assert [line.split()[1] for line in lines[1:4]] == [hex(tensor.data_ptr()) for tensor in (x, w, y)]
    assert lines[4:] == ["float 0.5"]
    with pytest.raises(RuntimeError, match="my_rmsnorm needs w"):
        deployment.call("my_rmsnorm", x=x, eps=0.5)


def test_listed_configs_and_the_default_are_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search answers from the records; switched off, the default answers."""
    configs = [{"threads": 256, "threads_per_row": each} for each in (64, 256)]
    problem = registry.load_kernel(folder / "my_norm_kernel.py").parse("my_rmsnorm 64x4096 bf16")
    compilers: list[FakeCompiler] = []

    def search() -> Any:
        compilers.append(TracingCompiler(Store(folder.parent / "cache"), speed))
        backends = Backends(
            lambda: compilers[-1],
            PatientBench,
        )
        tuner = AutoTuner(device=DEVICE, toolchain=TOOLCHAIN, effort=SMALL, backends=backends)
        return tuner.tune_problem(problem, candidates=configs)

    first, second = search(), search()
    assert first.candidates == 3 and dict(first.config) == configs[1] and compilers[0].compiled
    assert second.reused and second.config == first.config and not compilers[1].compiled
    monkeypatch.setenv("CUTEGEN_DISABLE_AUTOTUNE", "1")
    off = search()
    assert not off.measured and dict(off.config) == {"threads": 128, "threads_per_row": 128}
