"""Everything ever tried, in one SQLite file that many processes may write and nobody edits.

Every trial is written down with its outcome as soon as it is known, so a killed run loses at most the one
in flight, and running again continues where it stopped: :meth:`TrialStore.latest` answers what is known of
a problem on a kind of GPU under a policy.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from cutegen.errors import MeasureError, StoreError
from cutegen.problem import Problem
from cutegen.trial import ORIGINS, OUTCOMES, Key, Trial

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ORIGINS", "OUTCOMES", "Key", "Trial", "TrialStore"]

_SCHEMA = 1
_APPLICATION = int.from_bytes(b"cutg", "big")
_WAIT_S = 30.0
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

_T = TypeVar("_T")


class TrialStore:
    """The trials in one SQLite file, created if missing; a context manager that closes it.

    Any number of processes may have it open and write; within a process it may be used from any thread.

    Args:
        path: The file. Its folder must exist or be creatable.
        read_only: Only read: nothing is created, and the file may be write-protected.

    Raises:
        StoreError: The file is damaged, something else, from a newer cutegen, or cannot be opened; the
            message says which and what to do.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._read_only = read_only
        if not read_only:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"trial database {self.path} cannot be created: {error}") from error
        self._db = self._connect()

    def _connect(self) -> sqlite3.Connection:
        with self._reasons():
            db = self._open()
            try:
                db.row_factory = sqlite3.Row
                self._recognise(db)
            except (sqlite3.Error, StoreError):
                db.close()
                raise
            return db

    def _open(self) -> sqlite3.Connection:
        if not self._read_only:
            return _connect(str(self.path))
        if not self.path.is_file():
            raise StoreError(f"trial database {self.path} does not exist")
        uri = self.path.absolute().as_uri()
        db = _connect(f"{uri}?mode=ro")
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            # Its folder is write-protected too, so the index of the write-ahead log cannot be made.
            db.close()
            db = _connect(f"{uri}?immutable=1")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _recognise(self, db: sqlite3.Connection) -> None:
        """Check what the file is, and make it a trial database if it is new."""
        damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        if not self._read_only:
            self._prepare(db)
        application = db.execute("PRAGMA application_id").fetchone()[0]
        if application != _APPLICATION:
            raise StoreError(f"{self.path} is not a trial database; give another path")
        schema = db.execute("PRAGMA user_version").fetchone()[0]
        if schema > _SCHEMA:
            raise StoreError(
                f"trial database {self.path} has schema {schema}, newer than {_SCHEMA}; upgrade cutegen"
            )

    def _prepare(self, db: sqlite3.Connection) -> None:
        _patiently(lambda: db.execute("PRAGMA journal_mode = WAL").fetchone())
        db.execute("PRAGMA synchronous = FULL")  # in WAL mode NORMAL may lose the last trials with the power
        db.execute("BEGIN IMMEDIATE")
        try:
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _statements(_CREATE):
                    db.execute(statement)
            db.execute("COMMIT")
        except sqlite3.Error:
            db.execute("ROLLBACK")
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; calling it again does nothing."""
        self._db.close()

    def add(self, trial: Trial) -> None:
        """Write ``trial``; when this returns it survives a crash.

        Raises:
            StoreError: It could not be written: read-only or full disk, damage, a duplicate id.
        """
        marks = ", ".join("?" * len(_COLUMNS))
        with self._lock, self._reasons():
            self._db.execute(f"INSERT INTO trials ({', '.join(_COLUMNS)}) VALUES ({marks})", trial.to_row())

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
            outcome: One of :data:`cutegen.trial.OUTCOMES`.
            artifact_key: Names the compiled kernel, and with it the toolchain.
            source_digest: Names the rendered text, whatever the toolchain.
            run: Names the tuning run.

        Raises:
            StoreError: The database is damaged.
        """
        wanted = {
            "problem": None if problem is None else str(problem),
            "device_key": device_key,
            "policy_digest": policy,
            "outcome": outcome,
            "artifact_key": artifact_key,
            "source_digest": source_digest,
            "run": run,
        }
        return self._select({column: value for column, value in wanted.items() if value is not None})

    def latest(self, problem: Problem, device_key: str, policy: str | None = None) -> dict[Key, Trial]:
        """Return the newest trial of each kernel and its run-time arguments: what need not be tried again.

        With a policy's digest, timings made under another are left out; failures count under any.

        Raises:
            StoreError: The database is damaged.
        """
        trials = self.find(problem, device_key)
        return {t.key: t for t in trials if policy is None or t.timing is None or _digest(t) == policy}

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
        wanted = {"problem": str(problem) if problem else None, "run": run}
        where, values = _where({column: value for column, value in wanted.items() if value is not None})
        with self._lock, self._reasons():
            rows = self._db.execute(f"SELECT outcome, count(*) FROM trials {where} GROUP BY outcome", values)
            return Counter({row[0]: row[1] for row in rows})

    def _select(self, wanted: Mapping[str, str]) -> list[Trial]:
        where, values = _where(wanted)
        with self._lock, self._reasons():
            rows = self._db.execute(f"SELECT * FROM trials {where} ORDER BY seq", values).fetchall()
        return [self._trial(row) for row in rows]

    def _trial(self, row: sqlite3.Row) -> Trial:
        try:
            return Trial.from_row(dict(row))
        except (ValueError, KeyError, TypeError, MeasureError) as error:
            raise StoreError(f"trial {row['id']} in {self.path} cannot be read: {error}") from error

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        """Turn SQLite's errors into ours, with the remedy."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(_reason(self.path, error)) from error

    @staticmethod
    def set_aside(path: Path | str) -> Path:
        """Rename a damaged database (and its log), so that a new one can be begun; return the new path.

        Raises:
            StoreError: There is no such file, or it cannot be renamed.
        """
        path = Path(path)
        aside = path.with_name(f"{path.name}.damaged-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}")
        try:
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                log = path.with_name(path.name + suffix)
                if log.exists():
                    log.rename(aside.with_name(aside.name + suffix))
        except OSError as error:
            raise StoreError(f"trial database {path} cannot be set aside: {error}") from error
        return aside


def _digest(trial: Trial) -> str:
    return trial.policy.digest if trial.policy else ""


def _connect(name: str) -> sqlite3.Connection:
    """Open a path or ``file:`` URI; every statement is its own transaction unless one is begun."""
    is_uri = name.startswith("file:")
    return sqlite3.connect(name, timeout=_WAIT_S, isolation_level=None, check_same_thread=False, uri=is_uri)


def _where(wanted: Mapping[str, str]) -> tuple[str, list[str]]:
    clause = " AND ".join(f"{column} = ?" for column in wanted)
    return (f"WHERE {clause}" if clause else ""), list(wanted.values())


def _statements(script: str) -> Iterator[str]:
    """Split a script; ``executescript`` would end the transaction first."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _patiently(action: Callable[[], _T]) -> _T:
    """Repeat what SQLite's own waiting does not cover: two processes that switch a new file to WAL."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _reason(path: Path, error: sqlite3.Error) -> str:
    text = " ".join(str(error).split())
    name = f"trial database {path}"
    if isinstance(error, sqlite3.OperationalError):
        if "readonly" in text or "unable to open" in text:
            return f"{name} cannot be written or opened ({text}); check its permissions or give another path"
        if "full" in text:
            return f"{name} cannot grow ({text}); free space or give another path"
        if "locked" in text:
            return f"{name} is held by another process for over {_WAIT_S:.0f} s ({text})"
    if isinstance(error, sqlite3.IntegrityError):
        return f"{name} refused a trial: {text}"
    return f"{name} is damaged ({text}); move it away to begin a new one, or give another path"
