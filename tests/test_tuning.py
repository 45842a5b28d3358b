"""The tuning loop, with a compiler and a bench that only pretend."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fake_engine import DEVICE
from fake_tuning import REFERENCE_US, SMALL, TOOLCHAIN, Rig, quick_search, remembered_rank, steady  # noqa: F401
from patient_bench import PatientBench

from cutegen.arch import find_arch
from cutegen.errors import NoWinnerError, ProblemError, StoreError, TableError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space, parse_problem
from cutegen.measure.policy import Policy
from cutegen.records.entry import Fingerprint
from cutegen.records.table import Table
from cutegen.records.trial import Trial
from cutegen.records.trials import TrialStore
from cutegen.search.defaults import default_config
from cutegen.search.strategies import likely
from cutegen.space import Config
from cutegen.tuning import Failed, Request, TuneResult, Tuning
from cutegen.tuning.candidate_runner import CandidateRunner
from cutegen.tuning.progress import Progress
from cutegen.tuning.session import Session

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
SHAPE = (8192, 8192, 8192)
PROBLEM = Problem(*SHAPE)
DEFAULT = default_config(SPACE, PROBLEM)


def view(config: Config) -> Config:
    return SPACE.compile_view(config)


def only(fast: dict[Config, float], rest: float = 200.0) -> object:
    """A behaviour: these kernels take these times, all others ``rest``."""
    times = {view(config): time for config, time in fast.items()}
    return lambda compiled: f"{times.get(compiled, rest):g}"


def rivals(count: int = 2) -> list[Config]:
    """Other kernels that the search proposes, simplest first."""
    seen: dict[Config, Config] = {}
    for config in remembered_rank(SPACE, PROBLEM, 132, SMALL.classes, default=DEFAULT):
        seen.setdefault(view(config), config)
    seen.pop(view(DEFAULT))
    return sorted(seen.values(), key=SPACE.simplicity)[:count]


def trials_of(folder: Path) -> list[Trial]:
    with TrialStore(folder / "trials.db") as store:
        return list(store.find(PROBLEM))


def test_the_likely_are_compiled_while_the_search_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fit puts first is asked for before the ranking, which takes a second; it adds nothing."""
    rig, asked = Rig(tmp_path), []

    def slow_rank(*given: object, **more: object) -> list[Config]:
        asked.append({view(source.config) for source in rig.compiler.queued})
        return remembered_rank(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("cutegen.tuning.proposals.rank", slow_rank)
    result = rig.tuner.tune(*SHAPE)
    expected = likely(SPACE, PROBLEM, 132, SMALL.classes)
    assert {view(config) for config in (DEFAULT, *expected)} <= asked[0] and len(expected) > 2
    plain = Rig(tmp_path / "plain")
    monkeypatch.setattr("cutegen.tuning.proposals.rank", remembered_rank)
    monkeypatch.setattr("cutegen.tuning.proposals.likely", lambda *given: [])
    assert {row.config for row in plain.tuner.tune(*SHAPE).rows} == {row.config for row in result.rows}


def test_the_fastest_wins_and_is_written_down(tmp_path: Path) -> None:
    """The winner is the fastest; table and database hold the evidence."""
    fast = rivals(1)[0]
    rig = Rig(tmp_path, only({fast: 90.0}))
    result = rig.tuner.tune(*SHAPE)
    assert view(result.config) == view(fast)
    assert result.winner.timing is not None and result.winner.timing.ratio == pytest.approx(100 / 90)
    assert result.ratio_to_default is not None and result.ratio_to_default.mid == pytest.approx(200 / 90)
    entry = Table.load(rig.tuner.setting.table).entries[PROBLEM]
    assert entry.config == result.config and entry.source == "cutegen"
    with TrialStore(tmp_path / "trials.db") as store:
        evidence = [store.get(name) for name in entry.trial_ids]
    assert {trial.origin for trial in evidence if trial} == {"cutegen", "torch"}
    assert all(trial and trial.run == result.run and trial.device == DEVICE for trial in evidence)


def test_default_and_torch_always_compete(tmp_path: Path) -> None:
    """However slow, the default is measured with the finalists, and so is torch.mm."""
    rig = Rig(tmp_path, only({rivals(1)[0]: 10.0}, rest=5000.0))
    result = rig.tuner.tune(*SHAPE)
    assert DEFAULT.digest in rig.bench.finals
    assert result.torch is not None and result.torch.median_us == REFERENCE_US
    assert any(row.default for row in result.rows)


def test_what_does_not_beat_the_default_is_no_win(tmp_path: Path) -> None:
    """A candidate faster by less than the margin leaves the default in place."""
    result = Rig(tmp_path, only({DEFAULT: 100.0, rivals(1)[0]: 99.8})).tuner.tune(*SHAPE)
    assert result.config == DEFAULT
    assert result.ratio_to_default is not None and result.ratio_to_default.mid == 1.0


def test_a_tie_goes_to_the_simpler_config(tmp_path: Path) -> None:
    """Of two equals that beat the default the simpler wins, even if the other looks a little faster."""
    simple, other = rivals(2)
    result = Rig(tmp_path, only({simple: 90.0, other: 89.9})).tuner.tune(*SHAPE)
    assert view(result.config) == view(simple)
    assert {view(row.config) for row in result.rows if row.equal} == {view(simple), view(other)}


def test_an_incumbent_stays_unless_it_loses_outside_the_margin(tmp_path: Path) -> None:
    """Tuning again does not flip between equals, but replaces what is really slower."""
    simple, other = rivals(2)
    first = Rig(tmp_path, only({other: 90.0})).tuner.tune(*SHAPE)
    assert view(first.config) == view(other)
    tied = Rig(tmp_path, only({other: 90.0, simple: 89.9}), again=True).tuner.tune(*SHAPE)
    assert tied.config == first.config
    beaten = Rig(tmp_path, only({other: 90.0, simple: 80.0}), again=True).tuner.tune(*SHAPE)
    assert view(beaten.config) == view(simple)


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        ("error", "build_failed"),
        ("abort", "build_failed"),
        ("build-timeout", "build_failed"),
        ("rejected", "build_failed"),
        ("wrong_result", "wrong_result"),
        ("launch_failed", "launch_failed"),
        ("timeout", "timeout"),
        ("breaks", "timeout"),
    ],
)
def test_a_failure_is_recorded_and_the_run_goes_on(tmp_path: Path, behaviour: str, outcome: str) -> None:
    """Whatever becomes of one kernel, the others are tried and the failure is a trial with its reason."""
    bad = rivals(1)[0]
    rig = Rig(tmp_path, lambda config: behaviour if config == view(bad) else steady(config))
    result = rig.tuner.tune(*SHAPE)
    assert view(result.config) != view(bad)
    assert result.outcomes[outcome] >= 1 and result.outcomes["ok"] > 3
    failed = [t for t in trials_of(tmp_path) if t.outcome == outcome]
    assert failed and all(t.error and t.timing is None for t in failed)


def test_a_kernel_that_hangs_is_not_run_again_with_other_arguments(tmp_path: Path) -> None:
    """Of several configs of one artifact the first that hangs or faults speaks for those not yet run."""
    bad = view(rivals(1)[0])
    rig = Rig(tmp_path, lambda c: "timeout" if c == bad else steady(c))
    result = rig.tuner.tune(*SHAPE)
    failed = [t for t in trials_of(tmp_path) if t.outcome == "timeout"]
    ran = [t for t in failed if t.config and t.config.digest in rig.bench.checked]
    assert result.outcomes["timeout"] == len(failed) > len(ran) == 1
    assert all("same kernel" in t.error for t in failed if t not in ran)


def test_a_broken_default_does_not_win_nor_stop_the_run(tmp_path: Path) -> None:
    """When the default itself fails the best of the others wins."""
    result = Rig(tmp_path, lambda c: "wrong_result" if c == view(DEFAULT) else steady(c)).tuner.tune(*SHAPE)
    assert view(result.config) != view(DEFAULT)
    assert result.ratio_to_default is None


def test_if_everything_fails_there_is_no_winner(tmp_path: Path) -> None:
    """All-fail raises with the counts, and leaves no entry."""
    rig = Rig(tmp_path, lambda config: "wrong_result")
    with pytest.raises(NoWinnerError, match="wrong_result") as caught:
        rig.tuner.tune(*SHAPE)
    assert set(caught.value.outcomes) == {"wrong_result"}
    assert not rig.tuner.setting.table.exists()
    assert rig.tuner.total_tunes == 0


def test_if_all_finalists_break_others_take_their_place(tmp_path: Path) -> None:
    """Candidates that break only under settled clocks make room for the next best."""
    rig = Rig(tmp_path)
    real, broken = rig.bench.time, set()

    def time(candidates: list[object], policy: object, keep: list[str]) -> object:
        run = real(candidates, policy, keep)
        if policy == Policy.final() and not broken:
            from cutegen.measure import CheckResult, TimingRun

            broken.update(c.name for c in candidates)
            failures = {name: CheckResult("launch_failed", "illegal access") for name in broken}
            return TimingRun({}, run.reference, failures)
        return run

    rig.bench.time = time
    result = rig.tuner.tune(*SHAPE)
    assert result.config.digest not in broken
    assert result.outcomes["launch_failed"] == len(broken)


def test_one_problem_without_winner_does_not_stop_the_others(tmp_path: Path) -> None:
    """tune_all goes on after a problem whose candidates all fail."""
    small = Problem(64, 7168, 2048)
    bad = {view(c) for c in [default_config(SPACE, small)]}
    rig = Rig(tmp_path, lambda config: "wrong_result" if config not in bad else "50")
    first, second = rig.tuner.tune_all([PROBLEM, small])
    assert isinstance(first, Failed) and isinstance(first.error, NoWinnerError)
    assert isinstance(second, TuneResult) and second.config == default_config(SPACE, small)


@pytest.mark.parametrize("at", [0, 1])
def test_a_problem_that_the_target_cannot_compute_does_not_stop_the_others(tmp_path: Path, at: int) -> None:
    """Hopper has no tf32 here: that is its result, whether it comes first or while another is under way."""
    problems = [PROBLEM, Problem.parse("gemm 64x7168x2048 tf32 kk")]
    results = list(Rig(tmp_path).tuner.tune_all(problems if at else problems[::-1]))
    refused, tuned = results[at], results[1 - at]
    assert isinstance(refused, Failed) and isinstance(refused.error, ProblemError)
    assert "cannot be computed on sm_90a" in str(refused.error)
    assert isinstance(tuned, TuneResult) and tuned.problem == PROBLEM


@pytest.mark.parametrize("steps", [0, 1, 5, 12, 20])
def test_an_interrupted_run_keeps_everything_and_continues(tmp_path: Path, steps: int) -> None:
    """After Ctrl-C the same call tries only what has no outcome yet, and ends like an undisturbed run."""
    whole = Rig(tmp_path / "whole").tuner.tune(*SHAPE)
    stopped = Rig(tmp_path / "part", stop_after=steps)
    with pytest.raises(KeyboardInterrupt):
        stopped.tuner.tune(*SHAPE)
    assert stopped.bench.closed or not stopped.started["bench"]
    assert stopped.compiler.closed
    done = {t.config.digest for t in trials_of(tmp_path / "part") if t.config}
    again = Rig(tmp_path / "part")
    result = again.tuner.tune(*SHAPE)
    assert not done & set(again.bench.checked)
    assert result.config == whole.config
    assert sum(result.outcomes.values()) == sum(whole.outcomes.values())


def test_the_same_question_again_is_answered_from_records(tmp_path: Path) -> None:
    """A finished run starts neither compiler nor bench, and gives the same answer."""
    first = Rig(tmp_path).tuner.tune(*SHAPE)
    rig = Rig(tmp_path)
    second = rig.tuner.tune(*SHAPE)
    assert not rig.started
    assert second.reused and not first.reused
    assert (second.config, second.rows, second.torch) == (first.config, first.rows, first.torch)
    assert (second.outcomes, second.ratio_to_default) == (first.outcomes, first.ratio_to_default)


def test_a_lost_table_is_rebuilt_from_the_trials(tmp_path: Path) -> None:
    """Without the table the recorded timings still answer; nothing is measured again."""
    first = Rig(tmp_path).tuner.tune(*SHAPE)
    rig = Rig(tmp_path)
    rig.tuner.setting.table.unlink()
    second = rig.tuner.tune(*SHAPE)
    assert not rig.started["bench"]
    assert second.config == first.config
    assert Table.load(rig.tuner.setting.table).entries[PROBLEM].config == first.config


def test_a_lost_kernel_is_built_again(tmp_path: Path) -> None:
    """When the winner's artifact is gone from the cache it is compiled again, but not measured."""
    behaviour = only({rivals(1)[0]: 90.0})
    first = Rig(tmp_path, behaviour).tuner.tune(*SHAPE)  # type: ignore[arg-type]
    rig = Rig(tmp_path, behaviour)  # type: ignore[arg-type]
    rig.tuner.setting.store.discard("sm_90a", first.winner.artifact_key)
    second = rig.tuner.tune(*SHAPE)
    assert not rig.bench.checked and rig.started["compiler"]
    assert second.config == first.config
    assert rig.tuner.setting.store.find("sm_90a", first.winner.artifact_key) is not None


def test_asking_for_more_continues_where_the_last_run_ended(tmp_path: Path) -> None:
    """A wider search measures only the new candidates; failures are remembered too."""
    bad = view(rivals(1)[0])
    Rig(tmp_path, lambda c: "timeout" if c == bad else steady(c)).tuner.tune(*SHAPE)
    known = {t.config.digest for t in trials_of(tmp_path) if t.config}
    rig = Rig(tmp_path, lambda c: "timeout" if c == bad else steady(c))
    rig.tuner.tune(*SHAPE, candidates=10)
    assert rig.bench.checked and not known & set(rig.bench.checked)


def test_a_new_driver_voids_what_was_measured(tmp_path: Path) -> None:
    """Timings under another CUDA driver answer nothing, as the table's fingerprint says."""
    Rig(tmp_path).tuner.tune(*SHAPE)
    rig = Rig(tmp_path, device=replace(DEVICE, cuda_driver_version="99.0"))
    assert not rig.tuner.tune(*SHAPE).reused
    assert DEFAULT.digest in rig.bench.checked


def test_again_measures_everything_anew(tmp_path: Path) -> None:
    """With ``again`` the records count for nothing."""
    Rig(tmp_path).tuner.tune(*SHAPE)
    rig = Rig(tmp_path, again=True)
    assert not rig.tuner.tune(*SHAPE).reused
    assert DEFAULT.digest in rig.bench.checked


def test_baseline_wins_only_where_that_is_allowed(tmp_path: Path) -> None:
    """torch.mm takes an entry only on request; cutegen's best is named beside it."""
    own = Rig(tmp_path / "a", only({}, rest=200.0))
    own.tuner.tune(*SHAPE)
    assert Table.load(own.tuner.setting.table).entries[PROBLEM].source == "cutegen"
    free = Rig(tmp_path / "b", only({}, rest=200.0), allow_torch=True)
    result = free.tuner.tune(*SHAPE)
    entry = Table.load(free.tuner.setting.table).entries[PROBLEM]
    assert result.baseline_wins and entry.source == "torch" and entry.time_us == REFERENCE_US


def test_the_budget_ends_the_search_but_not_the_finals(tmp_path: Path) -> None:
    """When time runs out the rest stays untried and the best so far meets the default."""
    rig = Rig(tmp_path)
    ticks = iter(range(10_000))
    setting = rig.tuner.setting
    request = Request(PROBLEM, ARCH, 132, effort=SMALL)
    with TrialStore(setting.db) as trials, setting.children() as children:
        session = Session(setting, children, trials, clock=lambda: float(next(ticks)))
        [result] = Tuning(session).run([request], budget_s=60.0)
    assert isinstance(result, TuneResult) and result.untried > 0
    assert DEFAULT.digest in rig.bench.finals


def test_progress_counts_every_candidate(tmp_path: Path) -> None:
    """The watcher sees stages in order and counts that end at the total."""
    seen: list[Progress] = []
    Rig(tmp_path, observe=seen.append).tuner.tune(*SHAPE)
    stages = list(dict.fromkeys(p.stage for p in seen))
    assert stages[-2:] == ["final", "done"] and "screen" in stages
    assert seen[-1].done == seen[-1].total == sum(seen[-1].outcomes.values())
    assert all(a.done <= b.done for a, b in pairwise(seen))


def test_without_a_gpu_candidates_are_compiled_and_predicted(tmp_path: Path) -> None:
    """For a named target nothing is measured, nothing goes to a table, and trials have no time."""
    rig = Rig(tmp_path, device=None, arch="sm_90a")
    result = rig.tuner.tune(*SHAPE)
    assert not result.measured and result.device == "" and not rig.started["bench"]
    times = [row.predicted_us for row in result.rows]
    assert times == sorted(times) and all(row.timing is None for row in result.rows)
    assert rig.tuner.setting.table is None and not (tmp_path / "tables").exists()
    trials = trials_of(tmp_path)
    assert len(trials) == len(result.rows) and all(t.timing is None and t.device is None for t in trials)
    Rig(tmp_path, device=None, arch="sm_90a").tuner.tune(*SHAPE)
    assert len(trials_of(tmp_path)) == len(trials), "a rerun writes nothing twice"


def test_without_a_model_the_default_leads_and_nothing_is_predicted(tmp_path: Path) -> None:
    """For a target whose speed nobody described, candidates stay in the order in which they were tried."""
    problem = parse_problem("gemm_blockscaled 4096x4096x4096 mxfp8_e4m3 kk")
    result = Rig(tmp_path, device=None, arch="sm_100a").tuner.tune_problem(problem)
    assert result.rows[0].default and len(result.rows) > 1
    assert all(row.predicted_us is None and row.time_us is None for row in result.rows)


def test_without_a_gpu_no_compiling_candidate_is_no_winner(tmp_path: Path) -> None:
    """If nothing compiles there is nothing to predict."""
    with pytest.raises(NoWinnerError, match="build_failed"):
        Rig(tmp_path, lambda c: "error", device=None, arch="sm_90a").tuner.tune(*SHAPE)


def test_what_had_no_memory_to_compile_is_tried_again(tmp_path: Path) -> None:
    """Another run compiles it; what the compiler refused stays refused."""
    killed, refused = map(view, rivals(2))
    acts = {killed: "killed", refused: "error"}
    first = Rig(tmp_path, lambda c: acts.get(c, steady(c)))
    assert first.tuner.tune(*SHAPE).outcomes["build_interrupted"]
    second = Rig(tmp_path, seed=1)
    second.tuner.tune(*SHAPE)
    assert {view(source.config) for source in second.compiler.compiled} >= {killed}
    assert refused not in {view(source.config) for source in second.compiler.compiled}


def test_a_tuner_goes_on_after_the_disk_was_full(tmp_path: Path) -> None:
    """The run ends in the error; the next one asks for that kernel again, and for no other twice."""
    full = {view(rivals(1)[0])}
    rig = Rig(tmp_path, lambda c: "store" if c in full else steady(c))
    with rig.tuner as tuner:
        with pytest.raises(StoreError, match="it went wrong: store"):
            tuner.tune(*SHAPE)
        full.clear()
        assert tuner.tune(*SHAPE).measured
    made = [source.digest for source in rig.compiler.compiled]
    assert sorted(Counter(made).values())[-2:] == [1, 2]


def test_one_tuner_tries_again_what_had_no_memory(tmp_path: Path) -> None:
    """In its next run, as another process would; what compiled is not compiled again."""
    killed = {view(rivals(1)[0])}
    rig = Rig(tmp_path, lambda c: "killed" if c in killed else steady(c), again=True)
    with rig.tuner as tuner:
        assert tuner.tune(*SHAPE).outcomes["build_interrupted"]
        killed.clear()
        assert not tuner.tune_problem(PROBLEM, candidates=rivals(1)).outcomes["build_interrupted"]
    made = Counter(view(source.config) for source in rig.compiler.compiled)
    assert made[view(rivals(1)[0])] == 2 and set(made.values()) == {1, 2}


def test_fetching_kernels_does_not_wait_for_the_incumbent(tmp_path: Path) -> None:
    """Where the order of configs matters, the incumbent goes first; without time it is never compiled."""
    incumbent, other = rivals(2)
    rig = Rig(tmp_path)
    setting = rig.tuner.setting
    with TrialStore(setting.db) as trials, setting.children() as children:
        session = Session(setting, children, trials)
        request = rig.tuner.request(PROBLEM)
        ledger = session.ledger(request, "run")
        runner = CandidateRunner(request, session, ledger, default=DEFAULT, incumbent=incumbent)
        runner._strict = True
        fetched = runner.admit([DEFAULT, other])
        runner.attempts[incumbent] = replace(fetched[1], config=incumbent)  # never submitted
        runner.fetch(fetched)
        assert all(attempt.artifact is not None for attempt in fetched)


def test_a_table_from_elsewhere_is_never_overwritten(tmp_path: Path) -> None:
    """A named table of another GPU is refused before anything runs; the cache's own is set aside."""
    rig = Rig(tmp_path)
    rig.tuner.tune(*SHAPE)
    path = rig.tuner.setting.table
    path.write_text(path.read_text().replace('"Fake GPU"', '"Other GPU"'))
    named = Rig(tmp_path, table=path)
    with pytest.raises(TableError, match="Other GPU"):
        named.tuner.tune(*SHAPE)
    assert not named.started
    Rig(tmp_path).tuner.tune(*SHAPE)
    assert Table.load(path).fingerprint.gpu_name == "Fake GPU"
    assert len(list(path.parent.glob("*until*"))) == 1


def test_a_table_that_grew_stale_under_a_run_is_set_aside(tmp_path: Path) -> None:
    """Another program may write the cache's table for other software while this one measures."""
    rig = Rig(tmp_path)
    path = rig.tuner.setting.table
    stale = Table(replace(Fingerprint.of(DEVICE), gpu_name="Other GPU"))

    def late(event: object) -> None:
        if getattr(event, "stage", "") == "screen":
            stale.save(path)

    Rig(tmp_path, observe=late).tuner.tune(*SHAPE)
    assert PROBLEM in Table.load(path).entries
    assert len(list(path.parent.glob("*until*"))) == 1


def test_a_malformed_table_of_the_cache_is_set_aside(tmp_path: Path) -> None:
    """Tuning begins a new one, and keeps the old; a file that the user named is refused."""
    rig = Rig(tmp_path)
    rig.tuner.tune(*SHAPE)
    path = rig.tuner.setting.table
    path.write_text("{")
    with pytest.raises(TableError, match="is not JSON"):
        Rig(tmp_path, table=path).tuner.tune(*SHAPE)
    Rig(tmp_path).tuner.tune(*SHAPE)
    assert PROBLEM in Table.load(path).entries
    assert [aside.read_text() for aside in path.parent.glob("*until*")] == ["{"]


@pytest.mark.parametrize("knob", ["use_pdl", "warps"])
def test_an_entry_whose_config_is_of_another_version_does_not_compete(tmp_path: Path, knob: str) -> None:
    """A knob that it lacks, or that is unknown here, makes it no candidate; tuning replaces it."""
    rig = Rig(tmp_path)
    best = rig.tuner.tune(*SHAPE).config
    path = rig.tuner.setting.table
    table = json.loads(path.read_text())
    [entry] = table["entries"].values()
    if entry["config"].pop(knob, None) is None:
        entry["config"][knob] = 4
    path.write_text(json.dumps(table))
    assert Rig(tmp_path).tuner.tune(*SHAPE).config == best
    assert Table.load(path).entries[PROBLEM].config == best


def test_a_real_measuring_process_survives_what_candidates_do(tmp_path: Path) -> None:
    """A crash, a hang, a fault and wrong numbers in the real child process cost themselves only."""
    evil = ["crashes", "hangs", "wrong", "time-breaks"]
    good, *others = rivals(len(evil) + 1)
    bad = dict(zip(map(view, others), evil, strict=True))

    acts = lambda c: bad.get(c, "ok:8" if c == view(good) else "ok:9")  # noqa: E731
    rig = Rig(tmp_path, acts, bench=lambda: PatientBench(3.0))
    result = rig.tuner.tune(*SHAPE)
    assert view(result.config) == view(good)
    assert result.winner.timing is not None and result.winner.timing.median_us == pytest.approx(8)
    assert result.torch is not None and result.torch.reference == "torch.mm"
    assert set(result.outcomes) == {"ok", "launch_failed", "timeout", "wrong_result"}
