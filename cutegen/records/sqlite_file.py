"""A SQLite file of one application: recognised without changing it, then opened."""

from __future__ import annotations

import functools
import logging
import shutil
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from cutegen.errors import StoreError
from cutegen.system.mounts import file_system, is_network
from cutegen.system.temporary import TemporaryFolder

__all__ = ["WAIT_S", "connect", "disk_failure", "is_disk_failure", "may_hold", "set_journal_mode"]

#: Seconds to wait for another process that holds the file.
WAIT_S = 30.0
# Source of the offsets: SQLite, "Database File Format", section 1.3, the database header.
_MAGIC, _HEADER_BYTES = b"SQLite format 3\0", 100
_WRITE_VERSION, _USER_VERSION, _APPLICATION_ID = slice(18, 19), slice(60, 64), slice(68, 72)
_T = TypeVar("_T")
_log = logging.getLogger("cutegen")


def may_hold(path: Path, application: int, newest: int) -> bool:
    """Return whether ``path`` is a database of ``application``; False if nothing is there yet.

    An empty file, and a database without any table, count as nothing. The file is not changed, nor is
    anything beside it.

    Args:
        path: The file, which may be missing.
        application: The ``application_id`` that the database must have.
        newest: The highest ``user_version`` that can be read; the lowest is 1.

    Raises:
        StoreError: It is something else, from a newer version, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"trial database {path} cannot be written or opened: it is no file")
        with path.open("rb") as stream:
            header = stream.read(_HEADER_BYTES)
    except FileNotFoundError:
        return False
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"trial database {path} cannot be written or opened ({error.strerror}); "
            "check its permissions or give another path"
        ) from error
    if not header:
        return False
    if not header.startswith(_MAGIC) or len(header) < _HEADER_BYTES:
        raise StoreError(
            f"trial database {path} is damaged or something else (no SQLite file); "
            "move it away to begin a new one, or give another path"
        )
    found, version = _number(header[_APPLICATION_ID]), _number(header[_USER_VERSION])
    tables = True
    if found == version == 0:
        found, version, tables = _look_inside(path)
    return _judge(path, found, version, tables, application, newest)


def _judge(path: Path, found: int, version: int, tables: bool, application: int, newest: int) -> bool:
    if found == version == 0 and not tables:
        return False
    if found != application:
        raise StoreError(f"{path} is not a trial database; give another path")
    if version > newest:
        raise StoreError(f"trial database {path} has schema {version}, newer than {newest}; upgrade cutegen")
    if version < 1:
        raise StoreError(
            f"trial database {path} has schema {version}, which nothing wrote; give another path"
        )
    return True


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _look_inside(path: Path) -> tuple[int, int, bool]:
    """Return application, version and whether there are tables, of a file whose header has neither number."""
    tables = _contents(f"{path.absolute().as_uri()}?immutable=1", path)[2]
    log = path.with_name(f"{path.name}-wal")
    if tables or not log.exists():
        return 0, 0, tables
    # All may still be in the write-ahead log; SQLite would merge the two, so it gets copies.
    with TemporaryFolder() as folder:
        copy = folder.path / "copy"
        try:
            shutil.copyfile(path, copy)
            shutil.copyfile(log, folder.path / "copy-wal")
        except OSError as error:
            raise StoreError(f"trial database {path} cannot be opened ({error.strerror})") from error
        return _contents(copy.as_uri(), path)


def _contents(uri: str, path: Path) -> tuple[int, int, bool]:
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            application, version, tables = (
                db.execute(question).fetchone()[0]
                for question in (
                    "PRAGMA application_id",
                    "PRAGMA user_version",
                    "SELECT count(*) FROM sqlite_master",
                )
            )
    except (sqlite3.Error, UnicodeError) as error:
        if is_disk_failure(error):
            raise StoreError(disk_failure(path, error)) from error
        raise StoreError(
            f"trial database {path} is damaged or something else ({error}); "
            "move it away to begin a new one, or give another path"
        ) from error
    return application, version, tables > 0


def is_disk_failure(error: Exception) -> bool:
    """Return whether the system failed to read or write a file, which says nothing of what the file holds."""
    # SQLite's only text for SQLITE_IOERR and its kin; Python 3.10 does not tell the code.
    return isinstance(error, sqlite3.OperationalError) and "disk I/O error" in str(error)


def disk_failure(path: Path, error: Exception) -> str:
    """Return the message of such a failure, with the remedy."""
    return (
        f"trial database {path} could not be read or written ({error}); check the disk, its free space and "
        "quotas, or give another path"
    )


def connect(path: Path, options: str) -> sqlite3.Connection:
    """Open ``path`` with the options of a SQLite URI; each statement is a transaction unless one is begun.

    Raises:
        sqlite3.Error: It cannot be opened.
    """
    # As a URI every name is the name of a file: neither ":memory:" nor "file:..." means anything else.
    uri = f"{path.absolute().as_uri()}?{options}"
    db = sqlite3.connect(uri, timeout=WAIT_S, isolation_level=None, check_same_thread=False, uri=True)
    db.execute("PRAGMA trusted_schema = OFF")  # what a file's own views and triggers may call
    if "mode=rw" in options and is_network(path) and _has_log(path):
        # Alone, SQLite reads the write-ahead log without memory that is shared between processes.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
    return db


def _has_log(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(_HEADER_BYTES)[_WRITE_VERSION] == b"\2"
    except OSError:
        return False


def set_journal_mode(db: sqlite3.Connection, path: Path) -> str:
    """Choose how ``db`` keeps what it writes safe, and return SQLite's name of that mode.

    It is ``wal``, so that readers do not wait for a writer; on a network file system it is ``delete``, since
    the write-ahead log needs memory that all processes share. The latter is logged, once per file.

    Raises:
        sqlite3.Error: It cannot be changed.
    """
    kind = file_system(path) if is_network(path) else ""
    mode: str = _while_locked(
        lambda: db.execute(f"PRAGMA journal_mode = {'DELETE' if kind else 'WAL'}").fetchone()[0]
    )
    db.execute("PRAGMA synchronous = FULL")  # in WAL mode NORMAL may lose the last trials with the power
    if kind:
        db.execute("PRAGMA locking_mode = NORMAL")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the next access releases the lock
        _warn_once(path, kind, mode)
    return mode


@functools.cache
def _warn_once(path: Path, kind: str, mode: str) -> None:
    _log.warning(
        "trial database %s is on a network file system (%s), where SQLite's write-ahead log is not safe: "
        "journal mode %s; write to it from one machine at a time, or keep it on a local disk",
        path,
        kind,
        mode,
    )


def _while_locked(action: Callable[[], _T]) -> _T:
    """Repeat ``action`` while the file is locked: SQLite's own waiting does not cover a switch to WAL."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
