"""Rows of a trial database that nobody wrote as they are: named with file and row, never a traceback."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_kernels import H200

from cutegen.errors import StoreError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.trials import Trial, TrialStore
from cutegen.space import Config

TRIAL = Trial(
    Problem(4096, 4096, 4096),
    "ok",
    Config({"tile_shape_mn": (128, 256), "pingpong": False, "split_k": 1}),
    arch="sm_90a",
    artifact_key="a" * 32,
    launch=(66, 8, 1),
    resources={"registers": 168, "notes": ["x"]},
    timing=Timing(10.0, 9.0, 11.0, 9, reference_us=11.0, ratio=1.1),
    policy=Policy.final(),
    device=H200,
    build_s=0.8,
)


def trial(**changes: object) -> Trial:
    return replace(TRIAL, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrialStore]:
    with TrialStore(tmp_path / "trials.sqlite") as store:
        yield store


MALFORMED: list[tuple[str, object]] = [
    ("problem", f"gemm {'9' * 5000}x1x8 bf16 kk"),
    ("problem", ""),
    ("outcome", "fine"),
    ("origin", b"\xff"),
    ("config", "[1]"),
    ("config", '{"tile_k": ' + "[" * 100_000),
    ("arch", b"7"),
    ("artifact_key", b"\x00"),
    ("launch", "[" * 100_000),
    ("launch", "[" + "1" * 5000 + "]"),
    ("launch", "{}"),
    ("launch", "[1.5]"),
    ("launch", b"\xff"),
    ("error", b"\xff"),
    ("resources", "[]"),
    ("resources", '{"kernels": [{"speed": 1}]}'),
    ("resources", '{"kernels": 5}'),
    ("timing", '{"median_us": "fast", "low_us": 1, "high_us": 1, "samples": 1}'),
    ("timing", '{"median_us": 1e999, "low_us": 1, "high_us": 1, "samples": 1}'),
    ("timing", '{"median_us": 1' + "0" * 400 + ', "low_us": 1, "high_us": 1, "samples": 1}'),
    ("timing", '{"median_us": 1, "low_us": NaN, "high_us": 1, "samples": 1}'),
    ("timing", '{"median_us": 1, "low_us": 1, "high_us": 1, "samples": 1.5}'),
    ("policy", '{"settle_s": Infinity}'),
    ("policy", '{"seed": "x"}'),
    ("device", "[]"),
    ("device", "{}"),
    ("build_s", "soon"),
    ("build_s", float("inf")),
    ("run", b"\xff"),
]


def damaged(store: TrialStore, column: str, value: object) -> TrialStore:
    """The store again, its first row changed behind its back."""
    store.add(trial(id="bad"))
    store.add(trial(id="good"))
    store.close()
    db = sqlite3.connect(store.path)
    db.execute("DROP TRIGGER trials_stay")
    db.execute(f"UPDATE trials SET {column} = ? WHERE id = 'bad'", (value,))
    db.commit()
    db.close()
    return TrialStore(store.path)


@pytest.mark.parametrize(
    ("column", "value"), MALFORMED, ids=[f"{column} {value!r:.30}" for column, value in MALFORMED]
)
def test_a_malformed_row_is_named_with_its_file(store: TrialStore, column: str, value: object) -> None:
    """Never a traceback, nor a trial whose parts are of the wrong type; the others can still be read."""
    with damaged(store, column, value) as again:
        pattern = r"trial bad in .*trials\.sqlite \(row 1\) cannot be read: .{1,300}$"
        with pytest.raises(StoreError, match=pattern):
            again.find()
        good = again.get("good")
        assert good is not None and good == trial(id="good", created_at=good.created_at)


def test_a_row_without_a_proper_name_is_named_by_its_number(store: TrialStore) -> None:
    """What it holds in its place is quoted, so that a terminal does not obey it."""
    with (
        damaged(store, "id", b"\x1b[2J") as again,
        pytest.raises(StoreError, match=r"trial b'\\x1b\[2J' .*\(row 1\)"),
    ):
        again.find()


def test_what_is_wrong_with_a_row_is_shown_and_not_sent_to_the_terminal(store: TrialStore) -> None:
    """Names of fields are data too."""
    with damaged(store, "timing", '{"\\u001b[2J": 1}') as again, pytest.raises(StoreError) as info:
        again.find()
    assert "\x1b" not in str(info.value) and "\\x1b[2J" in str(info.value)


@pytest.mark.parametrize("value", ["fine", b"\xff", 7.5])
def test_an_outcome_that_there_is_not_is_not_counted(store: TrialStore, value: object) -> None:
    """It is an error that names the file."""
    with damaged(store, "outcome", value) as again, pytest.raises(StoreError, match="which is no outcome"):
        again.counts()


@pytest.mark.parametrize(
    ("name", "instead"),
    [(b"artifact_key TEXT", b"artifact_k\xffy TEXT"), (b"problem TEXT", b"probl\xffm TEXT")],
    ids=["a column", "a column of an index"],
)
def test_a_damaged_name_in_the_schema_is_a_store_error(
    store: TrialStore, name: bytes, instead: bytes
) -> None:
    """Python cannot even decode what SQLite says about it."""
    store.add(TRIAL)
    store.close()
    store.path.write_bytes(store.path.read_bytes().replace(name, instead))
    for read_only in (True, False):
        with (
            pytest.raises(StoreError, match=r"trials\.sqlite is damaged"),
            TrialStore(store.path, read_only=read_only) as again,
        ):
            again.find()
