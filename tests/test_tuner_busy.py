"""Tuning beside other users of the GPU: told, waited for, measured once more, written down."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_engine import DEVICE
from fake_tuning import SMALL, TOOLCHAIN, FakeBench, FakeCompiler, Rig, quick_search  # noqa: F401
from fake_watch import NOTEBOOK, OURS, TRAINING, FakeWatch

import cutegen.cli.tune
from cutegen.build.store import Store
from cutegen.cli.report import document, result_lines
from cutegen.errors import DeviceError, TableError, UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure import contention
from cutegen.measure.contention import Guard
from cutegen.records.entry import Entry
from cutegen.records.table import Table
from cutegen.records.trial import Trial
from cutegen.records.trials import TrialStore
from cutegen.runtime.answer_lookup import look_up
from cutegen.search.defaults import default_config
from cutegen.tuning import AutoTuner, TuneResult, guarded_bench
from cutegen.tuning.backends import Backends, Children

SHAPE = (4096, 4096, 4096)
PROBLEM = Problem(*SHAPE)
SPACE = find_space("gemm", DEVICE.arch)
ALONE, SHARED = (OURS, NOTEBOOK), (OURS, TRAINING)


def tuned(
    folder: Path, watch: FakeWatch, busy: str = "warn", problems: int = 1, **options: object
) -> tuple[Rig, list[TuneResult]]:
    rig = Rig(folder, watch=lambda: watch, busy=busy, **options)
    shapes = [PROBLEM, Problem(64, 7168, 2048)][:problems]
    results = [result for result in rig.tuner.tune_all(shapes) if isinstance(result, TuneResult)]
    assert len(results) == problems
    return rig, results


def trials_of(folder: Path) -> list[Trial]:
    with TrialStore(folder / "trials.db") as store:
        return [trial for trial in store.find(PROBLEM) if trial.timing]


def test_an_idle_gpu_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said, marked or measured twice; NVML is let go of."""
    watch = FakeWatch(ALONE)
    rig, [result] = tuned(tmp_path, watch, "refuse")
    plain, _ = tuned(tmp_path / "plain", FakeWatch(complete=False), "wait")
    assert [names for _, names in rig.bench.timed] == [names for _, names in plain.bench.timed]
    assert not result.contended_by and not caplog.records and watch.closed
    assert not any(trial.timing and trial.timing.contended_by for trial in trials_of(tmp_path))
    assert "contended" not in rig.tuner.setting.table.read_text()


def test_refusing_measures_nothing(tmp_path: Path) -> None:
    """The first rounds are not begun; the error is one of the environment, not of the problem."""
    rig = Rig(tmp_path, watch=lambda: FakeWatch(SHARED), busy="refuse")
    with pytest.raises(DeviceError, match=r"in use by pid 30 \(train"):
        rig.tuner.tune(*SHAPE)
    assert not rig.bench.timed and not rig.tuner.setting.table.exists() and rig.bench.closed


def test_waiting_measures_when_the_gpu_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a run waits, says for whom, and is then as good as any."""
    monkeypatch.setattr(contention, "_LOOK_S", 0.0)
    with caplog.at_level(logging.WARNING, logger="cutegen"):
        _, [result] = tuned(tmp_path, FakeWatch(SHARED, SHARED, ALONE), "wait")
    assert not result.contended_by
    [record] = caplog.records
    assert "pid 30 (train" in record.getMessage() and "waiting" in record.getMessage()


def test_going_on_marks_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trials, the table's entry, the result and what is printed say that the GPU was shared, and by whom."""
    with caplog.at_level(logging.WARNING, logger="cutegen"):
        rig, [result] = tuned(tmp_path, FakeWatch(SHARED))
    who = "pid 30 (train, 50.0 GB, 97 % of the time)"
    assert len(caplog.records) == 1 and who in caplog.text
    assert result.contended_by == who
    trials = trials_of(tmp_path)
    assert trials and {t.timing.contended_by for t in trials if t.timing} == {who}
    entry = Table.load(rig.tuner.setting.table).entries[PROBLEM]
    assert entry.contended_by == who
    with pytest.raises(TableError, match="contended_by is 3, not text"):
        Entry.from_json(PROBLEM, {**entry.to_json(), "contended_by": 3})
    assert any(f"contended: {who}" in line for line in result_lines("S", result))
    [row] = document({"S": result}, {})["results"]  # type: ignore[misc]
    assert row["candidates"][0]["timing"]["contended_by"] == who
    answer = look_up(Table.load(rig.tuner.setting.table), PROBLEM, SPACE, 132)
    assert "timed beside other work" in str(answer)


def test_disturbed_rounds_are_measured_once_more(tmp_path: Path) -> None:
    """Whoever comes and goes while a batch is timed costs that batch a second run, and leaves no mark."""
    calm, _ = tuned(tmp_path / "calm", FakeWatch(ALONE))
    rig, [result] = tuned(tmp_path, FakeWatch(ALONE, ALONE, SHARED, ALONE), "refuse")
    assert len(rig.bench.timed) == len(calm.bench.timed) + 1
    assert rig.bench.timed[0] == rig.bench.timed[1] and not result.contended_by


def test_rounds_disturbed_twice_are_marked(tmp_path: Path) -> None:
    """A second disturbance is written down instead of a third run."""
    crowds = [ALONE, ALONE, SHARED, ALONE, SHARED, ALONE]
    calm, _ = tuned(tmp_path / "calm", FakeWatch(ALONE))
    rig, [result] = tuned(tmp_path, FakeWatch(*crowds), "wait")
    assert len(rig.bench.timed) == len(calm.bench.timed) + 1
    marked = [t for t in trials_of(tmp_path) if t.timing and t.timing.contended_by]
    assert len(marked) == len(rig.bench.timed[0][1]) and not result.contended_by


def test_who_hung_is_not_run_again(tmp_path: Path) -> None:
    """The second run leaves out whoever broke in the first: a hang costs seconds."""
    space = find_space("gemm", DEVICE.arch)
    usual = default_config(space, PROBLEM, DEVICE.sm_count)["tile_shape_mn"]
    hangs = lambda config: "50" if config["tile_shape_mn"] == usual else "breaks"  # noqa: E731
    rig = Rig(tmp_path, hangs, watch=lambda: FakeWatch(ALONE, ALONE, SHARED, ALONE), busy="warn")
    result = rig.tuner.tune(*SHAPE)
    first, second = rig.bench.timed[0][1], rig.bench.timed[1][1]
    assert set(second) < set(first) and result.outcomes["timeout"] >= 1


def test_disturbed_timings_are_not_remembered(tmp_path: Path) -> None:
    """The same command measures anew once the GPU is free, and from then on answers from the records."""
    tuned(tmp_path, FakeWatch(SHARED))
    rig, [again] = tuned(tmp_path, FakeWatch(ALONE))
    assert rig.bench.timed and not again.reused and not again.contended_by
    assert not Table.load(rig.tuner.setting.table).entries[PROBLEM].contended_by
    rig, [third] = tuned(tmp_path, FakeWatch(ALONE))
    assert third.reused and not rig.bench.timed
    rig = Rig(tmp_path / "one", watch=lambda: FakeWatch(SHARED), busy="warn")
    rig.tuner.tune(*SHAPE)
    count = len(rig.bench.timed)
    rig.tuner.tune(*SHAPE)
    assert len(rig.bench.timed) > count, "nor does the object itself"


def test_looks_that_take_time_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container: before the first problem is opened, and after the rounds that decide each.

    A quick run looks when nobody has looked for ten seconds, which no problem takes here.
    """
    monkeypatch.setattr(guarded_bench, "_LOOK_AFTER_S", 1e9)
    watch = FakeWatch(complete=False, percents=(0.0,))
    tuned(tmp_path, watch, "refuse", problems=2)
    assert watch.readings == 3
    quick = FakeWatch(complete=False, percents=(0.0,))
    tuned(tmp_path / "quick", quick, "refuse", problems=2, effort=replace(SMALL, at_once=True))
    assert quick.readings == 1


def test_a_look_grows_old(tmp_path: Path) -> None:
    """Problems that are opened more than ten seconds after the last thorough look are looked at anew."""
    watch, now = FakeWatch(complete=False, percents=(0.0,)), [0.0]
    children = Children(
        lambda: FakeCompiler(Store(tmp_path)), FakeBench, lambda: Guard(watch, "refuse"), clock=lambda: now[0]
    )
    for seconds, readings in ((0.0, 1), (9.0, 1), (10.5, 2), (15.0, 2)):
        now[0] = seconds
        children.guarded.open(PROBLEM)
        assert watch.readings == readings


@pytest.mark.parametrize(("words", "status"), [("", 0), ("--busy warn", 0), ("--busy refuse", 3)])
def test_the_command_asks_in_the_same_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    status: int,
) -> None:
    """--busy goes to the tuner, whose default it shares; a refusal is exit code 3 and names the process."""
    crowds = [(OURS,)] if not words else [(OURS, TRAINING)]
    tuner = partial(
        AutoTuner,
        effort=SMALL,
        backends=Backends(lambda: FakeCompiler(Store(tmp_path)), FakeBench, lambda: FakeWatch(*crowds)),
    )
    given: dict[str, object] = {}

    def make(*args: object, **options: object) -> AutoTuner:
        given.update(options)
        return tuner(*args, **{**options, "toolchain": TOOLCHAIN})  # type: ignore[arg-type]

    monkeypatch.setattr(cutegen.cli.tune, "AutoTuner", make)
    monkeypatch.setattr(cutegen.cli.tune, "present_device", lambda: DEVICE)
    monkeypatch.setenv("CUTEGEN_CACHE_DIR", str(tmp_path))
    assert cutegen.cli.tune.main(["gemm", "--shape", "4096x4096x4096", *words.split()]) == status
    out, err = capsys.readouterr()
    assert given["busy"] == (words.split()[-1] if words else "wait")
    assert ("in use by pid 30 (train" in err) == (status == 3) and ("contended: " in out) == ("warn" in words)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match="busy='ignore' is unknown"):
        AutoTuner("sm_90a", cache_dir=tmp_path, busy="ignore")
