"""One shape, all implementations: each enters (tunes, proves itself right), then all are timed together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

from cutegen.digest import Json
from cutegen.errors import BuildError, CutegenError, LaunchError
from cutegen.families.shapes import NamedProblem
from cutegen.family import Problem
from cutegen.measure import Candidate, CheckResult, TimingRun
from cutegen.measure.policy import Policy
from tools.benchmark.results import Entry, InContext, ShapeResult

__all__ = [
    "Arena",
    "Contestant",
    "Entrant",
    "Finalist",
    "UnsupportedError",
    "failed",
    "require_ok",
    "run_contest",
]


class UnsupportedError(CutegenError):
    """An implementation does not do a problem of this kind."""


class Arena(Protocol):
    """What a contestant needs of the measuring child; :class:`cutegen.measure.Bench` is one."""

    def open(self, problem: Problem, seed: int = 0) -> Any:
        """Make operands and reference of ``problem``."""
        ...

    def check(self, candidate: Candidate) -> CheckResult:
        """Say whether ``candidate`` computes the right thing."""
        ...

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        """Time ``candidates`` and the reference in interleaved rounds, and those of ``keep`` in bursts."""
        ...


@dataclass(frozen=True)
class Finalist:
    """A kernel that has proved itself right and goes into the common rounds.

    Attributes:
        candidate: What is timed.
        config: Which kernel it is, for people.
        choice: The same for programs.
        details: What is known about this kernel.
    """

    candidate: Candidate
    config: str
    choice: Mapping[str, Json]
    details: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Entrant:
    """An implementation that is ready for the common rounds; its fastest finalist counts.

    Attributes:
        finalists: At least one.
        tuning_s: Seconds that finding them took; None where that is not known.
        details: What is worth keeping about the tuning.
    """

    finalists: tuple[Finalist, ...]
    tuning_s: float | None = None
    details: Mapping[str, Json] = field(default_factory=dict)


class Contestant(Protocol):
    """An implementation of GEMMs."""

    @property
    def name(self) -> str:
        """What it is called in the results."""
        ...

    def prepare(self, problems: Sequence[Problem]) -> None:
        """Do once what serves many shapes, such as compiling.

        Raises:
            CutegenError: It cannot take part in any of them.
        """
        ...

    def enter(self, arena: Arena, problem: Problem) -> Entrant:
        """Choose kernels for the problem that is open in ``arena``, and check them.

        Raises:
            UnsupportedError: It does not do such problems.
            CutegenError: It failed on this one.
        """
        ...


class _NotOkError(CutegenError):
    """A check did not end well."""

    def __init__(self, result: CheckResult) -> None:
        self.outcome = result.outcome
        super().__init__(result.error)


def failed(error: CutegenError) -> Entry:
    """Return the entry of an implementation that ended in ``error``."""
    if isinstance(error, _NotOkError):
        return Entry(error.outcome, str(error))
    kinds = {UnsupportedError: "unsupported", BuildError: "build_failed", LaunchError: "launch_failed"}
    outcome = next((name for kind, name in kinds.items() if isinstance(error, kind)), "failed")
    return Entry(outcome, str(error))


def require_ok(result: CheckResult) -> None:
    """Do nothing after a check that ended well.

    Raises:
        CutegenError: It did not; the outcome goes into the entry.
    """
    if not result.ok:
        raise _NotOkError(result)


def run_contest(
    arena: Arena,
    named: NamedProblem,
    contestants: Sequence[Contestant],
    policy: Policy,
    *,
    seed: int = 0,
    absent: Mapping[str, CutegenError] | None = None,
    further: Sequence[Policy] = (),
) -> ShapeResult:
    """Let everyone enter, time all who did in the same rounds, and return the record of the shape.

    Args:
        arena: The measuring child.
        named: The problem.
        contestants: Who takes part; one that fails is recorded with its error and does not stop the others.
        policy: How the common rounds are timed.
        seed: Of the operands' values.
        absent: Contestants that could not even prepare, and why.
        further: Policies of other launch contexts, in which all are timed after that.

    Raises:
        CutegenError: The problem cannot be opened, or the reference fails.
    """
    started = time.monotonic()
    arena.open(named.problem, seed)
    entries: dict[str, Entry] = {}
    entrants: dict[str, Entrant] = {}
    for contestant in contestants:
        try:
            if absent and contestant.name in absent:
                raise absent[contestant.name]
            entrants[contestant.name] = contestant.enter(arena, named.problem)
        except CutegenError as error:
            entries[contestant.name] = failed(error)
    everyone = [finalist.candidate for entrant in entrants.values() for finalist in entrant.finalists]
    run = arena.time(everyone, policy, [candidate.name for candidate in everyone])
    entries.update((name, _entry(entrant, run)) for name, entrant in entrants.items())
    contexts = {
        policy.context: _in_context(arena.time(everyone, policy), entrants, entries) for policy in further
    }
    return ShapeResult(
        name=named.name,
        problem=named.problem,
        reference=run.reference,
        entries={contestant.name: entries[contestant.name] for contestant in contestants},
        rounds=run.rounds,
        settle_s=round(run.settle_s, 3),
        settled=run.settled,
        seconds=round(time.monotonic() - started, 2),
        finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        contexts=contexts,
    )


def _in_context(run: TimingRun, entrants: Mapping[str, Entrant], entries: Mapping[str, Entry]) -> InContext:
    """Return what rounds in another context say of the kernels that the entries name."""
    chosen = {
        name: finalist.candidate.name
        for name, entrant in entrants.items()
        for finalist in entrant.finalists
        if entries[name].ok and finalist.choice == entries[name].choice
    }
    return InContext(run.reference, {name: run[kernel] for name, kernel in chosen.items() if kernel in run})


def _entry(entrant: Entrant, run: TimingRun) -> Entry:
    """Return what the common rounds say of an implementation: its fastest finalist."""
    timed = [(run[f.candidate.name], f) for f in entrant.finalists if f.candidate.name in run]
    others: dict[str, Json] = {f.config: timing.median_us for timing, f in timed}
    details = {**entrant.details, **({"finalists_us": others} if len(entrant.finalists) > 1 else {})}
    if not timed:
        first = entrant.finalists[0]
        result = run.failures[first.candidate.name]
        return Entry(
            result.outcome, result.error, None, first.config, first.choice, entrant.tuning_s, details
        )
    timing, best = min(timed, key=lambda pair: pair[0].paired.mid)
    return Entry("ok", "", timing, best.config, best.choice, entrant.tuning_s, {**details, **best.details})
