"""Trial databases of any content: an answer or a CutegenError, and what is foreign stays as it is."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fake_kernels import H200
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.build import Resources
from cutegen.build.render import Source
from cutegen.errors import CutegenError, StoreError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.trials import Trial, TrialStore
from cutegen.space import Config, Launch
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.history import Ledger

PROBLEM, OTHER = Problem(256, 256, 256), Problem(64, 7168, 2048)
CONFIG = Config({"tile_shape_mn": (128, 256), "pingpong": False, "split_k": 1})
POLICY = Policy.final()
APPLICATION = int.from_bytes(b"cutg", "big")
COLUMNS = (
    *("id", "problem", "origin", "outcome", "config", "arch", "source_digest", "artifact_key", "launch"),
    *("error", "resources", "timing", "policy", "policy_digest", "device", "device_key", "build_s"),
    *("created_at", "run"),
)
FUZZ = settings(derandomize=True, database=None, deadline=None)

GOOD = Trial(
    PROBLEM,
    "ok",
    CONFIG,
    arch="sm_90a",
    artifact_key="k",
    launch=(1,),
    resources=Resources(registers=168, notes=("x",)).to_json(),
    timing=Timing(10.0, 9.0, 11.0, 9, reference_us=11.0, ratio=1.1),
    policy=POLICY,
    device=H200,
    build_s=0.8,
    run="run",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory where there is such a place: writing to a disk thousands of times says nothing more."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def good(folder: Path) -> bytes:
    """A database of two dozen trials, of several pages."""
    path = folder / "good.db"
    with TrialStore(path) as store:
        for number in range(24):
            failed = number % 3 == 0
            changes = {"outcome": "timeout", "timing": None, "policy": None} if failed else {}
            problem = OTHER if number % 5 == 0 else PROBLEM
            store.add(replace(GOOD, id=f"{number:016x}", problem=problem, **changes))  # type: ignore[arg-type]
    return path.read_bytes()


def ask_everything(path: Path) -> None:
    """Use a database as tuning does, and whatever it gives; only a CutegenError may come of it."""
    for read_only in (True, False):
        try:
            with TrialStore(path, read_only=read_only) as store:
                for trial in store.find():
                    assert Trial.from_row(dict(zip(COLUMNS, trial.to_row(), strict=True))) == trial
                store.counts()
                store.get("0")
                attempt = Attempt(
                    CONFIG, Source("", "sm_90a", PROBLEM.signature, CONFIG), "k", Launch((1,), 0)
                )
                ledger = Ledger(store, PROBLEM, "sm_90a", H200, "run", POLICY)
                ledger.recall([attempt], POLICY)
                ledger.finals(), ledger.outcomes(), ledger.compiled(attempt)
                if not read_only:
                    store.add(replace(GOOD, id="new"))
        except CutegenError as error:
            assert str(path) in str(error)


def lay(folder: Path, files: dict[str, bytes]) -> Path:
    """A database in ``folder`` with files beside it, and nothing of the one before."""
    for old in folder.glob("fuzzed.db*"):
        old.unlink()
    for suffix, data in files.items():
        (folder / f"fuzzed.db{suffix}").write_bytes(data)
    return folder / "fuzzed.db"


def lying(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("fuzzed.db*")}


#: Where a byte changes: anywhere, or in the header and the first page, where the schema is.
_PLACES = st.integers(0, 2**20) | st.integers(0, 110) | st.integers(0, 4095)


@settings(FUZZ, max_examples=300)
@given(
    flips=st.lists(st.tuples(_PLACES, st.integers(0, 255)), max_size=12),
    cut=st.none() | st.integers(0, 2**20),
    log=st.none() | st.binary(max_size=200),
    journal=st.none() | st.binary(max_size=200),
)
def test_changed_bytes_end_in_an_answer_or_an_error(
    folder: Path,
    good: bytes,
    flips: list[tuple[int, int]],
    cut: int | None,
    log: bytes | None,
    journal: bytes | None,
) -> None:
    """In the file, or in what is taken for its log or its journal; refusing it changes nothing."""
    data = bytearray(good)
    for place, value in flips:
        data[place % len(data)] = value
    if cut is not None:
        del data[cut % len(data) :]
    beside = {"-wal": log, "-journal": journal}
    path = lay(folder, {"": bytes(data), **{k: v for k, v in beside.items() if v is not None}})
    before = lying(folder)
    header = bytes(data[:100])
    ours = (
        header.startswith(b"SQLite format 3\0") and header[60:64] + header[68:72] == good[60:64] + good[68:72]
    )
    ask_everything(path)
    if data and not ours and any(header[60:64] + header[68:72]):
        assert lying(folder) == before


_NUMBERS = st.integers() | st.floats() | st.booleans() | st.none()
_JSON = st.recursive(
    _NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_FIELDS = {
    "config": CONFIG.to_json(),
    "resources": Resources().to_json(),
    "timing": GOOD.timing.to_json() if GOOD.timing else {},
    "policy": POLICY.to_json(),
    "device": H200.to_json(),
}


@st.composite
def _changes(draw: st.DrawFn) -> tuple[str, object]:
    """A column and a value for it: of the right form but for one field, or of any form at all."""
    column = draw(st.sampled_from(COLUMNS))
    if column in _FIELDS and draw(st.booleans()):
        data = dict(_FIELDS[column])
        data[draw(st.sampled_from([*data, "more"]))] = draw(_JSON)
        return column, json.dumps(data)
    text = st.text(max_size=20) | _JSON.map(json.dumps)
    long = st.sampled_from(
        ["9" * 5000, "[" * 50_000, '{"a":' * 50_000, "gemm " + "9" * 5000 + "x8x8 bf16 kk"]
    )
    stored = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.none()
    return column, draw(text | long | stored | st.binary(max_size=20))


@settings(FUZZ, max_examples=300)
@given(changes=st.lists(_changes(), min_size=1, max_size=3))
def test_changed_rows_end_in_an_answer_or_an_error(
    folder: Path, good: bytes, changes: list[tuple[str, object]]
) -> None:
    """Whatever one row holds, and of whatever type."""
    path = lay(folder, {"": good})
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TRIGGER trials_stay")
        for column, value in changes:
            try:
                db.execute(f"UPDATE trials SET {column} = ? WHERE seq = 2", (value,))
            except (sqlite3.IntegrityError, UnicodeEncodeError):
                return  # the database itself refuses it
    ask_everything(path)


_WORDS = st.sampled_from(["", "PRAGMA journal_mode = WAL", "VACUUM", "CREATE TABLE trials (seq, id)"])


@settings(FUZZ, max_examples=150)
@given(
    application=st.sampled_from([0, 0, APPLICATION, 123, -1]) | st.integers(-(2**31), 2**31 - 1),
    version=st.sampled_from([0, 0, 1, 2]) | st.integers(-(2**31), 2**31 - 1),
    statements=st.lists(_WORDS, max_size=4),
    killed=st.booleans(),
)
def test_a_database_of_another_program_is_refused_and_not_changed(
    folder: Path, application: int, version: int, statements: list[str], killed: bool
) -> None:
    """Neither by writers nor by readers, also where its program was killed and left a log."""
    path = lay(folder, {})
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in [*dict.fromkeys(statements), f"PRAGMA application_id = {application}"]:
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {version}")
        left = lying(folder)
    if killed:
        lay(
            folder, {name.removeprefix("fuzzed.db"): left[name] for name in left if not name.endswith("-shm")}
        )
    before = lying(folder)
    table = "CREATE TABLE trials (seq, id)" in statements
    if application == APPLICATION and version == 1:
        ask_everything(path)
        return
    if application == version == 0 and not table:
        ask_everything(path)
        with TrialStore(path) as store:
            assert store.counts() == {"ok": 1}
        return
    for read_only in (True, False):
        with pytest.raises(StoreError):
            TrialStore(path, read_only=read_only)
        assert lying(folder) == before


@settings(FUZZ, max_examples=100)
@given(data=st.binary(min_size=1, max_size=300), magic=st.booleans())
def test_a_file_of_any_content_is_refused_and_not_changed(folder: Path, data: bytes, magic: bool) -> None:
    """Also if it begins as SQLite's do."""
    path = lay(folder, {"": b"SQLite format 3\0" * magic + data})
    before = lying(folder)
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"is damaged or something else|is not a trial|schema"):
            TrialStore(path, read_only=read_only)
        assert lying(folder) == before
