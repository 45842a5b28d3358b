"""Scratch folders: gone with their owner, or swept by the next run once nobody uses them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cutegen.errors import StoreError
from cutegen.system import temporary
from cutegen.system.temporary import TemporaryFolder, sweep

ROOT = Path(__file__).parent.parent
KILLED = """
import os, signal, subprocess, sys
from cutegen.system.temporary import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "big").write_text("left behind")
heir = subprocess.Popen(["sleep", "100"], pass_fds=(folder.lock,)) if sys.argv[1:] else None
print(folder.path, heir.pid if heir else "", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed(*arguments: str) -> tuple[Path, int]:
    """The folder of a process that was killed, and the process that has inherited it."""
    command = [sys.executable, "-c", KILLED, *arguments]
    # Not through a pipe, which the heir would keep open.
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, check=False)
        out.seek(0)
        path, *heir = out.read().decode().split()
    assert done.returncode == -signal.SIGKILL
    return Path(path), int(heir[0]) if heir else 0


def test_a_folder_is_for_its_user_alone_and_goes_when_it_is_left(top: Path) -> None:
    """With everything in it."""
    with TemporaryFolder() as folder:
        assert folder.path.parent == top and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "file").write_text("x")
    assert list(top.iterdir()) == []
    folder.close()


def test_what_a_killed_process_left_is_swept(top: Path) -> None:
    """And nothing else is."""
    path, _ = killed()
    assert (path / "big").exists()
    with TemporaryFolder() as mine:
        sweep()
        assert list(top.iterdir()) == [mine.path]


def test_a_folder_is_in_use_while_anyone_has_its_lock(top: Path) -> None:
    """A daemon may outlive its parent for a moment."""
    path, heir = killed("heir")
    sweep()
    assert path.exists()
    os.kill(heir, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while path.exists():
        assert time.monotonic() < deadline
        sweep()


def test_what_is_not_certainly_ours_stays(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name, no lock file, another mode, a link, another user."""
    path, _ = killed()
    (top / "cutegen-scratch-notes").mkdir(mode=0o700)
    (top / "cutegen-scratch-file").write_text("x")
    path.rename(top / "renamed")
    (top / "cutegen-scratch-link").symlink_to(top / "renamed")
    path.mkdir(mode=0o700)
    (path / "in-use.lock").write_text("")
    path.chmod(0o755)
    before = sorted(top.rglob("*"))
    sweep()
    assert sorted(top.rglob("*")) == before
    path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    sweep()
    assert sorted(top.rglob("*")) == before
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(top))
    sweep()
    assert not path.exists()


def test_on_a_network_file_system_nothing_is_swept(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock there may say nothing of other machines."""
    path, _ = killed()
    monkeypatch.setattr(temporary, "is_network", lambda _: True)
    sweep()
    assert path.exists()


def test_where_files_cannot_be_locked_a_folder_is_never_swept(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell whether it is in use."""

    def refuse(*_: object) -> None:
        raise OSError("no locks")

    with monkeypatch.context() as patch:
        patch.setattr(temporary.fcntl, "flock", refuse)
        folder = TemporaryFolder()
    sweep()
    assert folder.path.exists()
    folder.close()


def test_a_temporary_directory_that_cannot_be_written_is_told(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason; sweeping it does nothing."""
    monkeypatch.setattr(tempfile, "tempdir", str(top / "missing"))
    sweep()
    with pytest.raises(StoreError, match="cannot make a temporary folder: No such file"):
        TemporaryFolder()
