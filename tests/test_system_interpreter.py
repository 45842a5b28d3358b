"""Children of this Python: whatever lies in the working directory, they import none of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from samples import source

from cutegen.arch import find_arch
from cutegen.build import Builder, Failure
from cutegen.build.store import Store
from cutegen.errors import BuildError, ResourceError
from cutegen.families.gemm.problem import Problem
from cutegen.measure import Bench
from cutegen.operator_api import ask_api
from cutegen.system.interpreter import PACKAGE_ROOT, import_path, python_command, python_environment

HERE = Path(__file__).parent
#: Says what its interpreter looks like.
TELLER = """
import json, os, sys
def main(arguments):
    print(json.dumps([arguments, sys.path, sys.flags.isolated, sys.dont_write_bytecode, sys.pycache_prefix]))
    return 7
"""
THIRD_PARTY = ("cutegen", "cutlass", "cuda", "tvm_ffi", "torch", "numpy", "sitecustomize", "usercustomize")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of every name; what imports one leaves the file ``ran``."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in (*sys.stdlib_module_names, *THIRD_PARTY):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(folder)
    return tmp_path / "ran"


def compile_something(tmp_path: Path) -> None:
    with Builder(Store(tmp_path / "cache"), workers=1) as builder:
        [(_, result)] = builder.build([source("raise ValueError('as promised')\n")])
    assert isinstance(result, Failure) and result.message == "ValueError: as promised at line 1 of the source"


def list_operators(tmp_path: Path) -> None:
    with suppress(BuildError):  # it need not be installed
        ask_api(("bf16", "bf16", "k", "k", 2), find_arch("sm_90a"))


def open_bench(tmp_path: Path) -> None:
    with Bench(engine="fake_engine:make", search_path=[HERE]) as bench:
        bench.open(Problem(256, 256, 256))


@pytest.mark.dsl
@pytest.mark.parametrize("start", [compile_something, list_operators, open_bench], ids=lambda f: f.__name__)
def test_no_child_imports_from_the_working_directory(
    trap: Path, tmp_path: Path, start: Callable[[Path], None]
) -> None:
    """Neither a module of the standard library nor one that is installed is taken from there."""
    start(tmp_path)
    assert not trap.exists(), f"ran from the working directory: {trap.read_text()}"


def tell(tmp_path: Path, **options: object) -> tuple[list[str], list[str], int, bool, str | None]:
    (tmp_path / "teller").mkdir(exist_ok=True)
    (tmp_path / "teller" / "teller_module.py").write_text(TELLER)
    command = python_command("teller_module", ["a", "b"], first=[tmp_path / "teller"], **options)  # type: ignore[arg-type]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    arguments, path, isolated, no_bytecode, prefix = json.loads(done.stdout)
    return arguments, path, isolated, no_bytecode, prefix


def test_a_child_gets_its_arguments_and_the_path_of_this_process(trap: Path, tmp_path: Path) -> None:
    """In that order: what was asked for first, then what this process imports from."""
    arguments, path, isolated, _, _ = tell(tmp_path)
    assert arguments == ["a", "b"] and isolated == 1
    assert path == [str(tmp_path / "teller"), *import_path()]
    assert not trap.exists()


def test_a_child_reads_no_variable_of_python(
    trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that names folders, nor one that keeps it from starting or from ending."""
    monkeypatch.setenv("PYTHONPATH", str(trap.parent / "downloads"))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setenv("PYTHONSTARTUP", str(trap.parent / "downloads" / "json.py"))
    assert tell(tmp_path)[0] == ["a", "b"]
    assert not trap.exists()


def test_a_child_writes_bytecode_as_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables are not read, so what they decided is handed over."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    assert tell(tmp_path)[3:] == (True, str(tmp_path / "bytecode"))


def test_the_path_of_a_child_is_absolute_and_leaves_the_working_directory_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is written; a relative folder is meant as this process means it now."""
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    given = ["", ".", str(tmp_path), f"{tmp_path}/", str(tmp_path / "link"), "rel", "/abs", Path("/no-text")]
    monkeypatch.setattr(sys, "path", given)
    assert import_path() == [str(PACKAGE_ROOT), str(tmp_path / "rel"), "/abs"]


def test_the_folder_of_the_package_stays_on_the_path_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it is the working directory, as in a checkout."""
    monkeypatch.chdir(PACKAGE_ROOT)
    monkeypatch.setattr(sys, "path", ["/first", str(PACKAGE_ROOT), "/last"])
    assert import_path() == ["/first", str(PACKAGE_ROOT), "/last"]


def test_a_removed_working_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative folders mean nothing then."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", "rel", "/abs"])
    assert import_path() == [str(PACKAGE_ROOT), "/abs"]
    monkeypatch.chdir("/")


def test_what_a_child_starts_inherits_no_relative_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of PYTHONPATH would be the working directory; nothing there is left out altogether."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":some/where:/abs{os.pathsep}")
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    environment = python_environment()
    assert environment["PYTHONPATH"] == f"{tmp_path / 'some/where'}:/abs"
    assert "PYTHONINSPECT" not in environment and environment["PYTHONNOUSERSITE"] == "1"
    monkeypatch.setenv("PYTHONPATH", "")
    assert "PYTHONPATH" not in python_environment()


def test_a_python_that_does_not_know_its_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is embedded in another program."""
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ResourceError, match="does not know its executable"):
        python_command("cutegen.build.daemon")
