"""The store: entries are whole or absent, written once, and never trusted blindly."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cutegen.build.store import LIBRARY, Store
from cutegen.errors import StoreError

ARCH, KEY = "sm_90a", "0123456789abcdef0123456789abcdef"
ROOT = Path(__file__).parent.parent


def write(store: Store, key: str = KEY, text: str = "hello") -> None:
    with store.lock(ARCH, key) as lock:
        (store.stage(lock) / "kernel.py").write_text(text)
        store.publish(lock, {"made": "here"})


def test_what_is_published_is_found_with_its_digests(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.find(ARCH, KEY) is None
    write(store)
    entry = store.find(ARCH, KEY)
    assert entry is not None
    assert entry.folder == tmp_path / "v1" / ARCH / KEY[:2] / KEY
    assert (entry.folder / "kernel.py").read_text() == "hello"
    assert entry.meta["made"] == "here" and set(entry.meta["files"]) == {"kernel.py"}
    assert store.keys(ARCH) == (KEY,)


def test_nothing_but_entries_stays_behind(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store)
    write(store, text="again")
    assert [path.name for path in (tmp_path / "v1" / ARCH / KEY[:2]).iterdir()] == [KEY]
    assert (store.folder(ARCH, KEY) / "kernel.py").read_text() == "again"


def test_the_default_store_is_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path / "here"))
    assert Store.default().root == tmp_path / "here"
    monkeypatch.delenv("CUTEGEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Store.default().root == tmp_path / "xdg" / "cutegen"


@pytest.mark.parametrize(
    ("arch", "key"),
    [("..", KEY), ("sm_90a", "../../etc"), ("sm_90a", ""), ("a/b", KEY), ("sm_90a", "ABCDEF0123")],
)
def test_names_that_could_leave_the_root_are_refused(tmp_path: Path, arch: str, key: str) -> None:
    with pytest.raises(StoreError, match="names no entry"):
        Store(tmp_path).find(arch, key)


def damage_content(folder: Path) -> None:
    (folder / "kernel.py").write_text("changed")


def damage_remove(folder: Path) -> None:
    (folder / "kernel.py").unlink()


def damage_meta(folder: Path) -> None:
    (folder / "meta.json").write_text('{"key": "01')


def damage_no_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def change_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, **changes}))


def damage_other_key(folder: Path) -> None:
    change_meta(folder, key="f" * 32)


def damage_no_files(folder: Path) -> None:
    """As a power cut can leave it: all is well with the files that are listed, which are none."""
    change_meta(folder, outcome="ok", files={})


def damage_file_elsewhere(folder: Path) -> None:
    change_meta(folder, files={"../../../work": "0" * 64})


def damage_file_of_no_name(folder: Path) -> None:
    change_meta(folder, files={"\0": "0" * 64})


def damage_files_list(folder: Path) -> None:
    change_meta(folder, files=["kernel.py"])


def damage_nested(folder: Path) -> None:
    (folder / "meta.json").write_text("[" * 100_000)


def damage_digits(folder: Path) -> None:
    (folder / "meta.json").write_text('{"key": ' + "1" * 5000 + "}")


def damage_encoding(folder: Path) -> None:
    (folder / "meta.json").write_bytes(b'{"key": "\xff"}')


def damage_is_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def damage_meta_is_a_folder(folder: Path) -> None:
    (folder / "meta.json").unlink()
    (folder / "meta.json").mkdir()


DAMAGES = [
    *(damage_content, damage_remove, damage_meta, damage_no_meta, damage_other_key, damage_no_files),
    *(damage_file_elsewhere, damage_file_of_no_name, damage_files_list),
    *(damage_nested, damage_digits, damage_encoding, damage_is_a_file, damage_meta_is_a_folder),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_entry_is_set_aside_and_can_be_made_anew(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    store = Store(tmp_path)
    write(store)
    damage(store.folder(ARCH, KEY))
    assert store.find(ARCH, KEY) is None
    aside = list((tmp_path / "v1" / "quarantine").iterdir())
    assert len(aside) == 1 and KEY in aside[0].name
    write(store)
    assert store.find(ARCH, KEY) is not None


def test_verification_can_be_skipped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store)
    damage_content(store.folder(ARCH, KEY))
    assert store.find(ARCH, KEY, verify=False) is not None


def test_discard_removes_an_entry_and_tolerates_its_absence(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.discard(ARCH, KEY)
    write(store)
    store.discard(ARCH, KEY)
    assert store.find(ARCH, KEY) is None


def test_a_key_has_one_holder_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock(ARCH, KEY) as lock:
        assert store.try_lock(ARCH, KEY) is None
        other = store.try_lock(ARCH, "f" * 32)
        assert other is not None
        other.release()
        lock.release()
        lock.release()  # harmless
        again = store.try_lock(ARCH, KEY)
        assert again is not None
        again.release()


def test_release_frees_the_key_although_a_forked_child_still_has_the_descriptor(tmp_path: Path) -> None:
    store = Store(tmp_path)
    lock = store.try_lock(ARCH, KEY)
    assert lock is not None
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        lock.release()
        again = store.try_lock(ARCH, KEY)
        assert again is not None
        again.release()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_lock_on_a_file_that_its_last_holder_removed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = Store(tmp_path), fcntl.flock
    files = (tmp_path / "v1").rglob

    def late(descriptor: int, how: int) -> None:
        monkeypatch.undo()
        [path] = files("*.lock")
        path.unlink()  # as the last holder does, between our open and our lock
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = store.try_lock(ARCH, KEY)
    assert lock is not None and len(list(files("*.lock"))) == 1
    assert store.try_lock(ARCH, KEY) is None
    lock.release()


def _race(root: Path, keys: list[str], start: multiprocessing.synchronize.Barrier) -> None:
    store = Store(root)
    start.wait()
    for key in keys:
        with store.lock(ARCH, key) as lock:
            if store.read(ARCH, key) is None:
                with (root / "work").open("a") as log:
                    log.write(f"{key}\n")
                (store.stage(lock) / "kernel.py").write_text(key)
                store.publish(lock, {})


def test_racing_processes_do_each_piece_of_work_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    keys = [f"{n:032x}" for n in range(40)]
    racers = [context.Process(target=_race, args=(tmp_path, keys, start)) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert sorted((tmp_path / "work").read_text().split()) == keys
    assert Store(tmp_path).keys(ARCH) == tuple(keys)
    assert not list((tmp_path / "v1").rglob("*.lock"))


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from cutegen.build.store import Store
store = Store(Path(sys.argv[1]))
lock = store.try_lock("sm_90a", sys.argv[2])
staged = store.stage(lock)
(staged / "kernel.py").write_text("half")
(staged / "meta.json").write_text("{")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path), KEY], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    store = Store(tmp_path)
    assert store.find(ARCH, KEY) is None
    assert store.keys(ARCH) == ()
    with store.lock(ARCH, KEY) as lock:
        assert list(store.stage(lock).iterdir()) == []
    write(store)
    assert store.find(ARCH, KEY) is not None


def test_a_root_that_cannot_be_a_folder_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "cache")
    with pytest.raises(StoreError, match=r"Not a directory.*CUTEGEN_CACHE_DIR"):
        write(store)
    with pytest.raises(StoreError, match="Not a directory"):
        store.find(ARCH, KEY)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_a_store_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        write(Store(tmp_path / "cache"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_a_store_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    store = Store(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with store.lock(ARCH, KEY) as lock:
        store.stage(lock)
        monkeypatch.setattr(Path, "write_text", refuse)
        with pytest.raises(StoreError, match=os.strerror(code)):
            store.publish(lock, {})
    monkeypatch.undo()
    assert store.find(ARCH, KEY) is None
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=os.strerror(code)):
        store.try_lock(ARCH, KEY)


def test_a_read_only_store_still_answers_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("mkdir", "rename", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "open", refuse)
    assert store.find(ARCH, KEY) is not None


def test_an_entry_lists_the_library_by_the_name_that_the_builder_gives_it(tmp_path: Path) -> None:
    """Else its digest would never be compared."""
    store = Store(tmp_path)
    with store.lock(ARCH, KEY) as lock:
        (store.stage(lock) / LIBRARY).write_text("code")
        store.publish(lock, {"outcome": "ok"})
    assert store.find(ARCH, KEY) is not None
    change_meta(store.folder(ARCH, KEY), files={})
    assert Store(tmp_path).find(ARCH, KEY, verify=False) is None


@pytest.mark.parametrize("variable", ["CUTEGEN_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_home_folder_that_nobody_has_is_a_store_error(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Named with the path, instead of a traceback."""
    monkeypatch.delenv("CUTEGEN_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "~no-such-user-here/cache")
    with pytest.raises(StoreError, match=r"~no-such-user-here/cache.*set CUTEGEN_CACHE_DIR"):
        Store.default()


def test_a_user_without_a_home_folder_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number without a name."""
    for name in ("CUTEGEN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: (_ for _ in ()).throw(KeyError(number)))
    with pytest.raises(StoreError, match="set CUTEGEN_CACHE_DIR"):
        Store.default()
