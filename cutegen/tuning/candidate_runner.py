"""Builds, checks and times candidates of one problem, and records every outcome as soon as it is known."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from cutegen.arch import Arch
from cutegen.build import Artifact, artifact_key
from cutegen.build.render import Source, render
from cutegen.errors import CheckError, LaunchError, MeasureError, NoWinnerError
from cutegen.families.registry import find_family, space_of
from cutegen.family import Problem
from cutegen.measure import Candidate
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.space import Config, Space
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.attempts import Attempts
from cutegen.tuning.history import Ledger
from cutegen.tuning.progress import Progress
from cutegen.tuning.request import Request
from cutegen.tuning.run_clock import RunClock
from cutegen.tuning.same_kernels import SameKernels, unfit
from cutegen.tuning.session import Session

__all__ = ["PROBLEM_FAILURES", "CandidateRunner"]

#: What may go wrong with one problem without touching the others, such as operands that do not fit the GPU.
PROBLEM_FAILURES = (NoWinnerError, MeasureError, CheckError, LaunchError)

#: Seconds to wait for the compiler at a time while nothing else is to be done.
_POLL_S = 0.2


class CandidateRunner:
    """Tries the configs that it is given; which ones, and what follows from their times, is up to the caller.

    Args:
        request: What to do.
        session: Compiler, measuring child, toolchain, and who sees the progress.
        ledger: What earlier runs found out, and where this run records its trials.
        default: What an untuned call runs.
        incumbent: The config that the table names now; None if there is none, or it is not valid.
        render: Makes the text of a kernel of the request's target.
        checked: Configs that passed the check on another problem of the same signature; not checked again.

    Attributes:
        attempts: What is known of each config so far.
        torch: The timing of the baseline in the last rounds.
        ran: Whether anything was built or measured.
        stage: What is being done, for progress.
        clock: Budget, and seconds spent in each stage: ``propose`` (candidates), ``open`` (the problem),
            ``compile``, ``check``, ``screen``, ``refine``, ``final``.
        decisive: Names of the attempts of the last rounds, where one set of rounds decides.
    """

    def __init__(
        self,
        request: Request,
        session: Session,
        ledger: Ledger,
        *,
        default: Config,
        incumbent: Config | None = None,
        render: Callable[[Problem, Config, Arch], Source] = render,
        checked: set[Config] | None = None,
    ) -> None:
        self.request = request
        self.ledger = ledger
        self.default = default
        self.incumbent = incumbent
        self.attempts = Attempts(request)
        self.torch: Timing | None = None
        self.ran = False
        self.stage = "compile"
        self.clock = RunClock(session.clock)
        self.decisive: frozenset[str] = frozenset()
        self._children = session.children
        self._toolchain = session.setting.toolchain
        self._observe = session.observe
        self._render = render
        self._checked = set() if checked is None else checked
        self._opened = False
        self._running = False
        self._broken: dict[str, Attempt] = {}
        self._same = SameKernels()
        self._strict = find_family(request.problem.family).default_is_its_authors

    def begin(self, budget_s: float | None) -> None:
        """Start the clock of a run; kernels that are submitted from now on go before those of later problems.

        Args:
            budget_s: Seconds after which nothing new is tried; None for no limit.
        """
        self.clock.begin(budget_s)
        self._running = True

    @property
    def measures(self) -> bool:
        """Whether candidates are run, not only compiled."""
        return self._children.measures

    # -- build, check, time

    def admit(self, configs: Iterable[Config]) -> list[Attempt]:
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

    def screen(self, configs: Iterable[Config]) -> None:
        """Check and time ``configs`` beside each other, and decide nothing: see :attr:`attempts`."""
        self.try_all(self.admit(dict.fromkeys(configs)))

    def try_all(self, attempts: Sequence[Attempt], beside: Sequence[Attempt] = ()) -> None:
        """Build, check and time ``attempts``, and time those ``beside`` once more in the same rounds."""
        waiting = [attempt for attempt in attempts if not attempt.done]
        built: deque[Attempt] = deque()
        checked: list[Attempt] = []
        chunk = sys.maxsize if self.request.at_once else self.request.effort.chunk
        if waiting:
            self.ran = True
            if self._children.measures:
                self._open()  # operands are made while the compiler works
                self.clock.add_time("open")
        while (waiting or built or checked) and not self.late(checked):
            idle = not built and len(checked) < chunk and waiting
            self._children.poll(_POLL_S if idle else 0.0)
            waiting = self._sort_out(waiting, built, in_order=self._strict)
            if built:
                self._check(built.popleft(), checked)
            elif checked and (not waiting or len(checked) >= chunk):
                self._screen([*beside, *checked[:chunk]])
                del checked[:chunk]
            self.clock.add_time(self.stage)
            self.tell(self.stage)
        if checked and (self.request.at_once or not self.attempts.working()):
            self._screen([*beside, *checked[:chunk]])
            self.clock.add_time(self.stage)

    def _sort_out(
        self, waiting: Sequence[Attempt], built: deque[Attempt], *, in_order: bool
    ) -> list[Attempt]:
        """Move compiled attempts to ``built``, record failures, and return those still being compiled.

        Args:
            waiting: Attempts without an outcome.
            built: Grows by those that are compiled.
            in_order: Whether the default and the incumbent go first: where different configs may turn out to
                be one kernel, only the first of them is measured.
        """
        still = []
        for attempt in waiting:
            result = self._children.result(attempt.source)
            if result is None or (in_order and self._comes_later(attempt)):
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
                outcome = "build_interrupted" if result.again else "build_failed"
                self._fail(attempt, outcome, f"{result.outcome}: {result.message}")
        return still

    def _comes_later(self, attempt: Attempt) -> bool:
        """Whether the default or the incumbent is still being compiled and goes before ``attempt``."""
        first = [
            self.attempts[c] for c in (self.default, self.incumbent) if c is not None and c in self.attempts
        ]
        return attempt not in first and any(each.artifact is None and not each.done for each in first)

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
        self.stage = "check" if self.stage == "compile" else self.stage
        self._open()
        result = self._children.bench.check(self._candidate(attempt))
        if result.ok:
            self._checked.add(attempt.config)
            checked.append(attempt)
        else:
            self._fail(attempt, result.outcome, result.error)

    def require_right_default(self, attempt: Attempt) -> None:
        """Stop if the author's own config of a kernel disagrees with the author's reference.

        Raises:
            NoWinnerError: It does.
        """
        if self._strict and attempt.config == self.default and attempt.outcome == "wrong_result":
            raise NoWinnerError(
                f"{self.request.problem}: the default config disagrees with the reference, so nothing was "
                f"timed: {attempt.error}; fix the reference, the declaration or the kernel",
                self.attempts.outcomes(),
            )

    def _screen(self, batch: Sequence[Attempt]) -> None:
        self.stage = "screen" if self.stage == "check" else self.stage
        policy = self.request.screen_policy
        if self.stage == "refine" and not self.request.at_once:
            # Neighbours of the best: those that may win are near it when settled. Finals have the rest.
            policy = policy.without_regimes()
        if self.request.at_once:
            if self.decisive and self.torch is not None:
                self.ledger.write_baseline(self.torch, policy)  # marks the end of the previous set
            self.decisive = frozenset(attempt.name for attempt in batch)
        timed = self.measure(batch, policy)
        with self.ledger.together():
            for attempt, timing in timed:
                attempt.screened(timing, self.ledger.write(attempt, "ok", timing=timing, policy=policy))

    def measure(self, batch: Sequence[Attempt], policy: Policy) -> list[tuple[Attempt, Timing]]:
        """Time ``batch`` together with the baseline; failures are recorded and left out.

        The energy of the default and of the incumbent is measured however slow they are.
        """
        self._open()
        self.ran = True
        keep = [config.digest for config in (self.default, self.incumbent) if config is not None]
        candidates = [self._candidate(attempt) for attempt in batch]
        decides = policy == self.request.final_policy and not self.request.at_once
        run = self._children.guarded.time(candidates, policy, keep, self.clock.left_s, decides=decides)
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
            self._children.guarded.open(self.request.problem, self.clock.left_s)
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

    def _space_of(self, config: Config) -> Space:
        return space_of(config, self.request.problem.family, self.request.arch)

    def _fail(self, attempt: Attempt, outcome: str, error: str) -> None:
        attempt.fail(outcome, error, self.ledger.write(attempt, outcome, error=error))
        if outcome in ("timeout", "launch_failed"):
            self._broken.setdefault(attempt.artifact_key, attempt)
        self.require_right_default(attempt)

    def fetch(self, attempts: Sequence[Attempt]) -> None:
        """Get the artifacts of attempts whose timings came from records."""
        self._children.submit(attempt.source for attempt in attempts)
        built: deque[Attempt] = deque()
        # Their timings decide, whatever else is one kernel with them; the incumbent may never be compiled.
        waiting = self._sort_out(attempts, built, in_order=False)
        while waiting:
            self._children.poll(_POLL_S)
            waiting = self._sort_out(waiting, built, in_order=False)

    def dead_knobs(self, space: Space) -> tuple[str, ...]:
        """Return sentences on knobs of ``space`` that changed no kernel, as far as that is known."""
        return self._same.dead_knobs(space)

    # -- time and progress

    def late(self, checked: Sequence[Attempt] = ()) -> bool:
        """Whether what is left of the budget should go to the finalists.

        Args:
            checked: Attempts that passed the check and wait to be timed; they count as tried.
        """
        left = self.clock.left_s
        if left is None:
            return False
        known = [*self.attempts.working(), *checked]
        default = self.attempts[self.default]
        if not known or not (default.done or default in known):
            return False
        return left <= (self.request.final_s if self._children.measures else 0.0)

    def tell(self, stage: str) -> None:
        """Report the progress."""
        attempts = self.attempts.values()
        times = [a.timing.median_us for a in attempts if a.timing is not None]
        self._observe(
            Progress(
                problem=self.request.problem,
                stage=stage,
                done=len(attempts) - self.attempts.untried,
                total=len(attempts),
                outcomes=self.attempts.outcomes(),
                best_us=min(times, default=None),
                left_s=self.clock.left_s,
                elapsed_s=self.clock.elapsed_s,
            )
        )
