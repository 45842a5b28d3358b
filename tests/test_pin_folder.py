"""What pinning may replace: its own files, unchanged, and nothing else, whatever goes wrong on the way."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import LINES, Workshop, contents, hidden, kernel_file, load, write_table

from cutegen.build import Artifact
from cutegen.build.render import Source
from cutegen.build.store import Store
from cutegen.deploy import pin_table
from cutegen.errors import PinError
from cutegen.families.gemm.problem import Problem

pytest.importorskip("torch")
pytest_plugins = ["pin_fixtures"]


# --- what is not ours ---


def put_link(folder: Path) -> None:
    library = kernel_file(folder, "so")
    shutil.move(library, folder.parent / "mine.so")
    library.symlink_to(folder.parent / "mine.so")


def link_kernels(folder: Path) -> None:
    shutil.move(folder / "kernels", folder.parent / "elsewhere")
    (folder / "kernels").symlink_to("../elsewhere")


ADDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda f: (f / "app.py").write_text("mine"), "'app.py'"),
    "a folder": (lambda f: shutil.copytree(f / "kernels", f / "data"), "'data/'"),
    "an empty folder": (lambda f: (f / "logs").mkdir(), "'logs/'"),
    "a kernel": (lambda f: (f / "kernels" / "mine.so").write_text("mine"), "'kernels/mine.so'"),
    "a file in the bytecode": (
        lambda f: (
            (f / "__pycache__").mkdir(exist_ok=True),
            (f / "__pycache__" / "notes.txt").write_text("mine"),
        ),
        "'__pycache__/notes.txt'",
    ),
    "bytecode of a file of one's own": (
        lambda f: (
            (f / "__pycache__").mkdir(exist_ok=True),
            (f / "__pycache__" / "app.cpython-311.pyc").write_text("x"),
        ),
        "'__pycache__/app.cpython-311.pyc'",
    ),
    "a link for a library": (put_link, r"\.so \(a link or special file\)'"),
    "a link for the kernels": (link_kernels, r"'kernels \(a link or special file\)'"),
    "a pipe": (lambda f: os.mkfifo(f / "pipe"), r"'pipe \(a link or special file\)'"),
    "many": (lambda f: [(f / f"{i}.txt").touch() for i in range(9)], r"'0.txt', .*'4.txt' and 4 more"),
}


@pytest.mark.parametrize("name", ADDED)
def test_files_that_pinning_did_not_write_are_left_and_named(
    name: str, deployed: Path, second: Path, workshop: Workshop
) -> None:
    """A folder that holds more than a deployment is refused, and is as it was."""
    add, message = ADDED[name]
    add(deployed)
    before = contents(deployed.parent)
    with pytest.raises(PinError, match=f"did not write .*{message}"):
        pin_table(second, deployed, kernels=workshop.kernels())
    assert contents(deployed.parent) == before


@pytest.mark.parametrize("name", ["table.json", "manifest.json", "pinned.py", "so", "py"])
def test_changed_files_are_left_and_named(
    name: str, deployed: Path, second: Path, workshop: Workshop
) -> None:
    """What somebody edited in a deployment is not thrown away with it."""
    path = kernel_file(deployed, name) if name in ("so", "py") else deployed / name
    path.write_bytes(path.read_bytes() + b"\n")
    before = contents(deployed)
    with pytest.raises(PinError, match=f"'{path.relative_to(deployed)}' changed since it was pinned"):
        pin_table(second, deployed, kernels=workshop.kernels())
    assert contents(deployed) == before


def test_a_file_that_appears_meanwhile_is_left(
    deployed: Path, second: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is looked through once more when it is replaced: compiling takes a while."""
    compile = workshop.compile

    def slowly(source: Source, store: Store) -> Artifact:
        (deployed / "app.py").write_text("mine")
        return compile(source, store)

    monkeypatch.setattr(workshop, "compile", slowly)
    with pytest.raises(PinError, match=r"did not write 'app\.py'"):
        pin_table(second, deployed, kernels=workshop.kernels())
    assert (deployed / "app.py").read_text() == "mine"
    assert load(deployed)[0].problems == [LINES[0]] and hidden(deployed.parent) == []


FOREIGN = {
    "a list": '["kernels"]',
    "another tool's": '{"kernels": [], "files": {"src/thesis.tex": ""}}',
    "an older one": json.dumps({"schema": 1, "kernels": [], "files": {}, "gpu": {}}),
    "names outside": json.dumps({"schema": 2, "loader": "0" * 64, "files": {"../mine.txt": "0" * 64}}),
    "no digests": json.dumps({"schema": 2, "loader": "0" * 64, "files": {"table.json": 7}}),
    "wrong types": json.dumps({"schema": 2, "loader": [], "files": "kernels"}),
    "a number": "7",
    "nested": "[" * 100_000,
    "nested objects": '{"kernels":' * 100_000,
    "a long number": '{"kernels": ' + "9" * 5000 + "}",
    "no text": "\udcff\udcfekernels",
    "nothing": "",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_manifest_is_never_ours(name: str, tmp_path: Path, table: Path, workshop: Workshop) -> None:
    """Whatever else is called manifest.json, its folder stays and the message names it."""
    out = tmp_path / "other"
    (out / "src").mkdir(parents=True)
    (out / "src" / "thesis.tex").write_text("years of work")
    (out / "manifest.json").write_text(FOREIGN[name], errors="surrogateescape")
    before = contents(tmp_path)
    with pytest.raises(PinError, match=r"other holds a manifest\.json that is not of this version"):
        pin_table(table, out, kernels=workshop.kernels())
    assert contents(tmp_path) == before


def test_what_is_no_folder_is_refused(tmp_path: Path, table: Path, workshop: Workshop) -> None:
    """A file, a mount point, and links in a circle, before anything is compiled."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to("circle")
    for out, message in (
        (tmp_path / "file", "file is a file"),
        (Path("/proc"), "/proc is a mount point"),
        (tmp_path / "circle", "circle"),
    ):
        with pytest.raises(PinError, match=message):
            pin_table(table, out, kernels=workshop.kernels())
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "circle").is_symlink()


def test_a_mount_point_inside_is_not_ours(
    deployed: Path, second: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mounted there cannot be removed with the folder."""
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == deployed / "kernels")
    with pytest.raises(PinError, match="did not write 'kernels/'"):
        pin_table(second, deployed, kernels=workshop.kernels())


def test_a_folder_without_permission_is_said_before_compiling(
    deployed: Path, second: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deployment is replaced by renaming, for which its parent must be writable, too."""
    for denied in (deployed.parent, deployed, deployed / "kernels"):
        monkeypatch.setattr(os, "access", lambda path, mode, denied=denied: path != denied)
        with pytest.raises(PinError, match=f"no permission to write in {denied}$"):
            pin_table(second, deployed, kernels=workshop.kernels(build="never"))
    assert load(deployed)[0].problems == [LINES[0]]


# --- what may be replaced ---


def test_bytecode_of_a_deployment_does_not_keep_it(deployed: Path, second: Path, workshop: Workshop) -> None:
    """Python writes bytecode where a deployment is used, and compileall for every source."""
    for source in (deployed / "pinned.py", kernel_file(deployed, "py")):
        py_compile.compile(str(source), doraise=True)
        py_compile.compile(str(source), doraise=True, optimize=2)
    assert len(list(deployed.rglob("*.pyc"))) == 4
    pin_table(second, deployed, kernels=workshop.kernels())
    assert load(deployed)[0].problems == [LINES[1]] and hidden(deployed.parent) == []


def test_a_damaged_deployment_is_replaced(deployed: Path, second: Path, workshop: Workshop) -> None:
    """What is missing cannot be lost."""
    kernel_file(deployed, "so").unlink()
    pin_table(second, deployed, kernels=workshop.kernels())
    load(deployed)[0].verify()


def test_a_link_stays_a_link(tmp_path: Path, table: Path, second: Path, workshop: Workshop) -> None:
    """``out`` may be a link to the folder that is served; its target is replaced, or made."""
    (tmp_path / "current").symlink_to("v1")
    for source, line in ((table, LINES[0]), (second, LINES[1])):
        pin_table(source, tmp_path / "current", kernels=workshop.kernels())
        assert (tmp_path / "current").readlink() == Path("v1") and not (tmp_path / "v1").is_symlink()
        assert load(tmp_path / "v1")[0].problems == [line]
    assert hidden(tmp_path) == []


def test_the_folder_keeps_its_mode(deployed: Path, second: Path, workshop: Workshop) -> None:
    """Whom the folder was closed to, it stays closed to."""
    deployed.chmod(0o700)
    pin_table(second, deployed, kernels=workshop.kernels())
    assert deployed.stat().st_mode & 0o777 == 0o700


def test_an_empty_folder_and_the_present_one_will_do(
    tmp_path: Path, table: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deploy").mkdir()
    monkeypatch.chdir(tmp_path / "deploy")
    pin_table(table, Path(), kernels=workshop.kernels())
    load(tmp_path / "deploy")[0].verify()


def test_processes_that_pin_at_once_leave_one_whole_deployment(
    tmp_path: Path, table: Path, second: Path, workshop: Workshop
) -> None:
    """Each writes a folder of its own, and one after the other puts it in place."""
    for source in (table, second):
        pin_table(source, tmp_path / source.stem, kernels=workshop.kernels())
    failed: list[BaseException] = []

    def pin(source: Path) -> None:
        try:
            for _ in range(5):
                pin_table(source, tmp_path / "deploy", kernels=workshop.kernels())
        except BaseException as error:  # noqa: BLE001  told to the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=pin, args=(source,)) for source in (table, second) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and hidden(tmp_path) == []
    load(tmp_path / "deploy")[0].verify()


# --- names ---


@pytest.mark.parametrize("symbol", ["../../outside", "/tmp/outside", "a/b", "", "a-b", "ä", "a\0b", ".", "7"])
def test_a_symbol_that_is_no_identifier_becomes_no_file(
    symbol: str, tmp_path: Path, table: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache says how a kernel is called, and the folder calls files so."""
    compile = workshop.compile
    monkeypatch.setattr(workshop, "compile", lambda *words: replace(compile(*words), symbol=symbol))
    monkeypatch.setattr(workshop, "store", Store(tmp_path / "cache"))
    with pytest.raises(PinError, match="which is no C identifier"):
        pin_table(table, tmp_path / "a" / "b" / "deploy", kernels=workshop.kernels())
    assert {path.name for path in tmp_path.iterdir()} == {"tables", "cache"}


def test_kernels_of_one_name_are_not_mixed_up(
    tmp_path: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels that the cache calls alike would overwrite each other."""
    table, compile = write_table(tmp_path / "t.json", LINES[:2]), workshop.compile
    assert len({Problem.parse(line).layout for line in LINES[:2]}) == 2
    monkeypatch.setattr(workshop, "compile", lambda *words: replace(compile(*words), symbol="one"))
    monkeypatch.setattr(workshop, "store", Store(tmp_path / "cache"))
    with pytest.raises(PinError, match="two kernels of the cache are both called one"):
        pin_table(table, tmp_path / "deploy", kernels=workshop.kernels())
    assert not (tmp_path / "deploy").exists()
