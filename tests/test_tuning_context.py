"""Which kernel wins depends on what runs before a launch; records, tables and results say what did."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fake_tuning import SMALL, FakeBench, Rig, quick_search  # noqa: F401
from test_cli import gpu, tune  # noqa: F401
from test_tuning import ARCH, PROBLEM, SHAPE, rivals, trials_of, view

from cutegen.errors import UsageError
from cutegen.families.registry import find_space, parse_problem
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS, OVERLAPPING
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.entry import Entry
from cutegen.records.table import Table
from cutegen.records.trials import TrialStore
from cutegen.search.defaults import default_config
from cutegen.search.twins import alone, overlapped
from cutegen.space import Config
from cutegen.tuning.finalists import choose_winner


def overlapping(config: Config) -> str:
    """One kernel is fast behind itself alone, another anywhere, the rest nowhere."""
    first, second = map(view, rivals(2))
    return {first: "80~95", second: "90"}.get(config, "200")


def entry(rig: Rig) -> Entry:
    table = rig.tuner.setting.table
    assert table is not None
    return Table.load(table).entries[PROBLEM]


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_winner_is_that_of_the_context(tmp_path: Path, context: str) -> None:
    """Overlapping with a launch of its own pays back to back only; everything written says the context."""
    rig = Rig(tmp_path, overlapping, context=context)
    result = rig.tuner.tune(*SHAPE)
    winner = 0 if context == BACK_TO_BACK else 1
    assert view(result.config) == view(rivals(2)[winner])
    assert {policy.context for policy, _ in rig.bench.timed} == {context}
    found = entry(rig)
    assert (found.context, result.context) == (context, context)
    assert {t.policy.context for t in trials_of(tmp_path) if t.policy} == {context}


def test_winners_are_chosen_as_in_a_model_unless_told_otherwise(tmp_path: Path) -> None:
    """Behind another kernel."""
    assert Rig(tmp_path).tuner.tune(*SHAPE).context == "behind"
    with pytest.raises(
        UsageError, match="launch context 'between'; valid: alone, behind, overlapping, back_"
    ):
        Rig(tmp_path, context="between")


def test_times_of_another_context_do_not_answer(tmp_path: Path) -> None:
    """They are kept, and answer where they belong."""
    Rig(tmp_path, overlapping, context=BACK_TO_BACK).tuner.tune(*SHAPE)
    behind = Rig(tmp_path, overlapping)
    assert not behind.tuner.tune(*SHAPE).reused and behind.bench.timed
    again = Rig(tmp_path, overlapping)
    assert again.tuner.tune(*SHAPE).reused and not again.bench.timed


def test_trials_of_version_0_1_answer_for_launches_back_to_back(tmp_path: Path) -> None:
    """Their policy has no context, and its digest is what it was; so are those that are written today."""
    rig = Rig(tmp_path, overlapping, context=BACK_TO_BACK)
    rig.tuner.tune(*SHAPE)
    screen = Policy.screen(loaded=True, context=BACK_TO_BACK)
    with TrialStore(rig.tuner.setting.db) as trials:
        found = trials.find(PROBLEM, policy="3395f88ce5de")  # Policy.screen(loaded=True) of version 0.1
        assert found and {t.policy for t in found} == {screen}
        with closing(trials._db.execute("SELECT policy FROM trials WHERE timing IS NOT NULL")) as rows:
            assert all("context" not in json.loads(row["policy"]) for row in rows)


def test_a_table_of_version_0_1_was_made_back_to_back(tmp_path: Path) -> None:
    """It does not say so; its winner competes in a run for another context, and the result replaces it."""
    rig = Rig(tmp_path, overlapping, context=BACK_TO_BACK)
    first = rig.tuner.tune(*SHAPE)
    path = rig.tuner.setting.table
    assert path is not None
    data = json.loads(path.read_text())
    assert data["entries"][str(PROBLEM)].pop("context") == BACK_TO_BACK
    path.write_text(json.dumps(data))
    assert Table.load(path).entries[PROBLEM].context == BACK_TO_BACK
    behind = Rig(tmp_path, overlapping)
    result = behind.tuner.tune(*SHAPE)
    assert first.config in [row.config for row in result.rows] and result.config != first.config
    assert Table.load(path).entries[PROBLEM].context == "behind"


def test_a_finished_run_is_recalled_only_for_its_context(tmp_path: Path) -> None:
    """An entry that somebody edited to another context is not the result of this run."""
    rig = Rig(tmp_path, overlapping)
    rig.tuner.tune(*SHAPE)
    path = rig.tuner.setting.table
    assert path is not None
    table = Table.load(path)
    table.with_entries([replace(table.entries[PROBLEM], context="alone")]).save(path)
    again = Rig(tmp_path, overlapping)
    again.tuner.tune(*SHAPE)
    assert Table.load(path).entries[PROBLEM].context == "behind"


def test_the_command_shows_the_context(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the headline and in JSON; predictions have none."""
    shape = "x".join(map(str, SHAPE))
    assert tune("--shape", shape) == 0
    assert ", timed behind, " in " ".join(capsys.readouterr().out.split())
    assert tune("--shape", shape, "--context", BACK_TO_BACK, "--json") == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["context"] == BACK_TO_BACK
    with pytest.raises(SystemExit, match="2"):
        tune("--shape", shape, "--context", "between")
    assert "choose from" in capsys.readouterr().err
    assert tune("--shape", shape, "--context", "alone", "--json", "--arch", "sm_90a") == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["context"] is None


def test_a_winner_behind_another_kernel_does_not_lose_back_to_back(tmp_path: Path) -> None:
    """Of two that are near each other behind it the one that is faster back to back wins; both are kept."""
    first, second = map(view, rivals(2))
    for near, winner in (("80~91.5", second), ("80~92.5", first)):
        times = {first: "100~90", second: near}
        rig = Rig(tmp_path / near, lambda config, times=times: times.get(config, "200"))
        result = rig.tuner.tune(*SHAPE)
        assert view(result.config) == winner
        [trial] = [t for t in trials_of(tmp_path / near) if t.id == result.winner.trial]
        assert trial.timing is not None
        assert trial.timing.back_to_back_us == float(times[winner].partition("~")[0])


@pytest.mark.parametrize(
    ("line", "context", "wins"),
    [
        ("rmsnorm 256x16384 bf16", "behind", False),
        ("rmsnorm 256x16384 bf16", "alone", False),
        ("rmsnorm 256x16384 bf16", OVERLAPPING, True),
        ("gemm 256x512x512 bf16 kk", "behind", True),
    ],
)
def test_overlap_counts_back_to_back_where_defaults_overlap(line: str, context: str, wins: bool) -> None:
    """Or where launches around do: a kernel that overlaps is 0.7 % behind, and 20 % faster back to back."""
    problem = parse_problem(line)
    space = find_space(problem.family, ARCH)
    default = default_config(space, problem, 132)
    without = alone(space, problem, default, {})
    within = overlapped(space, problem, default, {})
    assert default == (within if problem.family == "gemm" else without) and within != without
    timings = {without: both(100.0, 100.0), within: both(100.7, 80.0)}
    choice = choose_winner(space, timings, default=default, context=context)
    assert choice.config == (within if wins else without)


def both(behind_us: float, back_to_back_us: float) -> Timing:
    return Timing(
        behind_us,
        behind_us,
        behind_us,
        15,
        ratio=1.0,
        back_to_back_us=back_to_back_us,
        back_to_back_low_us=back_to_back_us,
        back_to_back_high_us=back_to_back_us,
    )


def test_the_fastest_back_to_back_of_those_screened_become_finalists(tmp_path: Path) -> None:
    """However many are faster behind another kernel: without them, none that is faster so could win."""
    *others, last = map(view, rivals(4))
    times = {**{config: f"100~{90 + at / 10}" for at, config in enumerate(others)}, last: "80~91"}
    effort = replace(SMALL, finalists=1)
    result = Rig(tmp_path, lambda config: times.get(config, "200"), effort=effort).tuner.tune(*SHAPE)
    assert len(others) > 1 and view(result.config) == last


def test_a_winner_loses_neither_under_load_nor_in_bursts(tmp_path: Path) -> None:
    """Of two that are within 1 % under load the one that is faster in bursts wins; both regimes are kept."""
    first, second = map(view, rivals(2))
    times = {first: "90!85", second: "90.6!80"}
    rig = Rig(tmp_path, lambda config: times.get(config, "200"))
    result = rig.tuner.tune(*SHAPE)
    assert view(result.config) == second
    [trial] = [t for t in trials_of(tmp_path) if t.id == result.winner.trial]
    assert trial.timing is not None and trial.timing.burst_us == 80
    assert (trial.timing.median_us, trial.timing.burst_ratio) == (pytest.approx(90.6), pytest.approx(1.25))
    again = Rig(tmp_path, lambda config: times.get(config, "200")).tuner.tune(*SHAPE)
    assert again.reused and again.config == result.config


def test_a_winner_keeps_up_with_the_library_in_both_if_another_does(tmp_path: Path) -> None:
    """Though it loses more under load than the fastest there loses in bursts; the library takes 100 us."""
    first, second = map(view, rivals(2))
    for name, times, winner in (
        ("one", {first: "94!103", second: "98!100"}, second),
        ("none", {first: "94!105", second: "98!102"}, first),
        ("both", {first: "94!101", second: "98!98"}, first),
    ):
        rig = Rig(tmp_path / name, lambda config, known=times: known.get(config, "200"))  # type: ignore[misc]
        assert view(rig.tuner.tune(*SHAPE).config) == winner, name


def test_the_fastest_in_bursts_reach_the_finals(tmp_path: Path) -> None:
    """Though there is no place for them among the fastest under load; there they may lose less."""
    *fast, steady = map(view, rivals(5))
    times = {config: f"{90 + at / 10:g}!85" for at, config in enumerate(fast)} | {steady: "93!80"}
    rig = Rig(tmp_path, lambda config: times.get(config, "200!200"), effort=replace(SMALL, finalists=2))
    result = rig.tuner.tune(*SHAPE)
    assert steady in {view(row.config) for row in result.rows}
    assert view(result.config) == steady


def test_bursts_are_shown(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a column of their own, where somebody was timed so."""
    gpu.behaviour = lambda config: "90!80"
    assert tune("--shape", "x".join(map(str, SHAPE)), "--wide") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "in bursts" in next(line for line in lines if "TFLOP/s" in line)
    assert "1.250" in next(line for line in lines if line.startswith("  best "))
