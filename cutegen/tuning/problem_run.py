"""The loop for one problem: choose candidates, screen, refine, measure the finalists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from cutegen.errors import MeasureError
from cutegen.family import is_heavy
from cutegen.measure.operand_sets import COPY
from cutegen.measure.statistics import TIE_BAND
from cutegen.space import Config
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.candidate_runner import CandidateRunner
from cutegen.tuning.finalists import comparable_us, pick_finalists, preference
from cutegen.tuning.history import Ledger
from cutegen.tuning.proposals import Proposals
from cutegen.tuning.request import Request
from cutegen.tuning.session import Session

__all__ = ["ProblemRun"]

#: How many of the fastest are timed again beside the new candidates of a second set of rounds.
_BESIDE = 6
#: Finalists that are chosen for their times in bursts, at most.
_BURST_FINALISTS = 3
#: Finalists that are chosen for their times back to back, at most.
_BACK_TO_BACK_FINALISTS = 2


class ProblemRun:
    """Searches for the fastest config of one problem.

    Args:
        request: What to do.
        session: Compiler, measuring child, toolchain, and who sees the progress.
        ledger: What earlier runs found out, and where this run records its trials.
        incumbent: The config that the table names now; it competes if it is valid.
        offers: Configs of another source, of which as many are tried as of cutegen's own.

    Attributes:
        runner: Builds, checks and times candidates, and knows their outcomes.
        baseline_trial: Id of the recorded baseline of the finals.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        ledger: Ledger,
        *,
        incumbent: Config | None = None,
        offers: Sequence[Config] = (),
    ) -> None:
        self._proposals = Proposals(request, offers, incumbent)
        self.runner = CandidateRunner(
            request,
            session,
            ledger,
            default=self._proposals.default,
            incumbent=self._proposals.incumbent,
        )
        self.baseline_trial = ""

    @property
    def dead_knobs(self) -> tuple[str, ...]:
        """Sentences on knobs that changed no kernel; empty if there are none, or it is not known."""
        return self.runner.dead_knobs(self._proposals.space)

    def prepare(self) -> None:
        """Choose the candidates, recall their recorded outcomes and submit the missing kernels.

        Raises:
            BuildError: Something must be compiled and there is no compiler.
            ConfigError: A candidate given by the caller breaks rules.
        """
        # The default and the likely candidates need no search, so they are compiled while it runs.
        self.runner.admit([self.runner.default])
        self._admit_new(self._proposals.likely())
        self._admit_new(self._proposals.everything())
        self.runner.clock.add_time("propose")

    def _admit_new(self, configs: Iterable[Config]) -> list[Attempt]:
        return self.runner.admit(config for config in configs if config not in self.runner.attempts)

    def run(
        self, budget_s: float | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Attempt, ...]:
        """Try everything and return the finalists, with settled timings if anything can be measured.

        Args:
            budget_s: Seconds after which nothing new is tried, the finals included; None for no limit.
            meanwhile: Prepares the next problem; from the second call on it does nothing. Called when kernels
                around the best were submitted: the GPU waits for these anyway, and they have the compiler for
                themselves. Without such kernels it is called at once.

        Raises:
            NoWinnerError: No candidate works.
        """
        runner = self.runner
        runner.begin(budget_s)
        refines = runner.request.refines_always
        if not (runner.measures and runner.request.searches and refines):
            meanwhile()  # the compiler has nothing else to do
        runner.require_right_default(
            runner.attempts[runner.default]
        )  # an earlier run may have found it wrong
        runner.try_all(list(runner.attempts.values()))
        if not runner.measures:
            return self._compiled()
        if runner.request.searches:
            if refines or not self._ahead():
                self._refine(meanwhile)
            self._rescue()
        meanwhile()
        finalists = self._finals()
        runner.clock.add_time("final")
        runner.tell("done")
        return finalists

    def _compiled(self) -> tuple[Attempt, ...]:
        self.runner.tell("done")
        if working := self.runner.attempts.working():
            return tuple(working)
        raise self.runner.attempts.no_winner()

    # -- further candidates

    def _refine(self, meanwhile: Callable[[], None]) -> None:
        """Try what the measurements suggest; again a quarter as much, while that finds something faster."""
        runner, effort, policy = self.runner, self.runner.request.effort, self.runner.request.screen_policy
        best = math.inf
        for turn in range(effort.refinements):
            own = [a for a in runner.attempts.values() if a.config.source == "cutegen"]
            results = {a.config: comparable_us(a.timing, policy) if a.ok and a.timing else None for a in own}
            fastest = min((us for us in results.values() if us is not None), default=math.inf)
            if runner.late() or fastest >= best * (1 - TIE_BAND):
                return
            best, runner.stage, limit = fastest, "refine", max(1, effort.refine >> 2 * turn)
            more = self._admit_new(self._proposals.refined(results, limit, fastest))
            meanwhile()
            runner.try_all(more)

    def _ahead(self) -> bool:
        """Whether some candidate is clearly faster than the library, as far as is known."""
        timings = [a.timing for a in self.runner.attempts.working() if a.timing is not None]
        return any(t.ratio is None or t.ratio >= 1 + TIE_BAND for t in timings)

    def _rescue(self) -> None:
        """If no candidate is clearly faster than the library, try more of them beside the fastest.

        Where a copy is the baseline and power the limit, it tells nothing. Source: of three gated GEMMs of a
        Llama-8B on an H200 (docs/results/model.json) none was won by what was tried then.
        """
        runner, request = self.runner, self.runner.request
        timings = {a.config: a.timing for a in runner.attempts.working() if a.timing is not None}
        if not request.at_once or not request.effort.rescue or not timings or runner.late():
            return
        beside_copy = any(timing.reference == COPY for timing in timings.values())
        if self._ahead() or (beside_copy and is_heavy(request.problem)):
            return
        runner.stage = "refine"
        times = {c: comparable_us(timing, request.screen_policy) for c, timing in timings.items()}
        results = {c: times.get(c) for c in runner.attempts if c.source == "cutegen"}
        fastest = sorted(times, key=times.__getitem__)[:_BESIDE]
        fixed = self._proposals.without_overlap(fastest[0])
        found = self._proposals.refined(results, request.effort.rescue, times[fastest[0]], fixed)
        more = self._admit_new(dict.fromkeys(found))
        first = [config for config in (runner.default, runner.incumbent) if config in times]
        runner.try_all(more, [runner.attempts[config] for config in dict.fromkeys([*first, *fastest])])

    # -- finals

    def _finals(self) -> tuple[Attempt, ...]:
        """Measure the finalists with settled clocks; if all of them fail, the next best take their place.

        Raises:
            NoWinnerError: None is left.
        """
        runner = self.runner
        while finalists := self._finalists():
            if runner.request.at_once:
                return self._already_final(finalists)
            runner.tell("final")
            if timed := self._recorded_finals(finalists) or self._time_finals(finalists):
                runner.fetch([attempt for attempt in timed if attempt.artifact is None])
                return timed
        raise runner.attempts.no_winner()

    def _already_final(self, finalists: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """Return the finalists with their screened timings, which decide: all were timed together."""
        for attempt in finalists:
            attempt.final, attempt.final_trial = attempt.timing, attempt.trial
        self._record_baseline()
        return tuple(finalists)

    def _record_baseline(self) -> None:
        runner = self.runner
        if runner.torch is not None:
            self.baseline_trial = runner.ledger.write_baseline(runner.torch, runner.request.final_policy)

    def _finalists(self) -> list[Attempt]:
        runner, request = self.runner, self.runner.request
        there = [a for a in runner.attempts.working() if not runner.decisive or a.name in runner.decisive]
        times = {
            a.config: comparable_us(a.timing, request.screen_policy) for a in there if a.timing is not None
        }
        always = [runner.default, *([runner.incumbent] if runner.incumbent else [])]
        always += _best_of_each_source(times) if len(request.sources) > 1 else []
        always += _best_in_bursts(runner.attempts.working()) + _best_back_to_back(runner.attempts.working())
        chosen = pick_finalists(
            times,
            *request.finalists,
            list(dict.fromkeys(always)),
            kernel_of=lambda config: runner.attempts[config].artifact_key,
            alike=request.effort.alike,
        )
        return [runner.attempts[config] for config in chosen]

    def _recorded_finals(self, finalists: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """Return the finalists with the recorded finals of an earlier run of this name, if all are there."""
        known = {trial.key: trial for trial in self.runner.ledger.finals()}
        torch = known.get(("torch", ()))
        if torch is None or not all(attempt.key in known for attempt in finalists):
            return ()
        self.runner.torch, self.baseline_trial = torch.timing, torch.id
        for attempt in finalists:
            attempt.final, attempt.final_trial = known[attempt.key].timing, known[attempt.key].id
        return tuple(finalists)

    def _time_finals(self, finalists: Sequence[Attempt]) -> tuple[Attempt, ...]:
        runner, policy = self.runner, self.runner.request.final_policy
        runner.fetch([attempt for attempt in finalists if attempt.artifact is None])
        rank = preference(self._proposals.space, runner.default, runner.incumbent)
        entries = sorted((a for a in finalists if a.ok), key=lambda attempt: rank(attempt.config))
        timed = runner.measure(entries, policy)
        if not timed and all(attempt.ok for attempt in finalists):
            raise MeasureError(f"the measuring process timed none of {len(finalists)} working kernels")
        with runner.ledger.together():
            for attempt, timing in timed:
                attempt.final = timing
                attempt.final_trial = runner.ledger.write(attempt, "ok", timing=timing, policy=policy)
            if timed:
                self._record_baseline()
        return tuple(attempt for attempt, _ in timed)


def _best_in_bursts(attempts: Iterable[Attempt]) -> list[Config]:
    """Return the configs that were fastest in bursts; by settled times alone they might be missed."""
    timed = [(a.timing.burst_ratio, a.config) for a in attempts if a.timing is not None]
    return _largest(timed, _BURST_FINALISTS)


def _best_back_to_back(attempts: Iterable[Attempt]) -> list[Config]:
    """Return the configs that were fastest back to back, among those near the fastest in what decides."""
    timed = [(a.timing.back_to_back_ratio, a.config) for a in attempts if a.timing is not None]
    return _largest(timed, _BACK_TO_BACK_FINALISTS)


def _largest(timed: Iterable[tuple[float | None, Config]], count: int) -> list[Config]:
    known = [(ratio, config.digest, config) for ratio, config in timed if ratio is not None]
    return [config for _, _, config in sorted(known, reverse=True)[:count]]


def _best_of_each_source(times: Mapping[Config, float]) -> list[Config]:
    """Return the fastest config of each source, so that the finals compare the sources."""
    best: dict[str, Config] = {}
    for config in sorted(times, key=lambda c: (times[c], c.digest)):
        best.setdefault(config.source, config)
    return list(best.values())
