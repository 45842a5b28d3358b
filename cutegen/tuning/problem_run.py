"""The loop for one problem: search, build, check, screen, refine, measure the finalists."""

from __future__ import annotations

import math
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from cutegen.arch import Arch
from cutegen.build import Artifact, Toolchain, artifact_key
from cutegen.build.render import Source, render
from cutegen.errors import CheckError, LaunchError, MeasureError, NoWinnerError
from cutegen.families.registry import find_family, space_of
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import TIE_BAND
from cutegen.measure.timing import Timing
from cutegen.space import Config, Space
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.backends import Children
from cutegen.tuning.finalists import comparable_us, pick_finalists, preference
from cutegen.tuning.history import Ledger
from cutegen.tuning.progress import Observer, Progress
from cutegen.tuning.proposals import Proposals
from cutegen.tuning.request import Request
from cutegen.tuning.same_kernels import SameKernels, unfit

__all__ = ["PROBLEM_FAILURES", "ProblemRun"]

#: What may go wrong with one problem without touching the others, such as operands that do not fit the GPU.
PROBLEM_FAILURES = (NoWinnerError, MeasureError, CheckError, LaunchError)

#: How many of the fastest are timed again beside the new candidates of a second set of rounds.
_BESIDE = 6
#: Finalists that are chosen for their times in bursts, at most.
_BURST_FINALISTS = 3
#: Where an error is in the text of a kernel, which differs between configs.
_LINE = re.compile(r" at line \d+ of the source(, in \S+)?")
#: Seconds to wait for the compiler at a time while nothing else is to be done.
_POLL_S = 0.2


class ProblemRun:
    """Tries candidates of one problem and records every outcome as soon as it is known.

    Args:
        request: What to do.
        children: Compiler and measuring child.
        ledger: What earlier runs found out, and where this run records its trials.
        toolchain: What compiles; with the source text it names every artifact.
        incumbent: The config that the table names now; it competes if it is valid.
        offers: Configs of another source, of which as many are tried as of our own.
        observe: Told about progress.
        clock: Seconds of a steady clock.
        render: Makes the text of a kernel of the request's target.
        checked: Configs that passed the check on another problem of the same signature; not checked again.

    Attributes:
        stages: Seconds spent in each stage: ``propose`` (candidates), ``open`` (the problem), ``compile``,
            ``check``, ``screen``, ``refine``, ``final``.
    """

    def __init__(
        self,
        request: Request,
        children: Children,
        ledger: Ledger,
        toolchain: Toolchain,
        *,
        incumbent: Config | None = None,
        offers: Sequence[Config] = (),
        observe: Observer,
        clock: Callable[[], float] = time.monotonic,
        render: Callable[[Problem, Config, Arch], Source] = render,
        checked: set[Config] | None = None,
    ) -> None:
        self.request = request
        self.ledger = ledger
        self.attempts: dict[Config, Attempt] = {}
        self.torch: Timing | None = None
        self.baseline_trial = ""
        self.ran = False
        self.stages: dict[str, float] = {}
        self._proposals = Proposals(request, offers, incumbent)
        self.default, self.incumbent = self._proposals.default, self._proposals.incumbent
        self._budget_s: float | None = None
        self._children = children
        self._toolchain = toolchain
        self._observe = observe
        self._clock = clock
        self._start = clock()
        self._noted = self._start
        self._render = render
        self._checked = set() if checked is None else checked
        self._opened = False
        self._running = False
        self._broken: dict[str, Attempt] = {}
        self._same = SameKernels()
        self._strict = find_family(request.problem.family).default_is_its_authors
        self._stage = "compile"
        self._decisive: frozenset[str] = frozenset()

    # -- candidates

    def prepare(self) -> None:
        """Choose the candidates, recall their recorded outcomes and submit the missing kernels.

        Raises:
            BuildError: Something must be compiled and there is no compiler.
            ConfigError: A candidate given by the caller breaks rules.
        """
        # The default and the likely candidates need no search, so they are compiled while it runs.
        self._admit([self.default])
        self._admit(config for config in self._proposals.likely() if config not in self.attempts)
        self._admit(config for config in self._proposals.everything() if config not in self.attempts)
        self._note("propose")

    def _space_of(self, config: Config) -> Space:
        return space_of(config, self.request.problem.family, self.request.arch)

    def _admit(self, configs: Iterable[Config]) -> list[Attempt]:
        """Turn configs into attempts; those without a recorded outcome are submitted to the compiler."""
        request = self.request
        new = []
        for config in configs:
            source = self._render(request.problem, config, request.arch)
            key = artifact_key(source, self._toolchain)
            launch = self._space_of(config).launch(config, request.problem, request.sm_count)
            new.append(Attempt(config, source, key, launch))
        # Where one set of rounds decides, no earlier timing counts: all must be timed together.
        self.ledger.recall(new, None if request.at_once else request.screen_policy)
        self.attempts.update((attempt.config, attempt) for attempt in new)
        missing = [attempt for attempt in new if not attempt.done]
        if missing and self._children.measures:
            # The child imports torch while the compiler starts.
            self._children.start_bench()
        # Kernels of the next problem may have been submitted already; those of a running one go first.
        self._children.submit((attempt.source for attempt in missing), urgent=self._running)
        return new

    # -- the run

    def screen(self, configs: Iterable[Config]) -> None:
        """Check and time ``configs`` beside each other, and decide nothing: see :attr:`attempts`."""
        self._try(self._admit(dict.fromkeys(configs)))

    def run(self, budget_s: float | None = None) -> tuple[Attempt, ...]:
        """Try everything and return the finalists, with settled timings if anything can be measured.

        Args:
            budget_s: Seconds after which nothing new is tried, the finals included; None for no limit.

        Raises:
            NoWinnerError: No candidate works.
        """
        self._start = self._noted = self._clock()
        self._running = True
        self._budget_s = budget_s
        self._require_right_default(self.attempts[self.default])  # an earlier run may have found it wrong
        self._try(list(self.attempts.values()))
        if not self._children.measures:
            return self._compiled()
        if self.request.searches:
            self._refine()
            self._rescue()
        finalists = self._finals()
        self._note("final")
        self._tell("done")
        return finalists

    def _compiled(self) -> tuple[Attempt, ...]:
        self._tell("done")
        if working := self._working():
            return tuple(working)
        raise self._nothing()

    def _working(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts.values() if attempt.ok]

    def _nothing(self) -> NoWinnerError:
        first = next((a.error for a in self.attempts.values() if a.error), "")
        why = first and f"; the first failed with: {first}"
        return NoWinnerError(f"no working kernel for {self.request.problem}{why}", self.outcomes())

    def outcomes(self) -> Counter[str]:
        """Return how many candidates ended in each outcome."""
        return Counter(attempt.outcome for attempt in self.attempts.values() if attempt.done)

    @property
    def kernels(self) -> int:
        """Kernels behind the candidates with an outcome: those that differ in run-time knobs share one."""
        return len({attempt.kernel for attempt in self.attempts.values() if attempt.done})

    @property
    def untried(self) -> int:
        """Candidates without an outcome."""
        return sum(not attempt.done for attempt in self.attempts.values())

    def _left_s(self) -> float | None:
        return None if self._budget_s is None else self._budget_s - (self._clock() - self._start)

    def _late(self, checked: Sequence[Attempt] = ()) -> bool:
        """Whether what is left of the budget should go to the finalists.

        Args:
            checked: Attempts that passed the check and wait to be timed; they count as tried.
        """
        left = self._left_s()
        if left is None:
            return False
        known = [*self._working(), *checked]
        default = self.attempts[self.default]
        if not known or not (default.done or default in known):
            return False
        return left <= (self.request.final_s if self._children.measures else 0.0)

    # -- build, check, screen

    def _try(self, attempts: Sequence[Attempt], beside: Sequence[Attempt] = ()) -> None:
        """Build, check and time ``attempts``, and time those ``beside`` once more in the same rounds."""
        waiting = [attempt for attempt in attempts if not attempt.done]
        built: deque[Attempt] = deque()
        checked: list[Attempt] = []
        chunk = sys.maxsize if self.request.at_once else self.request.effort.chunk
        if waiting:
            self.ran = True
            if self._children.measures:
                self._open()  # operands are made while the compiler works
                self._note("open")
        while (waiting or built or checked) and not self._late(checked):
            idle = not built and len(checked) < chunk and waiting
            self._children.poll(_POLL_S if idle else 0.0)
            waiting = self._sort_out(waiting, built)
            if built:
                self._check(built.popleft(), checked)
            elif checked and (not waiting or len(checked) >= chunk):
                self._screen([*beside, *checked[:chunk]])
                del checked[:chunk]
            self._note(self._stage)
            self._tell(self._stage)
        if checked and (self.request.at_once or not self._working()):
            self._screen([*beside, *checked[:chunk]])
            self._note(self._stage)

    def _sort_out(self, waiting: Sequence[Attempt], built: deque[Attempt]) -> list[Attempt]:
        """Move compiled attempts to ``built``, record failures, and return those still being compiled.

        Where different configs may turn out to be one kernel, only the first of them is measured, so the
        default and the incumbent go first.
        """
        still = []
        for attempt in waiting:
            result = self._children.result(attempt.source)
            if result is None or (self._strict and self._comes_later(attempt)):
                still.append(attempt)
            elif isinstance(result, Artifact):
                attempt.built(result)
                foreign = unfit(result, self.request.sm_count) if self._children.measures else ""
                why = foreign or self._same.note(attempt)
                if why:
                    self._fail(attempt, "invalid", why)
                else:
                    built.append(attempt)
            else:
                self._fail(attempt, "build_failed", f"{result.outcome}: {result.message}")
        return still

    def _comes_later(self, attempt: Attempt) -> bool:
        first = [
            self.attempts[c] for c in (self.default, self.incumbent) if c is not None and c in self.attempts
        ]
        return attempt not in first and any(each.artifact is None and not each.done for each in first)

    def _require_right_default(self, attempt: Attempt) -> None:
        """Stop if the author's own config of a kernel disagrees with the author's reference.

        Raises:
            NoWinnerError: It does.
        """
        if self._strict and attempt.config == self.default and attempt.outcome == "wrong_result":
            raise NoWinnerError(
                f"{self.request.problem}: the default config disagrees with the reference, so nothing was "
                f"timed: {attempt.error}; fix the reference, the declaration or the kernel",
                self.outcomes(),
            )

    @property
    def dead_knobs(self) -> tuple[str, ...]:
        """Sentences on knobs that changed no kernel; empty if there are none, or it is not known."""
        return self._same.dead_knobs(self._proposals.space)

    @property
    def failed(self) -> tuple[str, ...]:
        """Sentences on why candidates do not work: each reason once, with the first config that has it."""
        reasons: dict[str, list[Attempt]] = {}
        for attempt in self.attempts.values():
            if attempt.done and not attempt.ok and attempt.outcome not in ("invalid", "pruned"):
                reasons.setdefault(_LINE.sub("", attempt.error), []).append(attempt)
        request = self.request
        return tuple(
            f"{space_of(first.config, request.problem.family, request.arch).short(first.config, names=True)}"
            f"{f' and {len(others)} more' if others else ''}: {first.error}"
            for first, *others in reasons.values()
        )

    def _check(self, attempt: Attempt, checked: list[Attempt]) -> None:
        if not self._children.measures:
            known = self.ledger.compiled(attempt)
            attempt.screened(None, known or self.ledger.write(attempt, "ok"))
            return
        broken = self._broken.get(attempt.artifact_key)
        if broken is not None:
            # A hang costs its time limit, a fault a new measuring process: once per kernel is enough.
            why = f"not run, since the same kernel with other run-time arguments failed: {broken.error}"
            self._fail(attempt, broken.outcome, why)
            return
        if attempt.config in self._checked:
            checked.append(attempt)
            return
        self._stage = "check" if self._stage == "compile" else self._stage
        self._open()
        result = self._children.bench.check(self._candidate(attempt))
        if result.ok:
            self._checked.add(attempt.config)
            checked.append(attempt)
        else:
            self._fail(attempt, result.outcome, result.error)

    def _screen(self, batch: Sequence[Attempt]) -> None:
        self._stage = "screen" if self._stage == "check" else self._stage
        policy = self.request.screen_policy
        if self.request.at_once:
            if self._decisive and self.torch is not None:
                self.ledger.write_baseline(self.torch, policy)  # marks the end of the previous set
            self._decisive = frozenset(attempt.name for attempt in batch)
        timed = self._time(batch, policy)
        with self.ledger.together():
            for attempt, timing in timed:
                attempt.screened(timing, self.ledger.write(attempt, "ok", timing=timing, policy=policy))

    def _time(self, batch: Sequence[Attempt], policy: Policy) -> list[tuple[Attempt, Timing]]:
        """Time ``batch`` together with the baseline; failures are recorded and left out.

        The energy of the default and of the incumbent is measured however slow they are.
        """
        self._open()
        self.ran = True
        keep = [config.digest for config in (self.default, self.incumbent) if config is not None]
        candidates = [self._candidate(attempt) for attempt in batch]
        decides = policy == self.request.final_policy and not self.request.at_once
        run = self._children.time(candidates, policy, keep, self._left_s(), decides=decides)
        timed: list[tuple[Attempt, Timing]] = []
        self.torch = run.reference
        for attempt in batch:
            failure, timing = run.failures.get(attempt.name), run.timings.get(attempt.name)
            if failure is not None:
                self._fail(attempt, failure.outcome, failure.error)
            elif timing is not None:
                timed.append((attempt, timing))
        return timed

    def _open(self) -> None:
        if not self._opened:
            self._children.open(self.request.problem, self._left_s())
            self._opened = True

    def _candidate(self, attempt: Attempt) -> Candidate:
        assert attempt.artifact is not None
        request, artifact = self.request, attempt.artifact
        return Candidate.of(
            attempt.name,
            artifact.shared_object,
            artifact.symbol,
            self._space_of(attempt.config),
            attempt.config,
            request.problem,
            request.sm_count,
        )

    def _fail(self, attempt: Attempt, outcome: str, error: str) -> None:
        attempt.fail(outcome, error, self.ledger.write(attempt, outcome, error=error))
        if outcome in ("timeout", "launch_failed"):
            self._broken.setdefault(attempt.artifact_key, attempt)
        self._require_right_default(attempt)

    # -- refine and decide

    def _refine(self) -> None:
        """Try what the measurements suggest; again a quarter as much, while that finds something faster."""
        request, policy, best = self.request, self.request.screen_policy, math.inf
        for turn in range(request.effort.refinements):
            own = [a for a in self.attempts.values() if a.config.source == "cutegen"]
            results = {a.config: comparable_us(a.timing, policy) if a.ok and a.timing else None for a in own}
            fastest = min((us for us in results.values() if us is not None), default=math.inf)
            if self._late() or fastest >= best * (1 - TIE_BAND):
                return
            best, self._stage, limit = fastest, "refine", max(1, request.effort.refine >> 2 * turn)
            found = self._proposals.refined(results, limit, fastest)
            self._try(self._admit(config for config in found if config not in self.attempts))

    def _rescue(self) -> None:
        """If no candidate is clearly faster than the library, try more of them beside the fastest."""
        request, policy = self.request, self.request.screen_policy
        timings = {a.config: a.timing for a in self._working() if a.timing is not None}
        ahead = any(t.ratio is None or t.ratio >= 1 + TIE_BAND for t in timings.values())
        if not request.at_once or not request.effort.rescue or not timings or ahead or self._late():
            return
        self._stage = "refine"
        times = {config: comparable_us(timing, policy) for config, timing in timings.items()}
        results = {c: times.get(c) for c in self.attempts if c.source == "cutegen"}
        fastest = sorted(times, key=times.__getitem__)[:_BESIDE]
        fixed = self._proposals.without_overlap(fastest[0])
        found = self._proposals.refined(results, request.effort.rescue, times[fastest[0]], fixed)
        more = self._admit(dict.fromkeys(config for config in found if config not in self.attempts))
        first = [config for config in (self.default, self.incumbent) if config in times]
        self._try(more, [self.attempts[config] for config in dict.fromkeys([*first, *fastest])])

    def _finals(self) -> tuple[Attempt, ...]:
        """Measure the finalists with settled clocks; if all of them fail, the next best take their place.

        Raises:
            NoWinnerError: None is left.
        """
        while finalists := self._finalists():
            if self.request.at_once:
                return self._already_final(finalists)
            self._tell("final")
            if timed := self._recorded_finals(finalists) or self._time_finals(finalists):
                self._fetch([attempt for attempt in timed if attempt.artifact is None])
                return timed
        raise self._nothing()

    def _already_final(self, finalists: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """Return the finalists with their screened timings, which decide: all were timed together."""
        for attempt in finalists:
            attempt.final, attempt.final_trial = attempt.timing, attempt.trial
        if self.torch is not None:
            self.baseline_trial = self.ledger.write_baseline(self.torch, self.request.final_policy)
        return tuple(finalists)

    def _finalists(self) -> list[Attempt]:
        policy = self.request.screen_policy
        there = [a for a in self._working() if not self._decisive or a.name in self._decisive]
        times = {a.config: comparable_us(a.timing, policy) for a in there if a.timing is not None}
        always = [self.default, *([self.incumbent] if self.incumbent else [])]
        always += self._best_of_each_source(times) if len(self.request.sources) > 1 else []
        always += self._best_in_bursts()
        chosen = pick_finalists(
            times,
            *self.request.finalists,
            list(dict.fromkeys(always)),
            kernel_of=lambda config: self.attempts[config].artifact_key,
            alike=self.request.effort.alike,
        )
        return [self.attempts[config] for config in chosen]

    def _best_in_bursts(self) -> list[Config]:
        """Return the configs that were fastest in bursts; by settled times alone they might be missed."""
        timed = [(a.timing.burst_ratio, a.config) for a in self._working() if a.timing is not None]
        known = [(ratio, config.digest, config) for ratio, config in timed if ratio is not None]
        return [config for _, _, config in sorted(known, reverse=True)[:_BURST_FINALISTS]]

    def _best_of_each_source(self, times: Mapping[Config, float]) -> list[Config]:
        """Return the fastest config of each source, so that the finals compare the sources."""
        best: dict[str, Config] = {}
        for config in sorted(times, key=lambda c: (times[c], c.digest)):
            best.setdefault(config.source, config)
        return list(best.values())

    def _recorded_finals(self, finalists: Sequence[Attempt]) -> tuple[Attempt, ...]:
        """Return the finalists with the recorded finals of an earlier run of this name, if all are there."""
        known = {trial.key: trial for trial in self.ledger.finals()}
        torch = known.get(("torch", ()))
        if torch is None or not all(attempt.key in known for attempt in finalists):
            return ()
        self.torch, self.baseline_trial = torch.timing, torch.id
        for attempt in finalists:
            attempt.final, attempt.final_trial = known[attempt.key].timing, known[attempt.key].id
        return tuple(finalists)

    def _fetch(self, attempts: Sequence[Attempt]) -> None:
        """Get the artifacts of attempts whose timings came from records."""
        self._children.submit(attempt.source for attempt in attempts)
        built: deque[Attempt] = deque()
        waiting = self._sort_out(attempts, built)
        while waiting:
            self._children.poll(_POLL_S)
            waiting = self._sort_out(waiting, built)

    def _time_finals(self, finalists: Sequence[Attempt]) -> tuple[Attempt, ...]:
        policy = self.request.final_policy
        self._fetch([attempt for attempt in finalists if attempt.artifact is None])
        rank = preference(self._proposals.space, self.default, self.incumbent)
        entries = sorted((a for a in finalists if a.ok), key=lambda attempt: rank(attempt.config))
        timed = self._time(entries, policy)
        if not timed and all(attempt.ok for attempt in finalists):
            raise MeasureError(f"the measuring process timed none of {len(finalists)} working kernels")
        with self.ledger.together():
            for attempt, timing in timed:
                attempt.final = timing
                attempt.final_trial = self.ledger.write(attempt, "ok", timing=timing, policy=policy)
            if timed and self.torch is not None:
                self.baseline_trial = self.ledger.write_baseline(self.torch, policy)
        return tuple(attempt for attempt, _ in timed)

    # -- progress

    def _note(self, stage: str) -> None:
        """Add the time since the last call to ``stage``."""
        now = self._clock()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._noted
        self._noted = now

    def _tell(self, stage: str) -> None:
        attempts = self.attempts.values()
        times = [a.timing.median_us for a in attempts if a.timing is not None]
        self._observe(
            Progress(
                problem=self.request.problem,
                stage=stage,
                done=len(attempts) - self.untried,
                total=len(attempts),
                outcomes=self.outcomes(),
                best_us=min(times, default=None),
                left_s=self._left_s(),
                elapsed_s=self._clock() - self._start,
            )
        )
