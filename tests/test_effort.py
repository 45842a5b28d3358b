"""How much a tuning run tries: one set of rounds that finds and decides, twins, and where the seconds go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_tuning
import pytest
from fake_tuning import SMALL, FakeBench, Rig, quick_search  # noqa: F401
from test_cli import gpu, tune  # noqa: F401
from test_tuning import DEFAULT, PROBLEM, SHAPE, SPACE, rivals, trials_of, view

from cutegen.arch import find_arch
from cutegen.errors import NoWinnerError, UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space, parse_problem
from cutegen.measure.context import BACK_TO_BACK, OVERLAPPING
from cutegen.measure.operand_sets import COPY
from cutegen.measure.policy import Policy
from cutegen.records.table import Table
from cutegen.records.trials import TrialStore
from cutegen.search.twins import alone, aside_from_overlap, overlapped, with_twins
from cutegen.space import Config, Value
from cutegen.tuning import EFFORTS, Effort, Request
from cutegen.tuning.proposals import Proposals
from cutegen.tuning.range_request import SizeRequest
from cutegen.tuning.request import find_effort
from cutegen.tuning.session import Session
from cutegen.tuning.sweep import Tuning

QUICK = replace(SMALL, at_once=True, refine=0, refinements=0, finalists=3)
ARCH = find_arch("sm_90a")
STAGES = ("propose", "open", "compile", "check", "screen", "refine", "final")


def steps(winner: Config) -> object:
    """A behaviour: one kernel is fast, the others ever slower."""
    ranks = {view(config): 110.0 + at for at, config in enumerate(rivals(10))}
    return lambda config: "90" if config == view(winner) else f"{ranks.get(config, 150.0):g}"


def test_quick_finds_and_decides_in_one_set_of_rounds(tmp_path: Path) -> None:
    """The fastest wins; everybody is a trial of that one measurement, the best few are shown."""
    winner = rivals(1)[0]
    rig = Rig(tmp_path, steps(winner), effort=QUICK)  # type: ignore[arg-type]
    result = rig.tuner.tune(*SHAPE)
    [(policy, names)] = rig.bench.timed
    assert policy == Policy.quick(loaded=True)
    assert DEFAULT.digest in names and len(names) == result.candidates
    assert view(result.config) == view(winner) and result.ratio is not None
    assert result.ratio.mid == pytest.approx(100 / 90)
    assert result.ratio_to_default is not None and result.ratio_to_default.mid > 1
    assert len(result.rows) <= 3 + 1 and any(row.default for row in result.rows)
    trials = [t for t in trials_of(tmp_path) if t.timing]
    assert len(trials) == len(names) + 1 and {t.policy for t in trials} == {policy}
    assert rig.tuner.setting.table is not None
    entry = Table.load(rig.tuner.setting.table).entries[PROBLEM]
    assert entry.config == result.config and len(entry.trial_ids) == 3 and entry.energy_mj is None


def test_where_the_library_is_ahead_a_second_set_of_rounds_tries_more(tmp_path: Path) -> None:
    """Beside the best of the first; that set decides, and the run is recalled as it ended.

    What is new overlaps launches no more than the best did.
    """

    def overlap(config: Config) -> tuple[bool, str]:
        return config.flag("use_pdl"), str(config)

    effort = replace(QUICK, classes=4, rescue=4, twins=1)
    Rig(tmp_path / "first", lambda config: "101", effort=replace(effort, rescue=0)).tuner.tune(*SHAPE)
    first = {view(trial.config) for trial in trials_of(tmp_path / "first") if trial.config}
    times = {config: f"{101 + at:g}" for at, config in enumerate(sorted(first, key=overlap))}
    rig = Rig(tmp_path, lambda config: times.get(config, "98"), effort=effort)
    result = rig.tuner.tune(*SHAPE)
    (_, before), (_, after) = rig.bench.timed
    assert set(before) != set(after) and DEFAULT.digest in after and len(after) > 4
    assert result.config.digest in after and result.config.digest not in before
    assert all(row.config.digest in after for row in result.rows)
    new = [t.config for t in trials_of(tmp_path) if t.config and t.config.digest in {*after} - {*before}]
    assert new and not any(config["use_pdl"] for config in new)
    again = Rig(tmp_path, effort=effort).tuner.tune(*SHAPE)
    assert again.reused and [row.config for row in again.rows] == [row.config for row in result.rows]


def test_where_the_best_is_ahead_of_the_library_one_set_decides(tmp_path: Path) -> None:
    """As it does where no second one is asked for."""
    for name, time_us, rescue, sets in (("a", "99", 4, 1), ("b", "101", 0, 1), ("c", "101", 4, 2)):
        rig = Rig(tmp_path / name, lambda config, us=time_us: us, effort=replace(QUICK, rescue=rescue))  # type: ignore[misc]
        rig.tuner.tune(*SHAPE)
        assert len(rig.bench.timed) == sets


@pytest.mark.parametrize(("shape", "sets"), [((4096, 4096, 4096), 1), ((64, 4096, 4096), 2)])
def test_a_copy_tells_nothing_where_power_limits(
    shape: tuple[int, int, int], sets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All take longer than one; where memory limits, the best had better not."""
    plain = fake_tuning.timing
    monkeypatch.setattr(fake_tuning, "timing", lambda us: replace(plain(us), reference=COPY))
    rig = Rig(tmp_path, lambda config: "120", effort=replace(QUICK, classes=4, rescue=4))
    rig.tuner.tune(*shape)
    assert len(rig.bench.timed) == sets


def test_a_quick_run_that_was_finished_is_recalled(tmp_path: Path) -> None:
    """With the same rows, and nothing is run."""
    first = Rig(tmp_path, effort=QUICK).tuner.tune(*SHAPE)
    rig = Rig(tmp_path, effort=QUICK)
    again = rig.tuner.tune(*SHAPE)
    assert again.reused and not rig.started and not again.stages
    assert [row.config for row in again.rows] == [row.config for row in first.rows]


def test_rounds_that_decide_hold_everybody(tmp_path: Path) -> None:
    """Timings of an earlier quick run do not stand beside new ones; what failed is not tried again."""
    broken, fine = rivals(2)
    behave = lambda config: "wrong_result" if config == view(broken) else "100"  # noqa: E731
    Rig(tmp_path, behave, effort=replace(QUICK, classes=3)).tuner.tune(*SHAPE, candidates=[broken, fine])
    rig = Rig(tmp_path, behave, effort=QUICK)
    rig.tuner.tune(*SHAPE, candidates=[broken, fine, rivals(3)[2]])
    [(_, names)] = rig.bench.timed
    assert {fine.digest, DEFAULT.digest, rivals(3)[2].digest} <= set(names)
    assert broken.digest not in rig.bench.checked


@pytest.mark.parametrize("wrong", [rivals(1)[0], DEFAULT], ids=["rival", "default"])
def test_a_wrong_kernel_is_never_timed_nor_chosen_however_quick(tmp_path: Path, wrong: Config) -> None:
    """All configs of it are checked or left out; its trials say what was wrong, and have no time."""
    behave = lambda config: "wrong_result" if config == view(wrong) else "95"  # noqa: E731
    rig = Rig(tmp_path, behave, effort=replace(QUICK, rescue=4))
    result = rig.tuner.tune(*SHAPE)
    bad = {t.config.digest for t in trials_of(tmp_path) if t.config and t.outcome == "wrong_result"}
    timed = {name for _, names in rig.bench.timed for name in names}
    assert bad and not bad & timed and timed <= set(rig.bench.checked)
    assert view(result.config) != view(wrong) and all(view(row.config) != view(wrong) for row in result.rows)
    assert all(t.timing is None and t.error for t in trials_of(tmp_path) if t.outcome == "wrong_result")
    assert rig.tuner.setting.table is not None
    assert Table.load(rig.tuner.setting.table).entries[PROBLEM].config == result.config


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 8, 12])
def test_an_interrupted_quick_run_ends_like_an_undisturbed_one(tmp_path: Path, steps: int) -> None:
    """After Ctrl-C, in checks, in the first set of rounds or the second, the same call finds the same winner.

    Rounds are run anew, since all must run in those that decide; what failed is not run again. Until a run
    ends the table has nothing of it.
    """
    wrong = view(rivals(2)[1])
    behave = lambda config: "wrong_result" if config == wrong else f"{101 + len(str(config)) % 7}"  # noqa: E731
    effort = replace(QUICK, classes=4, rescue=4, twins=1)
    whole = Rig(tmp_path / "whole", behave, effort=effort)
    expected = whole.tuner.tune(*SHAPE)
    assert len(whole.bench.timed) == 2
    stopped = Rig(tmp_path / "part", behave, effort=effort, stop_after=min(steps, whole.bench.steps - 1))
    with pytest.raises(KeyboardInterrupt):
        stopped.tuner.tune(*SHAPE)
    assert stopped.tuner.setting.table is not None and not stopped.tuner.setting.table.exists()
    failed = {t.config.digest for t in trials_of(tmp_path / "part") if t.config and t.outcome != "ok"}
    again = Rig(tmp_path / "part", behave, effort=effort)
    result = again.tuner.tune(*SHAPE)
    assert not result.reused and not failed & set(again.bench.checked)
    assert (result.config, result.outcomes) == (expected.config, expected.outcomes)
    assert [names for _, names in again.bench.timed] == [names for _, names in whole.bench.timed]


def test_energy_needs_finals_however_quick(tmp_path: Path) -> None:
    """It is measured alone, for seconds."""
    rig = Rig(tmp_path, effort=QUICK)
    result = rig.tuner.tune(*SHAPE, objective="energy")
    assert len(rig.bench.timed) > 1 and rig.bench.timed[-1][0] == Policy.final(objective="energy")
    assert result.winner.timing is not None and result.winner.timing.energy_mj


def test_a_budget_ends_a_quick_run_with_what_was_checked(tmp_path: Path) -> None:
    """Candidates that are checked are timed; the others are counted as untried."""
    rig = Rig(tmp_path, effort=replace(QUICK, final_s=1e9), budget_s=1e-9)
    result = rig.tuner.tune(*SHAPE)
    [(_, names)] = rig.bench.timed
    assert result.untried > 0 and len(names) < result.untried + result.candidates
    assert DEFAULT.digest in names


def test_a_budget_ends_a_set_of_rounds_that_waits_for_more(tmp_path: Path) -> None:
    """Where finals follow what is checked is timed likewise, instead of waiting until a set is full."""
    rig = Rig(tmp_path, effort=replace(SMALL, chunk=96, final_s=1e9), budget_s=1e-9)
    result = rig.tuner.tune(*SHAPE)
    (_, screened), (policy, final) = rig.bench.timed
    assert result.untried > 0 and len(screened) < result.untried + result.candidates
    assert policy == Policy.final() and DEFAULT.digest in screened and set(final) <= set(screened)


def test_a_quick_run_without_working_kernel_says_why(tmp_path: Path) -> None:
    """As any other."""
    with pytest.raises(NoWinnerError, match="took too long"):
        Rig(tmp_path, lambda config: "breaks", effort=QUICK).tuner.tune(*SHAPE)


@pytest.mark.parametrize(("problem", "clock"), [(PROBLEM, "settled"), (Problem(64, 7168, 2048), "burst")])
def test_only_what_meets_its_power_limit_is_loaded_first(problem: Problem, clock: str) -> None:
    """Settling takes half a second, which says nothing about the others."""
    request = Request(problem, ARCH, 132, effort=EFFORTS["quick"])
    assert request.final_policy == request.screen_policy == Policy.quick(loaded=clock == "settled")
    assert request.final_policy.clock == clock and request.final_policy.context == "behind"
    assert request.final_policy.energy_s == 0
    assert (request.final_policy.burst_rounds > 0) == (clock == "settled")


def test_sizes_of_a_range_are_timed_without_bursts() -> None:
    """They would take as long as a further size."""
    size, alone = (kind(PROBLEM, ARCH, 132).screen_policy for kind in (SizeRequest, Request))
    assert size.clock == alone.clock == "settled" and size.settle_s < alone.settle_s
    assert size.burst_rounds == 0 < alone.burst_rounds


def test_ties_at_a_size_of_a_range_are_decided_beside_the_baseline() -> None:
    """Three rounds of many say too little of whether a call should be left to it."""
    size, alone = (kind(PROBLEM, ARCH, 132).screen_policy for kind in (SizeRequest, Request))
    assert size.extra_rounds > alone.extra_rounds == 0 and size.rounds == alone.rounds


def test_a_count_of_kernels_outdoes_the_effort(tmp_path: Path) -> None:
    """Whoever asks for more kernels than quick tries gets them, twins included."""
    rig = Rig(tmp_path, effort="quick")
    for count, twins in ((40, 1), (6, 1), (2, 0)):
        effort = rig.tuner.request(PROBLEM, count).effort
        assert effort == replace(EFFORTS["quick"], classes=count - twins, twins=twins, most=None)
        assert effort.kernels == count


def test_efforts_have_names() -> None:
    """Each tries more than the one before."""
    quick, standard, exhaustive = (find_effort(name) for name in ("quick", "standard", "exhaustive"))
    assert standard == Effort() and quick.at_once and not standard.at_once
    assert quick.classes < standard.classes < exhaustive.classes
    assert quick.refinements < standard.refinements < exhaustive.refinements
    with pytest.raises(UsageError, match="unknown effort 'hasty'; valid: quick, standard, exhaustive"):
        find_effort("hasty")
    with pytest.raises(UsageError, match="unknown effort"):
        Rig(Path("unused"), effort="hasty")


def test_the_command_takes_an_effort_and_says_where_the_seconds_went(
    gpu: FakeBench,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By what was done in them, in JSON."""
    shape = "x".join(map(str, SHAPE))
    gpu.behaviour = lambda config: "90"
    assert tune("--shape", shape, "--effort", "quick", "--json") == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert len(gpu.timed) == 1 and gpu.timed[0][0] == Policy.quick(loaded=True)
    assert {"open", "check", "screen", "final"} <= set(result["stages"]) <= {*STAGES}
    assert sum(result["stages"].values()) <= result["seconds"] + 0.01
    with pytest.raises(SystemExit, match="2"):
        tune("--shape", shape, "--effort", "hasty")
    assert "choose from" in capsys.readouterr().err


# --- twins ---


def test_the_first_kernels_are_tried_with_and_without_overlap(tmp_path: Path) -> None:
    """Behind other kernels; back to back the model knows better."""
    behind = Rig(tmp_path / "a", effort=replace(QUICK, twins=2))
    behind.tuner.tune(*SHAPE)
    tried = {t.config for t in trials_of(tmp_path / "a") if t.config}
    pairs = [c for c in tried if c["use_pdl"] and c.replace(use_pdl=False) in tried]
    assert len({view(config) for config in pairs}) >= 2
    plain = Rig(tmp_path / "b", effort=replace(QUICK, twins=2), context=BACK_TO_BACK)
    plain.tuner.tune(*SHAPE)
    assert len(plain.bench.checked) == len(behind.bench.checked) - 2


@pytest.mark.parametrize(
    ("line", "knob", "value"),
    [("gemm 256x1024x1024 bf16 kk", "use_pdl", False), ("rmsnorm 64x4096 bf16", "pdl", "off")],
)
def test_behind_others_the_other_kernels_do_not_overlap(line: str, knob: str, value: Value) -> None:
    """All but the first, which is tried both ways, and kernels that split k."""
    effort = replace(QUICK, classes=12, most=12, twins=1)
    request = Request(parse_problem(line), ARCH, 132, effort=effort)
    first, *found = Proposals(request, (), None).everything()
    others = [c for c in found if aside_from_overlap(c) != aside_from_overlap(first)]
    assert len({first[knob], *(c[knob] for c in found if c not in others)}) >= 2
    assert len(others) > 3 and {c[knob] for c in others if c.get("split_k", 1) == 1} == {value}


@pytest.mark.parametrize(
    ("line", "knob", "value"),
    [("gemm 256x1024x1024 bf16 kk", "use_pdl", True), ("rmsnorm 64x4096 bf16", "pdl", "early")],
)
def test_between_kernels_that_overlap_all_do(line: str, knob: str, value: Value) -> None:
    """Those around the best of them, too, and not where the caller fixes it otherwise."""
    effort = replace(QUICK, classes=4, most=4, twins=4)
    request = Request(parse_problem(line), ARCH, 132, effort=effort, context=OVERLAPPING)
    proposals = Proposals(request, (), None)
    found = proposals.everything()
    assert len(found) >= 3 and {c[knob] for c in [*found, *proposals.likely()]} == {value}
    more = proposals.refined({c: 10.0 + at for at, c in enumerate(found)}, 8, 10.0)
    assert set(more) - set(found) and {c[knob] for c in more} == {value}
    kept = next(v for v in proposals.space.domains[knob] if v != value)
    fixed = Proposals(replace(request, fixed={knob: (kept,)}), (), None)
    assert {c[knob] for c in fixed.everything()} == {kept}


def test_other_algorithms_are_tried_without_overlap_too(tmp_path: Path) -> None:
    """However few kernels get twins: each algorithm has its best in both forms."""
    problem = Problem(1, 6144, 4096)
    Rig(tmp_path, lambda config: "90", effort="quick").tuner.tune(1, 6144, 4096)
    with TrialStore(tmp_path / "trials.db") as store:
        found = [trial.config for trial in store.find(problem) if trial.config]
    algorithms = {config.algorithm for config in found}
    assert len(algorithms) == 2
    for algorithm in algorithms:
        assert {config["use_pdl"] for config in found if config.algorithm == algorithm} == {False, True}


def test_twins_follow_their_kernel_and_keep_to_what_is_fixed() -> None:
    """Each kernel has one, right behind it; configs that share a kernel share it too."""
    first, second = rivals(2)
    other = first.replace(swizzle_size=next(s for s in (1, 2, 4) if s != first["swizzle_size"]))
    found = with_twins(SPACE, PROBLEM, [first, other, second], 2)
    flipped = [config.replace(use_pdl=not config["use_pdl"]) for config in (first, second)]
    assert found == [first, flipped[0], other, second, flipped[1]]
    assert with_twins(SPACE, PROBLEM, [first, second], 1) == [first, flipped[0], second]
    assert with_twins(SPACE, PROBLEM, [first], 1, {"use_pdl": (first["use_pdl"],)}) == [first]
    assert with_twins(SPACE, PROBLEM, [first, flipped[0]], 2) == [first, flipped[0]]


def test_the_others_do_without_overlap_unless_they_split_k() -> None:
    """What the caller fixed stays, and back to back nothing changes."""
    problem = Problem(256, 256, 65536)
    first, second = (config.replace(use_pdl=True, split_k=1) for config in rivals(2))
    parts = first.replace(split_k=4)
    found = with_twins(SPACE, problem, [first, second, parts], 1, others=alone)
    assert found == [first, first.replace(use_pdl=False), second.replace(use_pdl=False), parts]
    for count, fixed in ((0, None), (1, {"use_pdl": (True,)})):
        kept = with_twins(SPACE, problem, [first, second], count, fixed, others=alone)
        assert kept == [first, second]


def test_between_kernels_that_overlap_the_others_do_as_well() -> None:
    """Of norms the twins have both ways of it, and the others the one that lets the next start first."""
    first, second = (config.replace(use_pdl=False) for config in rivals(2))
    assert with_twins(SPACE, PROBLEM, [first, second], 1, others=overlapped) == [
        first,
        first.replace(use_pdl=True),
        second.replace(use_pdl=True),
    ]
    norms, problem = find_space("rmsnorm", ARCH), parse_problem("rmsnorm 64x4096 bf16")
    one = norms.default(problem)
    other = norms.default(parse_problem("rmsnorm 4x4096 bf16"))
    assert with_twins(norms, problem, [one, other], 1, others=overlapped) == [
        one,
        one.replace(pdl="early"),
        one.replace(pdl="late"),
        other.replace(pdl="early"),
    ]
    assert alone(norms, problem, one.replace(pdl="late"), {}) == one
    assert overlapped(norms, problem, one, {"pdl": ("off",)}) == one


def test_a_space_without_overlap_has_no_twins() -> None:
    """As NVIDIA's operators have none."""
    space = find_space("gemm", ARCH, "operators")
    config = space.default(PROBLEM)
    assert "use_pdl" not in space.domains and with_twins(space, PROBLEM, [config], 3) == [config]


def test_seconds_go_where_most_depends_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion, but a quarter of an equal share at least; what the first leaves goes to the others."""
    said: list[float | None] = []
    now = [0.0]

    def conclude(self: Tuning, prepared: Any, budget_s: float | None, *rest: Any) -> Any:
        said.append(budget_s)
        now[0] += 10.0
        return prepared

    monkeypatch.setattr(Tuning, "_prepare_or_fail", lambda self, request, ahead: request)
    monkeypatch.setattr(Tuning, "_conclude", conclude)
    nothing: Any = None
    tuning = Tuning(Session(nothing, nothing, nothing, clock=lambda: now[0]))
    requests: Any = [object.__new__(Request) for _ in range(4)]
    found = list(tuning.run_all(requests, 100.0, [90.0, 10.0, 0.0, 0.0]))
    assert [id(each) for each in found] == [id(each) for each in requests]
    parts = [90.0, 10.0, 6.25, 6.25]
    want = [(100.0 - 10.0 * at) * parts[at] / sum(parts[at:]) for at in range(4)]
    assert said == pytest.approx(want)
    said.clear()
    now[0] = 0.0
    list(tuning.run_all(requests, 100.0))
    assert said == pytest.approx([25.0, 30.0, 40.0, 70.0])
