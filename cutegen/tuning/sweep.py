"""Problem after problem with the same child processes: skip what is finished, run the rest, save winners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from cutegen.build import artifact_key
from cutegen.build.render import render
from cutegen.errors import (
    CheckError,
    ConfigError,
    CutegenError,
    LaunchError,
    MeasureError,
    NoWinnerError,
    ProblemError,
    ResourceError,
)
from cutegen.families.gemm.operator_package import require_package
from cutegen.families.ranges import Range
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.operator_api import Offers
from cutegen.records.entry import Entry
from cutegen.search.defaults import predictor
from cutegen.space import Config
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.candidate_runner import PROBLEM_FAILURES
from cutegen.tuning.history import Ledger
from cutegen.tuning.lookahead import Lookahead
from cutegen.tuning.problem_run import ProblemRun
from cutegen.tuning.range_request import RangeRequest
from cutegen.tuning.range_result import RangeResult
from cutegen.tuning.range_run import RangeRun
from cutegen.tuning.request import Request
from cutegen.tuning.result import Row, TuneResult
from cutegen.tuning.session import Session
from cutegen.tuning.winner import decide, entry_of, predicted_result, recorded_result

__all__ = ["Failed", "Tuning"]

#: However small the stake of a problem, it gets at least an equal share of the seconds divided by this.
_LEAST = 4


@dataclass(frozen=True)
class Failed:
    """A problem without a winner, and why; for a range, its smallest problem."""

    problem: Problem
    error: NoWinnerError | MeasureError | CheckError | LaunchError | ProblemError
    seconds: float = 0.0
    range: Range | None = None


@dataclass(frozen=True)
class _Prepared:
    """A request that was begun.

    Attributes:
        request: What was asked for.
        work: The recorded result of an earlier run, or the run whose kernels are being compiled.
        offers: Kernels of the Operator API, with those that are no candidates.
    """

    request: Request
    work: TuneResult | ProblemRun
    offers: Offers


class _Queue:
    """Requests in their order, each prepared once: while the one before it runs, or when its turn comes.

    Args:
        requests: What is to be done.
        prepare: Begins one.
        rank: Begins to rank the candidates of one that may be prepared next.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        prepare: Callable[[Request], _Prepared | Failed],
        rank: Callable[[Request], None],
    ) -> None:
        self._requests = requests
        self._prepare = prepare
        self._rank = rank
        self._begun: dict[int, _Prepared | Failed | CutegenError] = {}

    def prepare(self, at: int) -> None:
        """Begin the request in that place, if there is one and it has not been begun.

        An error is no business of the request that runs: :meth:`take` raises it.
        """
        if at in self._begun or at >= len(self._requests):
            return
        try:
            begun = self._begun[at] = self._prepare(self._requests[at])
        except CutegenError as error:
            self._begun[at] = error
            return
        if at + 1 < len(self._requests) and _is_under_way(begun):
            self._rank(self._requests[at + 1])

    def take(self, at: int) -> _Prepared | Failed:
        """Return the request in that place, which is begun now at the latest; raises what ended that."""
        self.prepare(at)
        begun = self._begun.pop(at)
        if isinstance(begun, CutegenError):
            raise begun
        return begun


class Tuning:
    """Tunes problems one after another.

    Args:
        session: What they share.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._setting = session.setting
        self._clock = session.clock

    def run(
        self,
        requests: Iterable[Request],
        budget_s: float | None = None,
        parts: Sequence[float] = (),
    ) -> Iterator[TuneResult | Failed]:
        """Yield the result of each request, in order.

        While one is measured, the next is being compiled and the kernels of the one after it are ranked.
        Where a run compiles more kernels around its best, these come before those of the next.

        Args:
            requests: What to do.
            budget_s: Seconds for all of them together; each gets its share of what is left.
            parts: Proportions of these shares; equal by default.

        Raises:
            BuildError: There is no compiler, or it cannot run; or the Operator API cannot be asked.
            DeviceError: The GPU cannot be used.
            StoreError: Cache, database or table cannot be read or written.
            TableError: The table is malformed, or for another GPU or other software.
        """
        started, queue = self._clock(), list(requests)
        parts = parts or [1.0] * len(queue)
        with closing(Lookahead()) as ahead:
            waiting = _Queue(queue, lambda request: self._prepare_or_fail(request, ahead), ahead.begin)
            for at in range(len(queue)):
                begun = self._clock()
                current = waiting.take(at)
                left_s = None if budget_s is None else budget_s - (self._clock() - started)
                share = None if left_s is None else left_s * (parts[at] / sum(parts[at:]))
                meanwhile = partial(waiting.prepare, at + 1)
                yield self._conclude(current, share, begun if at else started, meanwhile)

    def run_all(
        self,
        requests: Sequence[Request | RangeRequest],
        budget_s: float | None = None,
        stakes: Sequence[float] | None = None,
    ) -> Iterator[TuneResult | RangeResult | Failed]:
        """Yield the result of each request, in order, ranges among them; as :meth:`run`.

        Args:
            requests: What to do.
            budget_s: Seconds for all of them together.
            stakes: How much depends on each, in any unit: its share of the seconds follows from that, and is
                a quarter of an equal one at least. None for equal shares.
        """
        started, parts, begun = self._clock(), _parts(stakes, len(requests)), 0
        for is_range, group in groupby(requests, key=lambda request: isinstance(request, RangeRequest)):
            some = list(group)
            own, all_left = parts[begun : begun + len(some)], sum(parts[begun:])
            begun += len(some)
            spent = self._clock() - started
            share = None if budget_s is None else (budget_s - spent) * sum(own) / all_left
            if not is_range:
                single = [request for request in some if isinstance(request, Request)]
                yield from self.run(single, share, own)
                continue
            for request, part in zip(some, own, strict=True):
                assert isinstance(request, RangeRequest)
                yield self._run_range(request, None if share is None else share * part / sum(own))

    def _run_range(self, request: RangeRequest, budget_s: float | None) -> RangeResult | Failed:
        begun = self._clock()
        run = RangeRun(request, self._session)
        try:
            return run.run(budget_s)
        except (*PROBLEM_FAILURES, ProblemError) as error:
            return Failed(request.range.low, error, self._clock() - begun, request.range)

    def _prepare_or_fail(self, request: Request, ahead: Lookahead) -> _Prepared | Failed:
        """Prepare, or return why this target cannot compute the problem; it may compute the others."""
        try:
            return self._prepare(request, ahead)
        except ProblemError as error:
            return Failed(request.problem, error)

    def _prepare(self, request: Request, ahead: Lookahead) -> _Prepared:
        setting, children = self._setting, self._session.children
        entry = setting.entry(request.problem)
        run = self._session.name_of(request.run_name(setting.device, setting.toolchain.digest))
        ledger = self._session.ledger(request, run)
        asked = "operators" in request.sources and not request.explicit
        offers = setting.offers(request.problem) if asked else Offers((), ())
        finished = self._finished(request, entry, ledger)
        if finished is not None:
            return _Prepared(request, finished, offers)
        if not ledger.finals():
            # It imports torch while candidates are chosen. Explicit ones may be in the store already.
            children.start_bench()
            if not request.explicit:
                children.start_compiler()
        problem_run = ProblemRun(
            request,
            self._session,
            ledger,
            incumbent=_incumbent(entry, request),
            offers=offers.configs,
        )
        ahead.wait()
        problem_run.prepare()
        return _Prepared(request, problem_run, offers)

    def _finished(self, request: Request, entry: Entry | None, ledger: Ledger) -> TuneResult | None:
        """Return the recorded result if this very run was finished before and its kernel is still there."""
        setting = self._setting
        if entry is None or setting.device is None:
            return None
        finals = ledger.finals()
        if not finals:
            return None
        space = find_space(request.problem.family, setting.arch)
        result = recorded_result(request, space, setting.device, entry, finals)
        if result is None or not all(self._is_current(result.problem, row) for row in result.rows):
            return None
        key = result.winner.artifact_key
        if entry.artifact_key != key or setting.store.find(setting.arch.name, key) is None:
            return None
        return replace(result, outcomes=ledger.outcomes())

    def _is_current(self, problem: Problem, row: Row) -> bool:
        """Whether a recorded row is about the kernel that its config is rendered to today."""
        try:
            source = render(problem, row.config, self._setting.arch)
        except (ConfigError, ResourceError):
            return False
        return row.artifact_key == artifact_key(source, self._setting.toolchain)

    def _conclude(
        self,
        prepared: _Prepared | Failed,
        budget_s: float | None,
        begun: float,
        meanwhile: Callable[[], None],
    ) -> TuneResult | Failed:
        if isinstance(prepared, Failed):
            return prepared
        refused = tuple(map(str, prepared.offers.refused))
        if isinstance(prepared.work, TuneResult):
            return replace(prepared.work, seconds=self._clock() - begun, refused=refused)
        problem_run, runner = prepared.work, prepared.work.runner
        try:
            result = self._result(problem_run, problem_run.run(budget_s, meanwhile))
        except PROBLEM_FAILURES as error:
            return Failed(prepared.request.problem, error, self._clock() - begun)
        return replace(
            result,
            outcomes=runner.attempts.outcomes(),
            untried=runner.attempts.untried,
            kernels=runner.attempts.kernels,
            seconds=self._clock() - begun,
            stages=runner.clock.stages if runner.ran else {},
            reused=not runner.ran,
            run=runner.ledger.run,
            refused=refused,
            failed=runner.attempts.failed,
            dead_knobs=problem_run.dead_knobs,
        )

    def _result(self, problem_run: ProblemRun, finalists: Sequence[Attempt]) -> TuneResult:
        runner, setting = problem_run.runner, self._setting
        request = runner.request
        space = find_space(request.problem.family, request.arch)
        if setting.device is None:
            predict = predictor(space, request.problem, request.sm_count)
            return predicted_result(request, finalists, runner.default, predict)
        result = decide(
            request,
            space,
            setting.device,
            finalists,
            runner.torch,
            default=runner.default,
            incumbent=runner.incumbent,
        )
        setting.save(entries=[entry_of(result, problem_run.baseline_trial)])
        return result


def _parts(stakes: Sequence[float] | None, count: int) -> list[float]:
    """Return the proportions in which requests share the seconds, from their stakes."""
    if not stakes or not sum(stakes):
        return [1.0] * count
    least = sum(stakes) / count / _LEAST
    return [max(stake, least) for stake in stakes]


def _is_under_way(prepared: _Prepared | Failed) -> bool:
    """Whether there is anything to run; after a finished problem, others are likely finished too."""
    return isinstance(prepared, _Prepared) and isinstance(prepared.work, ProblemRun)


def _incumbent(entry: Entry | None, request: Request) -> Config | None:
    """Return the config that the table names, unless it needs a package that is not installed.

    It competes even if its source was not asked for: else a run for one source would replace the winner of
    another without comparing the two.
    """
    if entry is None or entry.config is None:
        return None
    if entry.config.source == "operators" and "operators" not in request.sources:
        try:
            require_package()
        except ResourceError:
            return None
    return entry.config
