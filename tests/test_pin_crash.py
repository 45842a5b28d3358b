"""A pin that fails, is killed or fills the disk: the old deployment stays, and nothing hidden is left."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deployments import LINES, Workshop, contents, hidden, kernel_file, load

from cutegen.deploy import folder as place
from cutegen.deploy import pin_table
from cutegen.errors import PinError

pytest.importorskip("torch")
pytest_plugins = ["pin_fixtures"]
STAGED = ".deploy.0123456789ab"


@pytest.mark.parametrize("fails", ["into an empty place", "aside", "into the place"])
def test_a_failed_rename_leaves_the_old_deployment(
    fails: str, deployed: Path, second: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rename fails, on a system that does not exchange folders in one step."""
    rename, done = Path.rename, []

    def failing(self: Path, target: Path) -> Path:
        done.append("aside" if target != deployed else "into the place" if done else "into an empty place")
        if done[-1] == fails and done.count(fails) == 1:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(place, "_exchange_at_once", lambda one, other: False, raising=False)
    with pytest.raises(PinError, match=r"cannot write .*Input/output error"):
        pin_table(second, deployed, kernels=workshop.kernels())
    assert load(deployed)[0].problems == [LINES[0]]
    load(deployed)[0].verify()
    assert hidden(deployed.parent) == []


def test_a_system_without_exchange_replaces_in_two_steps(
    deployed: Path, second: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and old C libraries have none."""
    monkeypatch.setattr(place, "_exchange_at_once", lambda one, other: False)
    pin_table(second, deployed, kernels=workshop.kernels())
    assert load(deployed)[0].problems == [LINES[1]] and hidden(deployed.parent) == []


@pytest.mark.parametrize("limit", [100, 4000, 20_000])
def test_a_full_disk_leaves_the_old_deployment(
    limit: int, deployed: Path, second: Path, workshop: Workshop
) -> None:
    """Files that end in the middle, the manifest among them, are cleared away."""
    pin_table(second, deployed.with_name("warm"), kernels=workshop.kernels())
    shutil.rmtree(deployed.with_name("warm"))
    before, most = contents(deployed.parent), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most[1]))
    try:
        with pytest.raises(PinError, match=rf"cannot write {deployed}: File too large"):
            pin_table(second, deployed, kernels=workshop.kernels())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert contents(deployed.parent) == before


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from deployments import Workshop
from cutegen.deploy import pin_table
Path.rename = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)
pin_table(Path({table!r}), Path({out!r}), kernels=Workshop(Path({cache!r})).kernels())
"""


def test_what_a_killed_process_left_is_swept(
    deployed: Path, second: Path, workshop: Workshop, tmp_path: Path
) -> None:
    """The next call for the same folder clears it away; a call for another folder does not touch it."""
    pin_table(second, tmp_path / "other", kernels=workshop.kernels())
    words = {"tests": Path(__file__).parent, "table": second, "out": deployed, "cache": tmp_path / "cache"}
    code = KILLED.format(**{name: str(path) for name, path in words.items()})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert len(hidden(tmp_path)) == 1
    pin_table(second, tmp_path / "other", kernels=workshop.kernels())
    assert len(hidden(tmp_path)) == 1
    pin_table(second, deployed, kernels=workshop.kernels())
    assert hidden(tmp_path) == []


def cut_off(folder: Path) -> None:
    """As it is while it is written: the loader is not there yet, and a library not whole."""
    (folder / "pinned.py").unlink()
    kernel_file(folder, "so").write_bytes(b"\x7fELF")


def half_removed(folder: Path) -> None:
    kernel_file(folder, "so").unlink()
    (folder / "table.json").unlink()


@pytest.mark.parametrize("harm", [cut_off, half_removed, lambda folder: None])
def test_every_state_that_a_kill_leaves_is_swept(
    harm: Callable[[Path], None], deployed: Path, second: Path, workshop: Workshop
) -> None:
    """Half written, whole, half removed."""
    staged = shutil.copytree(deployed, deployed.with_name(STAGED))
    harm(staged)
    deployed.with_name(".deploy.aaaaaaaaaaaa").mkdir()
    pin_table(second, deployed, kernels=workshop.kernels())
    assert hidden(deployed.parent) == []


def test_what_only_looks_left_over_stays(
    deployed: Path, second: Path, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of somebody else, changed files and links, under names like ours."""
    home = deployed.parent
    for number, name in enumerate(("b" * 12, "c" * 12, "d" * 12)):
        copy = shutil.copytree(deployed, home / f".deploy.{name}")
        if number == 0:
            (copy / "mine.txt").write_text("mine")
        elif number == 1:
            (copy / "table.json").write_text("mine")
        else:
            (copy / "manifest.json").unlink()
    (home / ".deploy.backup").mkdir()
    (home / ".deploy.eeeeeeeeeeee").write_text("mine")
    (home / ".deploy.ffffffffffff").symlink_to("deploy")
    kept = {name: value for name, value in contents(home).items() if name.startswith(".")}
    with caplog.at_level(logging.WARNING, "cutegen"):
        pin_table(second, deployed, kernels=workshop.kernels())
    assert {name: value for name, value in contents(home).items() if name.startswith(".")} == kept
    assert len(caplog.records) == 3 and "'mine.txt'" in caplog.text


def test_what_another_user_left_over_stays(
    deployed: Path, second: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder for all, such as /tmp."""
    staged = shutil.copytree(deployed, deployed.with_name(STAGED))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    pin_table(second, deployed, kernels=workshop.kernels())
    assert staged.exists()


def test_a_deployment_that_was_moved_aside_is_put_back(
    deployed: Path, second: Path, workshop: Workshop
) -> None:
    """A kill between two renames leaves none in its place; the next call begins with putting it back."""
    aside = deployed.rename(deployed.with_name(f"{STAGED}.old"))
    with pytest.raises(PinError, match="no kernel to pin"):
        pin_table(second, deployed, kernels=Workshop(deployed.parent / "none").kernels(build="never"))
    assert not aside.exists()
    load(deployed)[0].verify()


def test_what_only_looks_moved_aside_stays_there(
    deployed: Path, second: Path, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder with a file of somebody else is not put in the place of a deployment."""
    aside = deployed.rename(deployed.with_name(f"{STAGED}.old"))
    (aside / "mine.txt").write_text("mine")
    before = contents(aside)
    with caplog.at_level(logging.WARNING, "cutegen"):
        pin_table(second, deployed, kernels=workshop.kernels())
    assert contents(aside) == before and "was not put back" in caplog.text
    assert load(deployed)[0].problems == [LINES[1]]
