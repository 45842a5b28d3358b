"""Where a pinned folder lies, and what became of it on the way there."""

from __future__ import annotations

import ctypes
import os
import py_compile
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deployments import LINES, load, load_module, operands
from fake_torch import Torch

from cutegen.families.gemm.problem import Problem

pytest.importorskip("torch")
pytest_plugins = ["pin_fixtures"]


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_LOG", str(tmp_path / "calls.txt"))


def call(deployment: Any, torch: Torch) -> None:
    a, b, options = operands(Problem.parse(LINES[0]), torch)
    assert deployment.gemm(a, b, **options) is options["out"]


def test_a_relative_folder_is_found_from_another_working_directory(
    deployed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries are loaded at first calls, long after the folder was named."""
    monkeypatch.chdir(deployed.parent)
    deployment, torch = load(Path(deployed.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    call(deployment, torch)


def test_a_link_that_leads_elsewhere_later_does_not_matter(deployed: Path, tmp_path: Path) -> None:
    """As where a release is switched under processes that serve the one before."""
    link, empty = tmp_path / "current", tmp_path / "empty"
    link.symlink_to(deployed)
    deployment, torch = load(link)
    empty.mkdir()
    link.unlink()
    link.symlink_to(empty)
    call(deployment, torch)


def test_a_file_system_without_programs_is_named(deployed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linker says only that it cannot map a segment."""
    deployment, torch = load(deployed)

    def refuse(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*: failed to map segment") as plain:
        call(deployment, torch)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_RDONLY))
    with pytest.raises(RuntimeError, match=r"segment from .* mounted with noexec: copy the folder"):
        call(deployment, torch)
    assert "noexec" not in str(plain.value)


@pytest.mark.parametrize("harm", ["cut off", "emptied", "another magic", "no code"])
def test_bytecode_of_a_part_that_was_cut_off_is_made_anew(deployed: Path, harm: str) -> None:
    """As a half-copied folder has it; the source has its digest."""
    module = load_module(deployed)
    part = deployed / "traced.py"
    cached = Path(cache_from_source(str(part)))
    py_compile.compile(str(part), cfile=str(cached), doraise=True)
    whole = cached.read_bytes()
    changed = {
        "cut off": whole[: len(whole) // 2],
        "emptied": b"",
        "another magic": b"\0\0\0\0" + whole[4:],
        "no code": whole[:16] + b"N",
    }
    cached.write_bytes(changed[harm])
    assert "register" in module.Deployment(deployed)._run("traced.py")


def test_verification_includes_the_loader(deployed: Path) -> None:
    """It is the one file with a digest that no list has, because it holds that of the list."""
    deployment, _ = load(deployed)
    deployment.verify()
    loader = deployed / "pinned.py"
    text = loader.read_text()
    loader.write_text(text.replace("_MOST_CALLS = 16384", "_MOST_CALLS = 16385"))
    with pytest.raises(RuntimeError, match=r"pinned\.py in .* has changed since it was pinned"):
        deployment.verify()
    loader.unlink()
    with pytest.raises(RuntimeError, match=r"pinned\.py in .* cannot be read: No such file"):
        deployment.verify()
