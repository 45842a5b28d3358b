"""Which file is a trial database: told by looking, and whatever is refused stays as it was to the byte."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cutegen.errors import StoreError
from cutegen.families.gemm.problem import Problem
from cutegen.records import sqlite_file
from cutegen.records.trials import Trial, TrialStore
from cutegen.system import mounts

PROBLEM = Problem(8, 8, 8)


def run(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def songs(path: Path) -> None:
    run(path, "CREATE TABLE songs (title TEXT)", "INSERT INTO songs VALUES ('x')")


def songs_in_a_log(path: Path) -> None:
    """Everything but the first page is in the write-ahead log, as its program left it when it was killed."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE songs (title TEXT)")
    db.commit()
    copies = {name: path.with_name(name).read_bytes() for name in (path.name, f"{path.name}-wal")}
    db.close()
    for name, data in copies.items():
        path.with_name(name).write_bytes(data)


def half_a_change(path: Path) -> None:
    """SQLite would undo the change if it opened the file."""
    songs(path)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN")
    db.execute("CREATE TABLE more AS SELECT randomblob(100000) AS data")
    copies = {name: path.with_name(name).read_bytes() for name in (path.name, f"{path.name}-journal")}
    db.execute("ROLLBACK")
    db.close()
    for name, data in copies.items():
        path.with_name(name).write_bytes(data)


def empty_but_named(path: Path) -> None:
    run(path, "PRAGMA application_id = 123")


def empty_but_versioned(path: Path) -> None:
    run(path, "PRAGMA user_version = 7")


def text(path: Path) -> None:
    path.write_text("my precious notes\n" * 20)


def short(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def garbage_behind_a_header(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + bytes(4080))


def newer(path: Path) -> None:
    TrialStore(path).close()
    run(path, "PRAGMA user_version = 7")


def never_written(path: Path) -> None:
    TrialStore(path).close()
    run(path, "PRAGMA user_version = -5")


def folder(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def test_a_disk_that_cannot_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite looks inside where the header has neither of the numbers."""

    def fails(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    songs(path := tmp_path / "trials.db")
    monkeypatch.setattr(sqlite3, "connect", fails)
    with pytest.raises(StoreError, match=r"could not be read or written \(disk I/O error\); check the disk"):
        sqlite_file.may_hold(path, 1, 1)


FOREIGN = {
    songs: "is not a trial database",
    songs_in_a_log: "is not a trial database",
    half_a_change: "is not a trial database",
    empty_but_named: "is not a trial database",
    empty_but_versioned: "is not a trial database",
    text: "is damaged or something else",
    short: "is damaged or something else",
    garbage_behind_a_header: "is damaged or something else",
    newer: "schema 7, newer than 1; upgrade",
    never_written: "schema -5, which nothing wrote",
    folder: "is no file",
    pipe: "is no file",
}


def below(top: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in sorted(top.iterdir())}


@pytest.mark.parametrize("read_only", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("make", FOREIGN, ids=lambda f: f.__name__)
def test_what_is_refused_stays_as_it_was_to_the_byte(
    tmp_path: Path, make: Callable[[Path], None], read_only: bool
) -> None:
    """The file, its log and its journal; nothing is left beside it."""
    make(tmp_path / "file.db")
    before = below(tmp_path)
    with pytest.raises(StoreError, match=FOREIGN[make]):
        TrialStore(tmp_path / "file.db", read_only=read_only)
    assert below(tmp_path) == before


def empty(path: Path) -> None:
    path.touch()


def tables_of_nobody(path: Path) -> None:
    run(path, "VACUUM")
    assert path.stat().st_size > 0


@pytest.mark.parametrize("make", [empty, tables_of_nobody], ids=lambda f: f.__name__)
def test_an_empty_database_becomes_one_of_trials(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """As ``mktemp`` or a killed run leaves one; to read there is nothing in it."""
    make(tmp_path / "file.db")
    before = below(tmp_path)
    with pytest.raises(StoreError, match="does not exist, or is empty"):
        TrialStore(tmp_path / "file.db", read_only=True)
    assert below(tmp_path) == before
    with TrialStore(tmp_path / "file.db") as store:
        store.add(Trial(PROBLEM, "invalid"))
        assert store.counts() == {"invalid": 1}


def test_trials_that_a_killed_run_left_in_the_log_are_found(tmp_path: Path) -> None:
    """Also where the file itself does not say yet whose it is, as earlier versions left it."""
    path = tmp_path / "file.db"
    run(path, "PRAGMA journal_mode = WAL")  # its header has no number
    store = TrialStore(path)
    store.add(Trial(PROBLEM, "invalid"))
    names = (path.name, f"{path.name}-wal")
    copies = {name: path.with_name(name).read_bytes() for name in names}
    store.close()
    assert copies[path.name][68:72] == bytes(4)
    for read_only in (True, False):
        for name, data in copies.items():
            path.with_name(name).write_bytes(data)
        with TrialStore(path, read_only=read_only) as again:
            assert again.counts() == {"invalid": 1}


@pytest.mark.parametrize("name", [":memory:", "file:x?mode=memory", "a?mode=memory#b", "100%41.db"])
def test_every_name_is_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever SQLite would make of it."""
    monkeypatch.chdir(tmp_path)
    with TrialStore(name) as store:
        store.add(Trial(PROBLEM, "invalid"))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with TrialStore(name, read_only=True) as store:
        assert len(store.find()) == 1


def test_the_folder_of_a_new_database_is_for_its_user_alone(tmp_path: Path) -> None:
    """Whatever the mask; one that is there is left as it is."""
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        TrialStore(tmp_path / "a" / "b" / "file.db").close()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("", "a", "a/b")]
    assert modes == [0o755, 0o700, 0o700]


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a network file system, as far as the table of mounts says."""
    (tmp_path / "share").mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path / 'share'} rw - nfs4 x rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    sqlite_file._warn_once.cache_clear()
    return tmp_path / "share"


def journal(path: Path) -> str:
    db = sqlite3.connect(path)
    mode: str = db.execute("PRAGMA journal_mode").fetchone()[0]
    db.close()
    return mode


def test_a_database_on_a_network_file_system_has_no_write_ahead_log(
    network: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That is said once, with the kind; several may have it open."""
    with TrialStore(network / "file.db") as store, TrialStore(network / "file.db") as other:
        store.add(Trial(PROBLEM, "invalid"))
        other.add(Trial(PROBLEM, "invalid"))
        assert store.journal_mode == other.journal_mode == journal(network / "file.db") == "delete"
        assert store.counts() == {"invalid": 2}
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    assert "network file system (nfs4)" in said[0].getMessage() and "delete" in said[0].getMessage()


def test_a_database_that_moves_to_a_network_file_system_changes_its_journal(
    network: Path, tmp_path: Path
) -> None:
    """And back; its trials move with it."""
    with TrialStore(tmp_path / "file.db") as store:
        store.add(Trial(PROBLEM, "invalid"))
        assert store.journal_mode == "wal"
    (tmp_path / "file.db").rename(network / "file.db")
    with TrialStore(network / "file.db") as store:
        assert store.journal_mode == "delete"
        store.add(Trial(PROBLEM, "invalid"))
        assert journal(network / "file.db") == "delete"  # nor is it held
    (network / "file.db").rename(tmp_path / "file.db")
    with TrialStore(tmp_path / "file.db") as store:
        assert (store.journal_mode, store.counts()) == ("wal", {"invalid": 2})


def test_a_local_database_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has a write-ahead log, also for readers."""
    TrialStore(tmp_path / "file.db").close()
    with TrialStore(tmp_path / "file.db", read_only=True) as store:
        assert store.journal_mode == "wal"
    assert caplog.records == []
