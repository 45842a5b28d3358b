"""Atomic replacement of files: links, modes, names of drafts, and what a failure leaves."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutegen.errors import StoreError
from cutegen.system import publish as module
from cutegen.system.publish import publish, publishing, real_path


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_usual_mode_less_the_umask(tmp_path: Path, umask: None) -> None:
    """0644 under a umask of 027 is 0640; folders on the way are made; nothing else is there."""
    publish(tmp_path / "new" / "it.json", b"1", "table")
    assert (tmp_path / "new" / "it.json").read_bytes() == b"1"
    assert mode(tmp_path / "new" / "it.json") == 0o640
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["it.json"]


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_the_mode_of_the_old_file_is_kept(tmp_path: Path, umask: None, bits: int) -> None:
    """The mode does not depend on the umask; the set-user-id bit is dropped."""
    path = tmp_path / "it"
    path.write_bytes(b"old")
    path.chmod(0o4000 | bits)
    publish(path, b"new", "table")
    assert (path.read_bytes(), mode(path)) == (b"new", bits)


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    """The target of a chain of links is replaced by a new file; a missing target is created."""
    real = tmp_path / "far" / "real"
    real.parent.mkdir()
    (tmp_path / "near").symlink_to("far/real")
    (tmp_path / "link").symlink_to("near")
    publish(tmp_path / "link", b"1", "table")
    assert real.read_bytes() == b"1" and not real.is_symlink()
    with real.open("rb") as reader:
        publish(tmp_path / "link", b"2", "table")
        assert reader.read() == b"1", "a reader keeps the file that it opened"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "near").is_symlink()
    assert real.read_bytes() == b"2" and real_path(tmp_path / "link") == real_path(real)
    assert [path.name for path in real.parent.iterdir()] == ["real"]


def test_the_name_of_a_draft_is_unpredictable(tmp_path: Path) -> None:
    """Two drafts of one file have different names, each with 128 random bits."""
    names = set()
    for _ in range(2):
        with publishing(tmp_path / "it", "table"):
            names |= {path.name for path in tmp_path.iterdir() if path.name != "it"}
    assert len(names) == 2 and all(len(name) > 32 and name.startswith(".") for name in names)


def test_a_failure_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    """After any error readers see the old content; only errors of the system are translated."""
    path = tmp_path / "it"
    publish(path, b"old", "table")
    for error in (KeyboardInterrupt(), ValueError("mine"), StoreError("mine")):
        with pytest.raises(type(error)), publishing(path, "table") as file:
            file.write(b"half")
            raise error
    full = OSError(28, "No space left on device")
    with (
        pytest.raises(StoreError, match=r"table .*it cannot be written: No space"),
        publishing(path, "table"),
    ):
        raise full
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """Pipes, folders, loops of links and invalid names are refused and left as they are."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    for name in ("pipe", "folder", "loop", "file/it", "a\0b", "\ud800", "x" * 300):
        with pytest.raises(StoreError):
            publish(tmp_path / name, b"1", "table")
    assert sorted(tmp_path.iterdir()) == before
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_drafts_of_killed_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this user that are a day old; neither a draft that is being written nor a file of others."""
    draft, foreign, young = (f".cutegen-{letter * 32}" for letter in "abc")
    killed = "import os, sys; from pathlib import Path; from cutegen.system import publish as own; "
    killed += "own.uuid.uuid4 = lambda: type('Id', (), {'hex': 'a' * 32}); "
    killed += "draft = own.publishing(Path(sys.argv[1]), 'table'); draft.__enter__(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed, str(tmp_path / "it")], check=False)
    left = tmp_path / draft
    assert left.is_file()
    (tmp_path / young).touch()
    others = [tmp_path / name for name in (foreign, ".cutegen-notes", "it.json")]
    for path in others[1:]:
        path.touch()
    others[0].symlink_to(tmp_path / "it.json")
    old = time.time() - 90000
    for path in (left, *others):
        os.utime(path, (old, old), follow_symlinks=False)
    publish(tmp_path / "it", b"1", "table")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"it", young, foreign, ".cutegen-notes", "it.json"}
    left.touch()
    os.utime(left, (old, old))
    module._sweep.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    publish(tmp_path / "it", b"2", "table")
    assert left.is_file(), "another user's"
