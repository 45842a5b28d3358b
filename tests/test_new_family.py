"""The family of docs/new_family.md, made by following that page: found, listed, checked and compiled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cutegen.cli.main import main
from cutegen.families import registry

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
