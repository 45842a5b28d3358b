"""The family of docs/new_family.md, made by following that page: checked, compiled, tuned and pinned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deployments import Workshop, load
from fake_engine import DEVICE
from fake_gpu import build_driver, run_with_driver
from fake_torch import Torch
from fake_tuning import SMALL, FakeCompiler
from patient_bench import PatientBench

import cutegen.cli.pin
import cutegen.cli.tune
from cutegen.build import Toolchain
from cutegen.build.store import Store
from cutegen.cli.main import main
from cutegen.families import registry
from cutegen.records.table import Table
from cutegen.space import Config
from cutegen.tuning import AutoTuner
from cutegen.tuning.backends import Backends

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "new_family.md"
BLOCK = re.compile(r"```\w+ title=(\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the folder that it names; forgotten afterwards."""
    family = tmp_path / "families" / "scaled_add"
    family.mkdir(parents=True)
    for name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        (family / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(registry, "_registered", dict(registry._all()))
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "cache"))
    return family.parent


def run(folder: Path, *words: str) -> int:
    return main([*words[:2], "--families", str(folder), "--arch", "sm_90a", "--shape", "64x4096", *words[2:]])


def test_the_page_holds_all_files() -> None:
    assert {name for name, _ in BLOCK.findall(PAGE.read_text())} == {"family.py", "space.py", "kernel.py.j2"}


def test_its_space_is_listed_and_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "space", "scaled_add") == 0
    assert "8 kernels" in capsys.readouterr().out
    assert run(folder, "space", "scaled_add", "--explain", "threads=512", "loads_first=true") == 0
    assert run(folder, "space", "scaled_add", "--lint") == 0


def test_a_family_that_is_not_loaded_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["space", "scaled_added", "--arch", "sm_90a", "--shape", "64x4096"]) == 2
    assert "--families DIR adds families of your own" in capsys.readouterr().err


@pytest.mark.dsl
def test_a_mistake_in_the_template_is_told_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = folder / "scaled_add" / "kernel.py.j2"
    template.write_text(template.read_text().replace("make_rmem_tensor", "make_rmem_tensr"))
    assert run(folder, "tune", "scaled_add", "--candidates", "2", "--quiet") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"no attribute 'make_rmem_tensr' at line \d+ of the source", out)


def test_its_reference_finds_what_is_wrong(folder: Path) -> None:
    """Inputs, reference and tolerance agree with torch, and not with a kernel in which alpha is compiled."""
    torch = pytest.importorskip("torch")
    (family,) = registry.load_families(folder)
    problem: Any = family.parse("scaled_add 5x4096 bf16")
    assert str(problem) == "scaled_add 5x4096 bf16"
    assert problem.min_bytes == 3 * 5 * 4096 * 2
    generator = torch.Generator().manual_seed(0)
    for awkward in (False, True):
        inputs = family.inputs(problem, generator, awkward=awkward)
        reference = family.reference(problem, inputs)
        x, z = (inputs.tensors[name].float() for name in ("x", "z"))
        for alpha, right in ((inputs.scalars["alpha"], True), (1.5, not awkward)):
            (chunk,) = reference.chunks("y", (alpha * x + z).bfloat16())
            assert bool(((chunk.got - chunk.want).abs() <= chunk.allowed).all()) == right


@pytest.mark.dsl
def test_it_is_compiled_without_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every config of the space becomes a kernel without spills."""
    assert run(folder, "tune", "scaled_add", "--candidates", "3", "--quiet", "--json") == 0
    out = capsys.readouterr().out
    assert '"outcomes": {' in out and "build_failed" not in out
    assert '"spill_store_bytes": 0' in out


def behaviour(config: Config) -> str:
    """What the measuring process makes of a kernel: more threads are faster, but half of those are wrong."""
    right = config["loads_first"] or config["threads"] == 64
    return f"{'ok' if right else 'wrong'}:{2000 / int(str(config['threads']))}"


@pytest.fixture
def tuned(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of ``cutegen tune``, by a pretended compiler and a measuring process without a GPU."""
    current = Toolchain.current()

    def make(*args: Any, **options: Any) -> AutoTuner:
        backends = Backends(
            lambda: FakeCompiler(Store(tmp_path / "cache"), behaviour),
            PatientBench,
        )
        words = {**options, "toolchain": current, "effort": SMALL, "backends": backends}
        return AutoTuner(*args, **words)

    monkeypatch.setattr(cutegen.cli.tune, "AutoTuner", make)
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: DEVICE)
    table = tmp_path / "table.json"
    words = ["--families", str(folder), "--shape", "64x4096", "--quiet", "--table", str(table)]
    assert main(["tune", "scaled_add", *words]) == 0
    return table


def pin(folder: Path, table: Path, out: Path) -> int:
    return main(["pin", "--families", str(folder), "--table", str(table), "--out", str(out)])


def test_it_is_tuned_and_pinned(
    folder: Path,
    tuned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The fastest right kernel wins, and is what the folder calls."""
    (entry,) = Table.load(tuned).entries.values()
    assert str(entry.problem) == "scaled_add 64x4096 bf16" and entry.config is not None
    assert str(entry.config) == "threads=512 loads_first=true"
    workshop = Workshop(tmp_path / "kernels")
    monkeypatch.setattr(cutegen.cli.pin, "Kernels", lambda store, build: workshop.kernels(build=build))
    assert pin(folder, tuned, tmp_path / "deploy") == 0
    assert "1 problem, 1 kernel, " in capsys.readouterr().out
    log = tmp_path / "calls.txt"
    monkeypatch.setenv("KERNEL_LOG", str(log))
    deployment, torch = load(tmp_path / "deploy", Torch(name=DEVICE.name))
    x, z = torch.tensor(64, 4096), torch.tensor(64, 4096)
    y = deployment.call("scaled_add", x=x, z=z, alpha=1.5)
    lines = log.read_text().splitlines()
    assert [line.split()[1] for line in lines[1:4]] == [hex(tensor.data_ptr()) for tensor in (x, z, y)]
    assert lines[4:] == ["float 1.5"]
    assert deployment.call("scaled_add", x=x, z=z, y=z, alpha=1) is z
    with pytest.raises(RuntimeError, match="scaled_add needs z"):
        deployment.call("scaled_add", x=x, alpha=1.5)


CALL = """
import sys
import fake_torch
torch = fake_torch.Torch(name="Fake GPU")
sys.modules["torch"] = torch
sys.path.insert(0, {folder!r})
import pinned
x, z = torch.tensor(64, 4096), torch.tensor(64, 4096)
y = pinned.call("scaled_add", x=x, z=z, alpha=1.5)
print(y.shape, "tvm_ffi" in sys.modules)
y = pinned.call("scaled_add", x=x, z=z, y=torch.tensor(64, 4096, dtype="bfloat16"), alpha=1.5)
"""


@pytest.mark.dsl
def test_its_compiled_kernel_launches_from_the_folder(folder: Path, tuned: Path, tmp_path: Path) -> None:
    """The real compiler and loader, and a driver that records: one CTA of the winner for each row."""
    assert pin(folder, tuned, tmp_path / "deploy") == 0
    code = CALL.format(folder=str(tmp_path / "deploy"))
    out, log = run_with_driver(build_driver(tmp_path), code, tmp_path / "log")
    assert out.splitlines() == ["(64, 4096) False"]
    launches = [line for line in log if line.startswith("cuLaunchKernelEx")]
    assert len(launches) == 2
    assert all(" grid 64 1 1 " in line and " block 512 1 1 " in line for line in launches)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("space.py", "def derive(", "def derive)(", "space.py, line 22: no space for sm_90a: SyntaxError"),
        (
            "space.py",
            "    return Space(",
            "    1 / 0\n    return Space(",
            "space.py, line 28: no space for sm_90a: Z",
        ),
        (
            "space.py",
            "    return Space(",
            "    return arch, dict(",
            "space.py: build_space(sm_90a) returned (",
        ),
        (
            "space.py",
            'family="scaled_add"',
            'family="add"',
            "the space is of family 'add', but the file one of",
        ),
        ("space.py", "def build_space(", "def build(", "space.py declares no build_space(arch)"),
        ("family.py", "def baselines(", "def baselines)(", "family.py, line 11 cannot be read: SyntaxError"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    folder: Path, file: str, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"scaled_{sum(map(ord, file + new))}"  # modules and spaces stay known by the name of their family
    (folder / "scaled_add").rename(folder / name)
    for path in (folder / name).glob("*.py"):
        path.write_text(path.read_text().replace('"scaled_add"', f'"{name}"'))
    path = folder / name / file
    old = old.replace("scaled_add", name)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert run(folder, "space", name) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    path.write_text(text)  # mended, it is read again by the same process
    assert run(folder, "space", name) == 0
