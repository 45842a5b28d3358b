"""A contest: who fails is recorded and stops nobody, the fastest right finalist counts, files are resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cutegen.digest import Json
from cutegen.errors import BuildError, CutegenError, LaunchError, UsageError
from cutegen.families.gemm.problem import Problem
from cutegen.families.shapes import NamedProblem
from cutegen.measure import Candidate, CheckResult, TimingRun
from cutegen.measure.check import Verdict
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.space import Launch
from tools.benchmark.contest import Arena, Entrant, Finalist, UnsupportedError, require_ok, run_contest
from tools.benchmark.results import Results, ShapeResult

PROBLEM = Problem(256, 512, 1024)
SHAPE = NamedProblem("T", PROBLEM)


class FakeArena:
    """Checks by a candidate's symbol, times by the number behind it; remembers what was asked."""

    def __init__(self) -> None:
        self.opened: list[tuple[Problem, int]] = []
        self.timed: list[list[str]] = []

    def open(self, problem: Problem, seed: int = 0) -> Any:
        self.opened.append((problem, seed))

    def check(self, candidate: Candidate) -> CheckResult:
        if candidate.symbol.startswith("wrong"):
            return CheckResult("wrong_result", "differs at (0, 0)")
        return CheckResult("ok", verdict=Verdict(True))

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        self.timed.append([candidate.name for candidate in candidates])
        failures = {
            c.name: CheckResult("timeout", "hung") for c in candidates if c.symbol.startswith("hangs")
        }
        times = {c.name: float(c.symbol.split(":")[1]) for c in candidates if c.name not in failures}
        timings = {name: Timing.of([us] * 7, [10.0] * 7) for name, us in times.items()}
        return TimingRun(
            timings, Timing.of([10.0] * 7, [10.0] * 7, reference="torch.mm"), failures, 7, 1.0, True
        )


class Fake:
    """Enters with the finalists it is given, or fails as told."""

    def __init__(self, name: str, *symbols: str, error: CutegenError | None = None) -> None:
        self.name = name
        self._symbols = symbols
        self._error = error

    def prepare(self, problems: Sequence[Problem]) -> None:
        if self._error:
            raise self._error

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        if self._error:
            raise self._error
        finalists = []
        for number, symbol in enumerate(self._symbols):
            name = f"{self.name} {number}"
            candidate = Candidate(name, Path("k.so"), symbol, Launch((), 0), problem)
            require_ok(arena.check(candidate))
            finalists.append(Finalist(candidate, f"config {number}", {"number": number}, {"kept": number}))
        return Entrant(tuple(finalists), 1.5, {"tried": 24})


def contest(*contestants: Fake, absent: Mapping[str, CutegenError] | None = None) -> ShapeResult:
    return run_contest(FakeArena(), SHAPE, contestants, Policy(), absent=absent)


def test_all_are_timed_in_the_same_rounds() -> None:
    """One call times every finalist of everyone, with operands from the seed that was asked for."""
    arena = FakeArena()
    run_contest(arena, SHAPE, [Fake("cutegen", "ok:8"), Fake("peer", "ok:9", "ok:7")], Policy(), seed=5)
    assert arena.opened == [(PROBLEM, 5)]
    assert arena.timed == [["cutegen 0", "peer 0", "peer 1"]]


def test_the_fastest_finalist_counts_and_the_others_are_kept() -> None:
    """Its choice and details are recorded, with the times of all."""
    entry = contest(Fake("peer", "ok:9", "ok:7", "ok:8")).entries["peer"]
    assert entry.ok and entry.timing and entry.timing.median_us == 7.0
    assert (entry.config, entry.choice, entry.tuning_s) == ("config 1", {"number": 1}, 1.5)
    assert entry.details["tried"] == 24 and entry.details["kept"] == 1
    assert entry.details["finalists_us"] == {"config 0": 9.0, "config 1": 7.0, "config 2": 8.0}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnsupportedError("no batches"), "unsupported"),
        (BuildError("ptxas said no"), "build_failed"),
        (LaunchError("cannot be imported"), "launch_failed"),
        (UsageError("odd"), "failed"),
    ],
)
def test_who_fails_is_recorded_and_stops_nobody(error: CutegenError, outcome: str) -> None:
    """The error's words are kept; the others are timed."""
    row = contest(Fake("peer", error=error), Fake("cutegen", "ok:8"))
    assert (row.entries["peer"].outcome, row.entries["peer"].error) == (outcome, str(error))
    assert row.entries["cutegen"].ok


def test_wrong_answers_are_never_timed() -> None:
    """The outcome of the check is that of the entry."""
    row = contest(Fake("peer", "wrong:1"), Fake("cutegen", "ok:8"))
    assert row.entries["peer"].outcome == "wrong_result" and row.entries["peer"].timing is None
    assert row.entries["peer"].error == "differs at (0, 0)"


def test_a_finalist_that_fails_in_the_rounds_leaves_the_others() -> None:
    """One of two hangs: the other is the entry; both hang: so does the entry."""
    assert contest(Fake("peer", "hangs:1", "ok:7")).entries["peer"].ok
    entry = contest(Fake("peer", "hangs:1", "hangs:2")).entries["peer"]
    assert (entry.outcome, entry.error, entry.tuning_s) == ("timeout", "hung", 1.5)


def test_all_are_timed_in_every_context_and_the_first_counts() -> None:
    """A kernel that wins there is shown elsewhere too, whoever would win there."""
    arena = FakeArena()
    further = [Policy(context="back_to_back"), Policy(context="alone")]
    peer = Fake("peer", "behind:9", "behind:7")
    failing = Fake("other", error=BuildError("x"))
    row = run_contest(
        arena, SHAPE, [Fake("cutegen", "ok:8"), peer, failing], Policy(context="behind"), further=further
    )
    assert len(arena.timed) == 3 and list(row.contexts) == ["back_to_back", "alone"]
    assert row.timing("peer").median_us == 7.0  # type: ignore[union-attr]
    assert row.timing("peer", "alone") == row.timing("peer") and row.timing("other", "alone") is None
    assert row.timing("peer", "elsewhere") is None
    assert row.ratio("", "back_to_back") == 10 / 8 and row.ratio("peer", "alone") == 7 / 8
    assert ShapeResult.from_json(row.to_json()) == row


# --- the file ---


def sample() -> Results:
    row = contest(Fake("cutegen", "ok:8"), Fake("peer", error=BuildError("x")))
    conditions: dict[str, Json] = {"gpu": {"name": "H200"}, "policy": Policy().to_json()}
    return Results(conditions).begin({"started_at": "now"}).with_shape(row)


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Nothing is lost, and writing again gives the same bytes."""
    path = tmp_path / "deep" / "r.json"
    results = sample()
    results.save(path)
    assert Results.load(path) == results
    text = path.read_text()
    Results.load(path).save(path)
    assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_a_shape_is_missing_unless_everyone_who_is_asked_for_is_in_its_row() -> None:
    """A new peer, another problem of the same name, or a failure that is retried: measured again."""
    results = sample()
    assert results.covers("T", PROBLEM, ["cutegen", "peer"], retry=False)
    assert not results.covers("T", PROBLEM, ["cutegen", "peer"], retry=True)
    assert results.covers("T", PROBLEM, ["cutegen"], retry=True)
    assert not results.covers("T", PROBLEM, ["cutegen", "newcomer"], retry=False)
    assert not results.covers("T", Problem(8, 8, 8), ["cutegen"], retry=False)
    assert not results.covers("U", PROBLEM, ["cutegen"], retry=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a results file"),
        ('{"kind": "gemm contest", "schema": 99}', "has schema 99"),
        ('{"kind": "gemm contest", "schema": 1}', "is damaged"),
        (
            '{"kind": "gemm contest", "schema": 1, "conditions": {}, "sessions": [], "shapes": [{}]}',
            "damaged",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, words: str) -> None:
    """Each kind of damage has its own words, and the file's name."""
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        Results.load(path)
    assert "r.json" in str(caught.value)
