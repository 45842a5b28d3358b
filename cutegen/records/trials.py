"""Every trial, in one append-only SQLite file that many processes may write.

Every trial is recorded with its outcome as soon as it is known, so a killed run loses at most the one in
flight. :class:`cutegen.tuning.history.Ledger` decides which of them need not be tried again.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cutegen.errors import CutegenError, StoreError
from cutegen.families.registry import find_family
from cutegen.family import Problem
from cutegen.records.sqlite_file import (
    WAIT_S,
    connect,
    disk_failure,
    is_disk_failure,
    may_hold,
    set_journal_mode,
)
from cutegen.records.trial import OUTCOMES, Trial
from cutegen.system.closing import Closing
from cutegen.system.forks import RenewedLock, renew_in_children
from cutegen.system.private import make_private
from cutegen.system.publish import require_file_name
from cutegen.text import printable, shown

__all__ = ["OUTCOMES", "Trial", "TrialStore"]

_SCHEMA = 1
_APPLICATION = int.from_bytes(b"cutg", "big")
_COLUMNS = (
    *("id", "problem", "origin", "outcome", "config", "arch", "source_digest", "artifact_key", "launch"),
    *("error", "resources", "timing", "policy", "policy_digest", "device", "device_key", "build_s"),
    *("created_at", "run"),
)
_CREATE = f"""
CREATE TABLE trials (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    problem TEXT NOT NULL,
    origin TEXT NOT NULL,
    outcome TEXT NOT NULL,
    config TEXT,
    arch TEXT NOT NULL,
    source_digest TEXT NOT NULL,
    artifact_key TEXT NOT NULL,
    launch TEXT NOT NULL,
    error TEXT NOT NULL,
    resources TEXT,
    timing TEXT,
    policy TEXT,
    policy_digest TEXT NOT NULL,
    device TEXT,
    device_key TEXT NOT NULL,
    build_s REAL,
    created_at TEXT NOT NULL,
    run TEXT NOT NULL
);
CREATE INDEX trials_by_problem ON trials (problem, device_key);
CREATE TRIGGER trials_keep BEFORE DELETE ON trials
    BEGIN SELECT RAISE(ABORT, 'trials are never deleted'); END;
CREATE TRIGGER trials_stay BEFORE UPDATE ON trials
    BEGIN SELECT RAISE(ABORT, 'trials are never changed'); END;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_SCHEMA};
"""
#: Characters that a message quotes of what is wrong with a trial.
_QUOTED = 300


class TrialStore(Closing):
    """The trials in one SQLite file, created if missing; a context manager that closes it.

    A file that is refused is left as it is, to the byte. Folders that are missing are made for this user
    alone (mode 0700); one that is there may be shared, since a database holds data and no code. Any number of
    processes may have it open and write; within a process it may be used from any thread. A child of fork
    opens the file itself when it first needs it.

    Args:
        path: The file. Its folder must exist or be creatable.
        read_only: Only read: nothing is created, and the file may be write-protected.

    Attributes:
        journal_mode: How SQLite keeps writes safe: ``wal``, or ``delete`` on network file systems.

    Raises:
        StoreError: The file is damaged, something else, from a newer cutegen, or cannot be opened; the
            message says which and what to do.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = require_file_name(path)
        self._lock = RenewedLock()
        self._read_only = read_only
        if not read_only:
            try:
                make_private(self.path.parent)
            except OSError as error:
                raise StoreError(
                    f"trial database {self.path} cannot be created: {error}; --db, --cache-dir or "
                    "CUTEGEN_CACHE_DIR names another place"
                ) from error
        there = may_hold(self.path, _APPLICATION, _SCHEMA)
        if read_only and not there:
            raise StoreError(f"trial database {self.path} does not exist, or is empty")
        self._own: sqlite3.Connection | None = self._connect()
        #: In a child of fork the connection of its parent, which SQLite lets no child use or close.
        self._inherited: list[sqlite3.Connection] = []
        renew_in_children(self)

    def renew(self) -> None:
        """Leave the connection to the parent; called in a child of fork."""
        if self._own is not None:
            self._inherited.append(self._own)
            self._own = None

    @property
    def _db(self) -> sqlite3.Connection:
        if self._own is None:
            self._own = self._connect()
        return self._own

    def _connect(self) -> sqlite3.Connection:
        with self._reasons():
            db = self._open()
            try:
                db.row_factory = sqlite3.Row
                db.text_factory = _text
                self._recognise(db)
            except BaseException:
                db.close()
                raise
            return db

    def _open(self) -> sqlite3.Connection:
        if not self._read_only:
            return connect(self.path, "mode=rwc")
        db = connect(self.path, "mode=ro")
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # Its folder is write-protected too, so the index of the write-ahead log cannot be made.
            db.close()
            db = connect(self.path, "immutable=1")
        except BaseException:
            db.close()
            raise
        return db

    def _recognise(self, db: sqlite3.Connection) -> None:
        """Check what the file is, and make it a trial database if it is new."""
        damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        if self._read_only:
            self.journal_mode = str(db.execute("PRAGMA journal_mode").fetchone()[0])
            return
        # The tables first: a database whose log was not merged yet is then recognised by its header.
        self._prepare(db)
        self.journal_mode = set_journal_mode(db, self.path)

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _statements(_CREATE):
                    db.execute(statement)
            db.execute("COMMIT")
        except sqlite3.Error:
            if db.in_transaction:  # a full disk has ended it already
                db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        if self._own is not None:
            self._own.close()

    def add(self, trial: Trial) -> None:
        """Write ``trial``; when this returns it survives a crash.

        Raises:
            StoreError: It could not be written: read-only or full disk, damage, a duplicate id.
        """
        marks = ", ".join("?" * len(_COLUMNS))
        with self._lock, self._reasons():
            self._db.execute(f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({marks})", trial.to_row())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the trials of the ``with`` block in one transaction, which costs as much as one trial.

        After the block all of them survive a crash; after an error in it none is written.

        Raises:
            StoreError: They could not be written.
        """
        with self._lock:
            with self._reasons():
                self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                with self._reasons():
                    self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def find(
        self,
        problem: Problem | None = None,
        device_key: str | None = None,
        *,
        policy: str | None = None,
        outcome: str | None = None,
        artifact_key: str | None = None,
        source_digest: str | None = None,
        run: str | None = None,
    ) -> list[Trial]:
        """Return the trials that match everything given, oldest first.

        Args:
            problem: What was computed.
            device_key: The kind of GPU; ``""`` for trials without one.
            policy: Digest of the measurement policy.
            outcome: One of :data:`cutegen.records.trial.OUTCOMES`.
            artifact_key: Names the compiled kernel, and with it the toolchain.
            source_digest: Names the rendered text, whatever the toolchain.
            run: Names the tuning run.

        Raises:
            StoreError: The database is damaged.
        """
        wanted = {
            "device_key": device_key,
            "policy_digest": policy,
            "outcome": outcome,
            "artifact_key": artifact_key,
            "source_digest": source_digest,
            "run": run,
        }
        return self._select({column: value for column, value in wanted.items() if value is not None}, problem)

    def get(self, trial_id: str) -> Trial | None:
        """Return the trial of that name, or None.

        Raises:
            StoreError: The database is damaged.
        """
        return next(iter(self._select({"id": trial_id})), None)

    def counts(self, problem: Problem | None = None, run: str | None = None) -> Counter[str]:
        """Return how many trials ended in each outcome.

        Raises:
            StoreError: The database is damaged.
        """
        where, values = _where({} if run is None else {"run": run}, problem)
        with self._lock, self._reasons():
            found = self._db.execute(f"SELECT outcome, count(*) FROM trials {where} GROUP BY outcome", values)
            counts = Counter({row[0]: row[1] for row in found})
        unknown = [outcome for outcome in counts if outcome not in OUTCOMES]
        if unknown:
            raise StoreError(f"trials in {self.path} ended in {shown(unknown[0])}, which is no outcome")
        return counts

    def _select(self, wanted: Mapping[str, str], problem: Problem | None = None) -> list[Trial]:
        where, values = _where(wanted, problem)
        with self._lock, self._reasons():
            rows = self._db.execute(f"SELECT * FROM trials {where} ORDER BY seq", values).fetchall()
        return [self._trial(row) for row in rows]

    def _trial(self, row: sqlite3.Row) -> Trial:
        values = dict(row)
        try:
            return Trial.from_row(values)
        except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
        except (CutegenError, TypeError, ValueError) as error:
            reason = str(error)
        name = values.get("id")
        raise StoreError(
            f"trial {name if isinstance(name, str) and name.isalnum() else shown(name)} in {self.path} "
            f"(row {values.get('seq')}) cannot be read: {printable(reason)[:_QUOTED]}"
        )

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        """Turn SQLite's errors into ours, with the remedy."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:  # the latter of names and messages in a damaged file
            raise StoreError(_reason(self.path, error)) from error


def _text(data: bytes) -> str | bytes:
    """Return a value as text; bytes that are no text stay bytes, so that their row can be reported."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _where(wanted: Mapping[str, str], problem: Problem | None = None) -> tuple[str, list[str]]:
    """Return a clause and its values; ``problem`` is found under the lines of earlier versions too."""
    clauses, values = [f"{column} = ?" for column in wanted], list(wanted.values())
    if problem is not None:
        lines = find_family(problem.family).lines(problem)
        clauses.append(f"problem IN ({', '.join('?' * len(lines))})")
        values += lines
    return (f"WHERE {' AND '.join(clauses)}" if clauses else ""), values


def _statements(script: str) -> Iterator[str]:
    """Split a script; ``executescript`` would end the transaction first."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _reason(path: Path, error: sqlite3.Error | UnicodeError) -> str:
    text = " ".join(str(error).split())
    name = f"trial database {path}"
    if is_disk_failure(error):
        return disk_failure(path, error)
    if isinstance(error, sqlite3.OperationalError):
        if "readonly" in text or "unable to open" in text:
            return f"{name} cannot be written or opened ({text}); check its permissions or give another path"
        if "full" in text:
            return f"{name} cannot grow ({text}); free space or give another path"
        if "locked" in text:
            return f"{name} is held by another process for over {WAIT_S:.0f} s ({text})"
    if isinstance(error, sqlite3.IntegrityError):
        return f"{name} refused a trial: {text}"
    return f"{name} is damaged ({text}); move it away to begin a new one, or give another path"
