"""AutoTuner from Python: candidates of the caller's, memory, counts, and what lives how long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_engine import DEVICE
from fake_tuning import TOOLCHAIN, Rig, quick_search  # noqa: F401
from test_tuning import ARCH, DEFAULT, PROBLEM, SHAPE, only, rivals

from cutegen.errors import ConfigError, DeviceError, ProblemError, StoreError, UsageError
from cutegen.measure import device as device_module
from cutegen.measure.device import Device
from cutegen.tuning import AutoTuner, Setting, autotuner


def test_given_candidates_are_tried_beside_the_default(tmp_path: Path) -> None:
    """Explicit configs replace the search; the default still competes; illegal ones are refused by name."""
    mine = rivals(1)[0]
    rig = Rig(tmp_path, only({mine: 50.0}))
    assert rig.tuner.tune(*SHAPE, candidates=[mine]).config == mine
    assert set(rig.bench.checked) == {mine.digest, DEFAULT.digest}
    with pytest.raises(ConfigError, match="accumulators"):
        rig.tuner.tune(*SHAPE, candidates=[{**DEFAULT, "tile_shape_mn": (256, 256)}])
    with pytest.raises(UsageError, match="empty"):
        rig.tuner.tune(*SHAPE, candidates=[])
    with pytest.raises(UsageError, match="at least 1"):
        rig.tuner.tune(*SHAPE, candidates=0)


def test_candidates_and_problems_may_be_text(tmp_path: Path) -> None:
    """As configs of operators and problems of ``warm_up``; what is neither is refused by name."""
    mine, line = rivals(1)[0], str(PROBLEM)
    tuner = Rig(tmp_path, only({mine: 50.0})).tuner
    assert tuner.tune_problem(line, candidates=[str(mine)]).config == mine
    tuner = Rig(tmp_path / "usual").tuner
    [one] = tuner.tune_all(line)
    assert tuner.tune_problem(line) is one and one.problem == PROBLEM  # type: ignore[union-attr]
    for given, said in (
        ("tile_k=64", "candidates is 'tile_k=64'; valid: a list of configs"),
        (2.5, r"candidates is 2\.5; valid: a list of configs"),
        ([3], "config is a int; it must be a Config, a mapping"),
        (["tile_k=64"], "config lacks tile_shape_mn"),
        ([{**DEFAULT, "tile_k": [64]}], "holds what no knob may"),
    ):
        with pytest.raises((UsageError, ConfigError), match=said):
            tuner.tune_problem(PROBLEM, candidates=given)  # type: ignore[arg-type]
    for problems in (3, [3]):
        with pytest.raises(UsageError, match="3 is no problem; valid: problems, and lines such as 'gemm "):
            next(tuner.tune_all(problems))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="names no kernel family"):
        tuner.tune_problem("wavelet 8x8")


def test_an_effort_is_checked_at_once() -> None:
    """One that is no effort, and no name of one."""
    for named, said in (
        ({"effort": 3}, "unknown effort 3; valid: quick, standard, exhaustive, or an Effort"),
        ({"effort": None}, "unknown effort None"),
        ({"range_effort": "q"}, "range_effort is 'q'; valid: a RangeEffort, or None"),
        ({"range_effort": 0}, "range_effort is 0"),
    ):
        with pytest.raises(UsageError, match=said):
            AutoTuner("sm_90a", **named)  # type: ignore[arg-type]


def test_names_that_no_file_can_have_are_refused_at_once(tmp_path: Path) -> None:
    for option in ("cache_dir", "db", "table"):
        with pytest.raises(StoreError, match=r"'a\\x00b' is not a valid file name"):
            AutoTuner(device=DEVICE, **{"cache_dir": tmp_path, option: "a\0b"})  # type: ignore[arg-type]


def test_a_seed_and_an_observer_are_checked_at_once() -> None:
    """And not in the middle of a run."""
    for named, said in (
        ({"seed": "a"}, "seed is 'a'; it must be an integer"),
        ({"seed": True}, "seed is True; it must be an integer"),
        ({"observe": None}, "observe is None; it must be a function"),
    ):
        with pytest.raises(UsageError, match=said):
            AutoTuner("sm_90a", **named)  # type: ignore[arg-type]


def test_without_a_gpu_the_message_says_what_works_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Device:
        raise DeviceError("no NVIDIA driver on this machine")

    monkeypatch.setattr(autotuner, "present_device", missing)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver .* name a target: AutoTuner\('sm_90a'\)"):
        AutoTuner()


def test_fixed_knobs_bound_the_search(tmp_path: Path) -> None:
    """Only the default may differ from ``fixed``."""
    rig = Rig(tmp_path)
    result = rig.tuner.tune_problem(PROBLEM, fixed={"tile_shape_mn": ((128, 128),)})
    tiles = {row.config["tile_shape_mn"] for row in result.rows if not row.default}
    assert tiles <= {(128, 128)} and len(rig.bench.checked) > 3


def test_fixed_knobs_have_values_and_bound_given_candidates(tmp_path: Path) -> None:
    """Each at least one that exists, in a tuple; refused before anything runs."""
    rig = Rig(tmp_path)
    for fixed, error, said in (
        ({"tile_k": ()}, UsageError, r"fixed values of tile_k are \(\); valid: a tuple with at least one"),
        ({"tile_k": 64}, UsageError, "fixed values of tile_k are 64; valid: a tuple"),
        ("tile_k=64", UsageError, "fixed is 'tile_k=64'; valid: a mapping"),
        ({"tile_k": (7,)}, ConfigError, "tile_k=7 is not in its domain"),
        ({"tile": (64,)}, ConfigError, "unknown knob 'tile'"),
    ):
        with pytest.raises(error, match=said):
            rig.tuner.tune_problem(PROBLEM, fixed=fixed)  # type: ignore[arg-type]
    mine = rivals(1)[0]
    other = (64, 64) if mine["tile_shape_mn"] != (64, 64) else (128, 64)
    with pytest.raises(ConfigError, match="breaks what is fixed; valid for tile_shape_mn: "):
        rig.tuner.tune_problem(PROBLEM, candidates=[mine], fixed={"tile_shape_mn": (other,)})
    assert not rig.started
    kept = {"tile_shape_mn": (mine["tile_shape_mn"],)}
    assert rig.tuner.request(PROBLEM, [mine], kept).explicit == (mine,)


def test_only_single_sizes_and_known_objectives_are_looked_up(tmp_path: Path) -> None:
    tuner = Rig(tmp_path).tuner
    with pytest.raises(UsageError, match="unknown objective 'q'; valid: time"):
        tuner.get_cached(*SHAPE, objective="q")
    with pytest.raises(UsageError, match=r"m is the range '1\.\.8'; only single sizes are remembered"):
        tuner.get_cached("1..8", 64, 64)  # type: ignore[arg-type]
    assert tuner.cache_hit_rate == 0


def test_the_tuner_remembers_and_counts(tmp_path: Path) -> None:
    """cache, hit rate, totals and history say what happened."""
    tuner = Rig(tmp_path).tuner
    assert tuner.get_cached(*SHAPE) is None
    first = tuner.tune(*SHAPE)
    assert tuner.tune(*SHAPE) is first and tuner.get_cached(*SHAPE) is first
    assert (tuner.cache_size, tuner.total_tunes, tuner.cache_hit_rate) == (1, 1, 0.5)
    assert tuner.cache[PROBLEM] is first
    [entry] = tuner.get_tuning_history()
    assert (entry.problem, entry.best, entry.candidates) == (PROBLEM, first.config, first.candidates)
    assert entry.seconds == first.seconds
    tuner.clear_cache()
    assert (tuner.cache_size, tuner.cache_hit_rate, tuner.total_tunes) == (0, 0.0, 1)


def test_disabled_autotuning_answers_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CUTEGEN_DISABLE_AUTOTUNE=1 nothing is compiled, measured or written."""
    monkeypatch.setenv("CUTEGEN_DISABLE_AUTOTUNE", "1")
    rig = Rig(tmp_path)
    result = rig.tuner.tune(*SHAPE)
    assert result.config == DEFAULT and not result.measured
    assert result.time_us is None and result.ratio is None
    assert result.predicted_us is not None and result.predicted_us > 100
    assert [r.config for r in rig.tuner.tune_all([PROBLEM])] == [DEFAULT]  # type: ignore[union-attr]
    assert not rig.started and not (tmp_path / "trials.db").exists()


def test_only_what_a_problem_alone_leads_to_is_remembered(tmp_path: Path) -> None:
    """A result among given candidates, with fixed knobs or in another context is no answer for others."""
    tuner = Rig(tmp_path).tuner
    tuner.tune(*SHAPE, candidates=1)
    tuner.tune_problem(PROBLEM, fixed={"tile_shape_mn": ((128, 128),)})
    list(tuner.tune_all([PROBLEM], contexts=["alone"]))
    assert tuner.get_cached(*SHAPE) is None and tuner.total_tunes == 3
    [usual] = tuner.tune_all([PROBLEM])
    assert tuner.tune(*SHAPE) is usual


def test_the_gpu_that_was_given_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its UUID among those that the process sees; one that is not there is refused."""
    seen = [replace(DEVICE, uuid="GPU-0"), replace(DEVICE, uuid="GPU-1")]
    driver = SimpleNamespace(integer=lambda name: len(seen))
    monkeypatch.setattr(device_module, "_Driver", lambda: driver)
    monkeypatch.setattr(device_module, "present_device", lambda index: seen[index])
    made: list[int] = []
    monkeypatch.setattr("cutegen.measure.Bench", lambda device: made.append(device))
    for device in reversed(seen):
        Setting.of(ARCH, device, cache_dir=tmp_path, toolchain=TOOLCHAIN).children().bench  # noqa: B018
    assert made == [1, 0]
    gone = Setting.of(ARCH, replace(DEVICE, uuid="GPU-2"), cache_dir=tmp_path, toolchain=TOOLCHAIN)
    with pytest.raises(DeviceError, match=r"GPU-2.* is no GPU that this process sees"):
        gone.children().bench  # noqa: B018


def test_helpers_live_as_long_as_the_context(tmp_path: Path) -> None:
    """Inside ``with`` compiler and bench are shared by calls; outside each call ends its own."""
    rig = Rig(tmp_path)
    with rig.tuner as tuner:
        tuner.tune(*SHAPE)
        tuner.tune(2048, 2048, 2048)
        assert rig.started == {"compiler": 1, "bench": 1} and not rig.bench.closed
    assert rig.bench.closed and rig.compiler.closed


def test_the_setting_follows_the_cache_folder(tmp_path: Path) -> None:
    """Database and table are in the cache folder unless named."""
    setting = Setting.of(ARCH, DEVICE, cache_dir=tmp_path, toolchain=TOOLCHAIN)
    assert setting.db == tmp_path / "trials.db"
    assert setting.table == tmp_path / "tables" / "fake_gpu.json"
    assert (
        Setting.of(ARCH, DEVICE, cache_dir=tmp_path, table=tmp_path / "t.json").table == tmp_path / "t.json"
    )
