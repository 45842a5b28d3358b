"""Trials: durable, append-only, shared by processes, and errors that say what to do."""

from __future__ import annotations

import math
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutegen.errors import MeasureError, StoreError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.trials import OUTCOMES, Trial, TrialStore
from cutegen.space import Config

H200 = Device("NVIDIA H200", (9, 0), 132, 52428800, 150754820096, "580.1", "13.0", "GPU-0")
PROBLEM = Problem(4096, 4096, 4096)
CONFIG = Config({"tile_shape_mn": (128, 256), "pingpong": False, "split_k": 1})


def _timing(median_us: float = 10.0) -> Timing:
    return Timing(median_us, median_us * 0.9, median_us * 1.1, 9, reference_us=11.0, ratio=1.1)


def _trial(**changes: object) -> Trial:
    trial = Trial(
        PROBLEM,
        "ok",
        CONFIG,
        arch="sm_90a",
        source_digest="s" * 32,
        artifact_key="a" * 32,
        launch=(66, 8, 1),
        resources={"registers": 168, "notes": ["x"]},
        timing=_timing(),
        policy=Policy.final(),
        device=H200,
        build_s=0.8,
        run="run1",
    )
    return replace(trial, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrialStore]:
    with TrialStore(tmp_path / "trials.sqlite") as store:
        yield store


def test_a_trial_comes_back_as_it_was(store: TrialStore) -> None:
    """What is added is found again, equal in every field, also by a later process."""
    ours, vendor = _trial(), _trial(id="v", config=None, origin="torch", artifact_key="", launch=())
    broken = Trial(PROBLEM, "build_failed", CONFIG, error="ptxas: too many registers", artifact_key="b")
    for trial in (ours, vendor, broken):
        store.add(trial)
    store.close()
    with TrialStore(store.path) as again:
        assert again.find() == [ours, vendor, broken]
        assert again.get("v") == vendor
        assert again.get("nobody") is None


_words = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    outcome=st.sampled_from([o for o in OUTCOMES if o not in ("ok", "pruned")]),
    error=_words,
    run=_words,
    launch=st.lists(st.integers(-(2**31), 2**31), max_size=6),
    build_s=st.none() | st.floats(0, 1e6),
)
def test_any_failure_survives_the_database(
    store: TrialStore, outcome: str, error: str, run: str, launch: list[int], build_s: float | None
) -> None:
    """Error text in any script, any scalars and any outcome are stored and read back unchanged."""
    trial = Trial(PROBLEM, outcome, CONFIG, error=error, run=run, launch=tuple(launch), build_s=build_s)
    store.add(trial)
    assert store.get(trial.id) == trial


@pytest.mark.parametrize("outcome", ["build_failed", "timeout", "wrong_result"])
def test_a_failure_has_no_time(outcome: str) -> None:
    """A trial that did not run to the end cannot carry a time."""
    with pytest.raises(MeasureError, match=f"ended in {outcome}"):
        _trial(outcome=outcome)


@pytest.mark.parametrize("time_us", [math.inf, math.nan, 0.0, -1.0])
def test_a_fake_time_is_refused(time_us: float) -> None:
    """Times are positive and finite; nothing stands for failure."""
    with pytest.raises(MeasureError, match="positive and finite"):
        _trial(timing=_timing(time_us))


def test_unknown_outcomes_and_naked_times_are_refused() -> None:
    """An outcome outside the list, an unknown origin, or a time without its policy is an error."""
    with pytest.raises(MeasureError, match="unknown outcome 'fine'"):
        Trial(PROBLEM, "fine")
    with pytest.raises(MeasureError, match="unknown origin"):
        Trial(PROBLEM, "ok", origin="triton")
    with pytest.raises(MeasureError, match="without its policy"):
        _trial(policy=None)


def test_find_filters_by_everything_given(store: TrialStore) -> None:
    """Every filter narrows the answer, and filters combine."""
    other = Problem(64, 7168, 2048)
    trials = [
        _trial(id="1"),
        _trial(id="2", problem=other),
        _trial(id="3", device=None),
        _trial(id="4", policy=Policy.screen()),
        _trial(id="5", run="run2", source_digest="t", artifact_key="c"),
        _trial(id="6", outcome="timeout", timing=None),
    ]
    for trial in trials:
        store.add(trial)

    def ids(**filters: str) -> str:
        return "".join(t.id for t in store.find(PROBLEM, **filters))

    assert ids() == "13456"
    assert ids(device_key="") == "3"
    assert ids(device_key=H200.key, policy=Policy.final().digest) == "156"
    assert ids(run="run2") == ids(source_digest="t") == ids(artifact_key="c") == "5"
    assert ids(outcome="timeout") == "6"
    assert store.counts() == {"ok": 5, "timeout": 1}
    assert store.counts(other) == {"ok": 1}
    assert store.counts(run="run2") == {"ok": 1}


def test_rows_that_version_0_1_wrote_are_found(store: TrialStore) -> None:
    """Its lines gave layouts other names; what was measured then need not be measured again."""
    trial = _trial()
    store.add(trial)
    columns = [row[1] for row in store._db.execute("PRAGMA table_info(trials)")]
    names = ", ".join(name for name in columns if name not in ("seq", "id", "problem"))
    store._db.execute(
        f"INSERT INTO trials (id, problem, {names}) SELECT 'old', ?, {names} FROM trials", [PROBLEM.old_line]
    )
    assert [found.id for found in store.find(PROBLEM)] == [trial.id, "old"]
    assert {found.problem for found in store.find(PROBLEM, H200.key)} == {PROBLEM}
    assert store.counts(PROBLEM) == {"ok": 2} and not store.find(Problem(4096, 4096, 4096, layout="kn"))


def test_nothing_written_is_edited(store: TrialStore) -> None:
    """The database itself refuses to change or delete a trial, and to hold two of one id."""
    trial = _trial()
    store.add(trial)
    with pytest.raises(StoreError, match="refused a trial"):
        store.add(trial)
    db = sqlite3.connect(store.path)
    for statement in ("UPDATE trials SET outcome = 'ok'", "DELETE FROM trials"):
        with pytest.raises(sqlite3.IntegrityError, match="never"):
            db.execute(statement)
    db.close()


_MANY = """
import sys
from cutegen.families.gemm.problem import Problem
from cutegen.records.trials import Trial, TrialStore
with TrialStore(sys.argv[1]) as store:
    for _ in range(25):
        store.add(Trial(Problem(8, 8, 8), "invalid", run=sys.argv[2]))
"""


def test_many_processes_may_begin_and_write_one_database(tmp_path: Path) -> None:
    """Writers that start at once on a missing file all succeed, and no trial is lost."""
    path = tmp_path / "deep" / "trials.sqlite"
    writers = [subprocess.Popen([sys.executable, "-c", _MANY, str(path), f"w{i}"]) for i in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    with TrialStore(path) as store:
        assert store.counts() == {"invalid": 100}
        assert {t.run for t in store.find()} == {"w0", "w1", "w2", "w3"}


_ENDLESS = """
import sys
from cutegen.families.gemm.problem import Problem
from cutegen.records.trials import Trial, TrialStore
store = TrialStore(sys.argv[1])
for number in range(10**6):
    store.add(Trial(Problem(8, 8, 8), "invalid", run=str(number)))
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_a_killed_writer_loses_at_most_the_trial_in_flight(tmp_path: Path) -> None:
    """After SIGKILL in the middle of writing, all trials whose add returned are there; writing goes on."""
    path = tmp_path / "trials.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    confirmed = -1
    while confirmed < 20:
        confirmed = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.stdout.close()
    writer.wait()
    confirmed = int(rest[-1]) if rest else confirmed
    with TrialStore(path) as store:
        runs = [int(t.run) for t in store.find()]
        assert runs == list(range(len(runs)))
        assert confirmed + 1 <= len(runs) <= confirmed + 2
        store.add(_trial())


def test_trials_are_written_together_or_not_at_all(store: TrialStore) -> None:
    """Others see them once all are there; an error in between takes back what was added with it."""
    first = _trial(id="first")
    with TrialStore(store.path) as other:
        with store.together():
            store.add(first)
            assert other.find() == []
        assert other.find() == [first]
        with pytest.raises(StoreError), store.together():
            store.add(_trial(id="second"))
            store.add(first)  # its id is taken
        assert other.find() == [first]
        with store.together():
            store.add(_trial(id="third"))
        assert [trial.id for trial in other.find()] == ["first", "third"]


@pytest.mark.parametrize("damage", ["garbage", "torn page", "cut short"])
def test_a_damaged_database_is_named_and_left_as_it_is(tmp_path: Path, damage: str) -> None:
    """Opening a damaged file says so and what to do, touches nothing; moved away, it makes room."""
    path = tmp_path / "trials.sqlite"
    with TrialStore(path) as store:
        for _ in range(100):
            store.add(_trial(id=os.urandom(8).hex()))
    data = bytearray(path.read_bytes())
    if damage == "garbage":
        data = bytearray(b"not a database at all" * 1000)
    elif damage == "torn page":
        data[8192:12288] = b"\xff" * 4096
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"trials\.sqlite is damaged .*move it away"):
        TrialStore(path)
    assert path.read_bytes() == data
    path.rename(tmp_path / "aside")
    with TrialStore(path) as store:
        assert store.find() == []


def test_a_disk_that_fails_is_no_damage(tmp_path: Path) -> None:
    """What could not be written says nothing of what is there, which is not to be moved away."""
    path = tmp_path / "trials.sqlite"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TrialStore(path) as store:
        store.add(_trial(id="first"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        try:
            with pytest.raises(
                StoreError, match=r"could not be read or written \(disk I/O error\)"
            ) as raised:
                store.add(_trial(id="second"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert "damaged" not in str(raised.value)
        assert [trial.id for trial in store.find()] == ["first"]


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    """A SQLite file of something else is refused, and not turned into ours."""
    path = tmp_path / "other.sqlite"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE songs (title TEXT)")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="is not a trial database"):
        TrialStore(path)
    db = sqlite3.connect(path)
    assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("songs",)]
    db.close()


def test_a_newer_schema_is_refused(store: TrialStore) -> None:
    """A database from a newer cutegen is refused with both numbers."""
    store.close()
    db = sqlite3.connect(store.path)
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(StoreError, match="schema 7, newer than 1"):
        TrialStore(store.path)


def test_an_unreadable_trial_is_named(store: TrialStore) -> None:
    """A row whose content this version cannot read is an error that names trial and file."""
    store.add(_trial(id="bad"))
    store.close()
    db = sqlite3.connect(store.path)
    db.executescript("DROP TRIGGER trials_stay; UPDATE trials SET timing = '{\"speed\": 1}';")
    db.close()
    with TrialStore(store.path) as again, pytest.raises(StoreError, match=r"trial bad in .*speed"):
        again.find()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A path below a file, or a folder in place of the file, gives a StoreError with the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be created: .*CUTEGEN_CACHE_DIR names another"):
        TrialStore(tmp_path / "file" / "trials.sqlite")
    with pytest.raises(StoreError, match="cannot be written or opened"):
        TrialStore(tmp_path)


def test_a_name_that_no_file_can_have_is_named() -> None:
    with pytest.raises(StoreError, match=r"'a\\x00b' is not a valid file name"):
        TrialStore("a\0b")


def test_read_only_reads_and_refuses_to_write(store: TrialStore) -> None:
    """A read-only store finds trials while another writes, adds nothing, and creates no file."""
    trial = _trial()
    store.add(trial)
    with TrialStore(store.path, read_only=True) as reader:
        assert reader.find() == [trial]
        with pytest.raises(StoreError, match="check its permissions"):
            reader.add(_trial(id="x"))
    with pytest.raises(StoreError, match="does not exist"):
        TrialStore(store.path.with_name("missing"), read_only=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_write_protected_folder_can_still_be_read(store: TrialStore, tmp_path: Path) -> None:
    """A database in a write-protected folder opens read-only and refuses to open for writing."""
    store.add(_trial())
    store.close()
    tmp_path.chmod(0o500)
    store.path.chmod(0o400)
    try:
        with TrialStore(store.path, read_only=True) as reader:
            assert len(reader.find()) == 1
        with pytest.raises(StoreError, match="cannot be written or opened"):
            TrialStore(store.path)
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_is_named(store: TrialStore) -> None:
    """When the file may not grow, the error says so and earlier trials stay."""
    store.add(_trial(id="first"))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match=r"cannot grow .*free space"):
        store.add(_trial(error="x" * 100_000))
    assert [t.id for t in store.find()] == ["first"]


_BEGIN_ON_A_FULL_DISK = """
import resource, sys
from cutegen.errors import StoreError
from cutegen.records.trials import TrialStore
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    TrialStore(sys.argv[1])
except StoreError as error:
    print(error)
"""


def test_a_disk_that_is_full_from_the_start_is_no_damage(tmp_path: Path) -> None:
    """SQLite has ended the transaction then; the message is about what ended it."""
    command = [sys.executable, "-c", _BEGIN_ON_A_FULL_DISK, str(tmp_path / "trials.db")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "trials.db" in said and "I/O" in said and "transaction" not in said


def test_ids_and_times_order_trials(store: TrialStore) -> None:
    """Each trial gets its own id and a UTC time, and the order of adding is kept."""
    trials = [Trial(PROBLEM, "invalid") for _ in range(5)]
    for trial in trials:
        store.add(trial)
    assert len({t.id for t in trials}) == 5
    assert all(t.created_at.endswith("+00:00") for t in trials)
    assert store.find() == trials
