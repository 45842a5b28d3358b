"""The loop for a range: propose, compile, measure some sizes, larger ones under load, then where in doubt."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import exp, log, log2
from statistics import fmean

from cutegen.build.render import Source
from cutegen.errors import CutegenError, NoWinnerError
from cutegen.families.registry import find_family, find_space
from cutegen.family import Problem
from cutegen.measure.timing import Timing
from cutegen.records.range_entry import RangeEntry
from cutegen.runtime.answer_lookup import MEASURED_LEAD
from cutegen.search.defaults import default_config
from cutegen.search.range_model import Estimates
from cutegen.search.range_plan import (
    Cell,
    cells_of,
    contenders,
    first_sizes,
    most_disputed,
    most_doubtful,
    ready_first,
)
from cutegen.search.range_predict import Predictions
from cutegen.space import Config
from cutegen.tuning import range_answers
from cutegen.tuning.candidate_runner import PROBLEM_FAILURES, CandidateRunner
from cutegen.tuning.compared_ratios import ComparedRatios
from cutegen.tuning.progress import Progress
from cutegen.tuning.range_proposals import RangeProposals, coarse_first
from cutegen.tuning.range_request import RangeRequest, SizeRequest
from cutegen.tuning.range_result import RangeResult
from cutegen.tuning.screening import Screening, SourceCache
from cutegen.tuning.session import Session
from cutegen.tuning.setting import Setting

__all__ = ["RangeRun", "untuned_range"]

#: Where all contenders fail, others are tried this often.
_FURTHER_TRIES = 2
#: Up to the first of so many parts of the sizes are measured while the whole space is still being ranked.
_EARLY = 4
#: How many sizes ahead are searched for one whose kernels are all compiled: a look takes some 10 ms.
_AHEAD = 6
#: Doubtful sizes that are chosen at a time. To find them takes a tenth of a second, in which the GPU idles.
_DOUBTFUL_AT_A_TIME = 4


class RangeRun:
    """Finds the answers for a range and records every trial as soon as it is known.

    Args:
        request: What to do.
        session: What it shares with other runs.
    """

    def __init__(self, request: RangeRequest, session: Session) -> None:
        setting = session.setting
        self.request = request
        self.run_name = session.name_of(request.run_name(setting.device, setting.toolchain.digest))
        self._setting = setting
        self._children = session.children
        self._observe = session.observe
        self._again = session.again
        self._clock = session.clock
        self._start = session.clock()
        self._render = SourceCache()
        self._screening = Screening(session, self.run_name, self._render)
        self._cells = cells_of(request.range)
        space = find_space(request.range.low.family, request.base.arch)
        self._predict = Predictions(request.range, space, request.base.sm_count)
        self._estimates = Estimates(self._predict, self._predict.tile_of)
        self._proposals = RangeProposals(request, self._cells, self._predict)
        self._baseline = range_answers.Baseline(lru_cache(maxsize=None)(self._baseline_us), self._problem_at)
        self._kernel_of = lru_cache(maxsize=None)(self._proposals.kernel_of)
        self._pool: dict[Config, list[int]] = {}
        self._results: dict[int, dict[Config, range_answers.Measured]] = {}
        self._keys: dict[Config, str] = {}
        self._regrets: dict[int, float] = {}
        self._compared = ComparedRatios(self._kernel_of)
        self._outcomes: Counter[str] = Counter()
        self._error: CutegenError | None = None
        self._contended: dict[int, list[Config]] = {}
        self._given_up: set[int] = set()
        self._failed: set[Config] = set()
        self._ran = False
        self._planned = 0

    def run(self, budget_s: float | None = None) -> RangeResult:
        """Tune the range, or return what the table says if this very run was finished before.

        Args:
            budget_s: No further size is begun so many seconds after the run began, beside the two ends.

        Raises:
            NoWinnerError: No candidate works at any size.
            CutegenError: As :meth:`~cutegen.tuning.Tuning.run`.
        """
        self._start = self._clock()
        finished = None if self._again else self._finished()
        if finished is not None:
            return finished
        self._tell("propose")
        self._children.start_compiler()
        self._children.start_bench()
        incumbents = self._proposals.incumbents(self._setting.load_table())
        self._pool = self._proposals.choose(incumbents, self._submit_kernels)
        effort, sizes, loaded = self.request.effort, self._first_sizes(), self._loaded_sizes()
        self._planned = len(sizes) + len(loaded) + effort.doubtful + effort.random
        self._submit([*sizes, *loaded])
        due = self._at_nearest(incumbents, [*sizes, *loaded])
        known = [size for size in sizes[: len(sizes) // _EARLY] if not self._proposals.waits(size)]
        is_ranked = self._proposals.is_ranked
        early = self._measure_sizes(known, "sizes", due, budget_s, until=is_ranked)
        self._take_in_search([*sizes, *loaded])
        self._measure_sizes([size for size in sizes if size not in early], "sizes", due, budget_s)
        limit_s = effort.seconds if budget_s is None else min(budget_s, effort.seconds)
        self._measure_sizes(loaded, "loaded", due, limit_s)
        self._measure_doubtful(limit_s)
        self._measure_random(budget_s)
        return self._conclude()

    def _first_sizes(self) -> list[int]:
        """Return sizes at even distances that are measured in short rounds, the ends first."""
        sizes = first_sizes(self._cells, self.request.effort.sizes)
        return coarse_first([size for size in sizes if not self._is_loaded(size)])

    def _loaded_sizes(self) -> list[int]:
        """Return sizes that are measured under load, beside a library's call.

        The largest comes first, which loads the GPU most, then a few that span all, then those in between.
        """
        cells = [cell for cell in self._cells if self._is_loaded(cell.size)]
        return coarse_first(first_sizes(cells, self.request.effort.loaded)[::-1]) if cells else []

    def _is_loaded(self, size: int) -> bool:
        return self.request.effort.loaded > 0 and self._baseline.is_uneven(size)

    def _measure_sizes(
        self,
        sizes: Sequence[int],
        stage: str,
        due: Mapping[int, Sequence[Config]],
        budget_s: float | None,
        *,
        until: Callable[[], bool] = lambda: False,
    ) -> set[int]:
        """Measure the contenders at ``sizes``; of a budget that has run out the two ends take no notice.

        Stops before the size at which ``until`` holds, and returns the sizes before it.
        """
        ends, before = (self._cells[0].size, self._cells[-1].size), set[int]()
        for size in ready_first(sizes, self._is_compiled, _AHEAD):
            if until():
                break
            before.add(size)
            if size in ends or not self._late(budget_s):
                self._measure(size, stage, also=due.get(size, ()))
        return before

    def _take_in_search(self, sizes: Sequence[int]) -> None:
        """Let the kernels of the whole space compete at ``sizes`` too; waits until it is ranked."""
        pool = self._proposals.searched()
        if pool is not None:
            self._pool = {config: at for config, at in pool.items() if config not in self._failed}
            self._contended.clear()
            self._submit(sizes)

    def _at_nearest(
        self, incumbents: Mapping[int, Sequence[Config]], sizes: Sequence[int]
    ) -> dict[int, list[Config]]:
        """Return the incumbents by that of ``sizes`` which is nearest to their own: they are timed there."""
        found: dict[int, list[Config]] = {}
        for at, configs in incumbents.items():
            size = min(sizes, key=lambda other: abs(log2(other / at)))
            found.setdefault(size, []).extend(c for c in configs if self._predict(size, c) is not None)
        return found

    def _late(self, limit_s: float | None) -> bool:
        return limit_s is not None and self._clock() - self._start >= limit_s

    # -- kernels

    def _submit_kernels(self, kernels: Iterable[tuple[Problem, Config]]) -> None:
        arch = self.request.base.arch
        self._children.submit(self._render(problem, config, arch) for problem, config in kernels)

    def _submit(self, sizes: Sequence[int]) -> None:
        """Ask the compiler for every kernel, those that the first sizes need before the others."""
        for at, size in enumerate(sizes):
            self._children.submit(self._sources_at(size), urgent=at < 2)
        self._submit_kernels((self._problem_at(at[0]), config) for config, at in self._pool.items())

    def _sources_at(self, size: int) -> list[Source]:
        """Return the kernels of what is to be measured at ``size``."""
        problem, arch = self._problem_at(size), self.request.base.arch
        return [self._render(problem, config, arch) for config in self._contenders(size)]

    def _is_compiled(self, size: int) -> bool:
        self._children.poll(0.0)
        return all(self._children.result(source) is not None for source in self._sources_at(size))

    def _contenders(self, size: int) -> list[Config]:
        """Return what to measure at ``size``; of one kernel first what was proposed for sizes nearby."""
        if size not in self._contended:
            self._contended[size] = self._contenders_by_estimate(size)
        return self._contended[size]

    def _contenders_by_estimate(self, size: int) -> list[Config]:
        effort, loaded = self.request.effort, self._is_loaded(size)
        nearest = {config: min(abs(log2(size / at)) for at in sizes) for config, sizes in self._pool.items()}
        return contenders(
            self._estimates,
            size,
            sorted(nearest, key=nearest.__getitem__),
            effort.loaded_contenders if loaded else effort.contenders,
            kernel_of=self._kernel_of,
            is_proven=self._predict.is_proven,
        )

    def _problem_at(self, size: int) -> Problem:
        """Return the problem of a size that the layout allows, as those of all cells."""
        problem = self.request.range.at(size)
        assert problem is not None
        return problem

    def _baseline_us(self, size: int) -> float | None:
        """Return what the baseline is expected to take at ``size``, None if nobody predicts it."""
        problem, base = self._problem_at(size), self.request.base
        return find_family(problem.family).baseline_us(problem, base.arch, base.sm_count)

    # -- measurements

    def _measure(self, size: int, stage: str, *, also: Iterable[Config] = ()) -> Mapping[Config, float]:
        """Measure the contenders at ``size`` beside each other; return microseconds of those that work."""
        request = self._request_at(size)
        if request is None:
            return {}
        run = self._screening.start(request)
        try:
            run.screen([*dict.fromkeys([*also, *self._contenders(size)])])
            for _ in range(_FURTHER_TRIES):
                self._drop_failed(run)
                if any(attempt.ok for attempt in run.attempts.values()):
                    break
                run.screen(self._contenders(size))
        except PROBLEM_FAILURES as error:
            self._error = error
        self._take_in(size, run)
        self._tell(stage)
        return self._estimates.measured.get(size, {})

    def _request_at(self, size: int) -> SizeRequest | None:
        if self._is_loaded(size):
            return self.request.under_load(size, first=not self._compared.sizes)
        return self.request.at(size)

    def _drop_failed(self, run: CandidateRunner) -> None:
        """Let what failed compete no more; who contends is worked out anew after every run."""
        self._contended.clear()
        for config, attempt in run.attempts.items():
            if attempt.done and not attempt.ok:
                self._failed.add(config)
                self._pool.pop(config, None)

    def _take_in(self, size: int, run: CandidateRunner) -> None:
        self._ran |= run.ran
        self._outcomes += run.attempts.outcomes()
        found: dict[Config, range_answers.Measured] = {}
        for config, attempt in run.attempts.items():
            if attempt.timing is not None:
                self._keys[self._kernel_of(config)] = attempt.artifact_key
                found[config] = range_answers.Measured(attempt.timing, attempt.trial)
        if found:
            self._results.setdefault(size, {}).update(found)
            self._learn(size, {config: each.timing for config, each in found.items()})
        else:
            self._given_up.add(size)
        self._drop_failed(run)

    def _learn(self, size: int, timings: Mapping[Config, Timing]) -> None:
        """Take in timings at ``size``; under load all take longer, so only their relation counts."""
        times = {config: timing.paired.mid for config, timing in timings.items()}
        if self._is_loaded(size):
            ratios = {c: timing.ratio for c, timing in timings.items() if timing.ratio is not None}
            self._compared.learn(size, ratios)
            known = {c: each for c in times if (each := self._estimates.estimate(size, c)) is not None}
            slower = exp(fmean(log(times[c] / each.time_us) for c, each in known.items())) if known else 1.0
            times = {config: us / slower for config, us in times.items()}
        self._estimates.learn(size, times)

    def _measure_doubtful(self, limit_s: float) -> None:
        """Measure where an answer may be wrong, a few sizes at a time: each tells of the next."""
        left = self.request.effort.doubtful
        while left > 0 and not self._late(limit_s):
            sizes = self._doubtful(min(left, _DOUBTFUL_AT_A_TIME))
            left -= len(sizes)
            for size in sizes:
                if self._late(limit_s):
                    return
                self._measure(size, "doubtful")
            if not sizes:
                return

    def _doubtful(self, count: int) -> list[int]:
        """Return up to ``count`` sizes at which a measurement may change the answer most."""
        cells = [cell for cell in self._cells if cell.size not in self._given_up]
        rivals = partial(range_answers.rivals, self._estimates, kernel_of=self._kernel_of)
        found = most_doubtful(self._estimates, cells, rivals, count)
        return [*dict.fromkeys([*self._disputed(cells), *found])][:count]

    def _disputed(self, cells: Sequence[Cell]) -> list[int]:
        """Return sizes of which it is in doubt whether calls are better left to the baseline: one of four."""
        low = self.request.range.low
        if not find_family(low.family).is_library_call(low):
            return []
        ratios = range_answers.best_ratios(self._results, self._baseline)
        cells = [cell for cell in cells if not self._is_loaded(cell.size)]
        return most_disputed(ratios, cells, 1 - MEASURED_LEAD, _DOUBTFUL_AT_A_TIME // 4)

    def _measure_random(self, budget_s: float | None) -> None:
        """Measure how good the answers are at sizes that had no part in choosing them."""
        sizes = [size for size in self._random_sizes() if size not in self._estimates.measured]
        if not sizes or not self._estimates.measured:
            return
        answer_at = self._answer_at(self._answers())
        for size in sizes:
            if self._late(budget_s):
                return
            config = answer_at(size)
            also = [config] if self._predict(size, config) is not None else []
            times = self._measure(size, "random", also=also)
            if config in times:
                self._regrets[size] = range_answers.regret_of(times, config)

    def _random_sizes(self) -> list[int]:
        whole = self.request.range
        rng = random.Random(f"{whole} {self.request.base.seed}")
        drawn = (
            round(whole.first * (whole.last / whole.first) ** rng.random())
            for _ in range(self.request.effort.random)
        )
        found = (whole.at_most(value) or whole.at_least(value) for value in drawn)
        return sorted({problem.sizes[whole.size] for problem in found if problem is not None})

    # -- the result

    def _answers(self) -> list[Config]:
        """Return which config answers each cell; the default where nothing that was measured is valid."""
        found = range_answers.answers(self._estimates, self._cells, self._kernel_of)
        return [config or self._default(cell.size) for cell, config in zip(self._cells, found, strict=True)]

    def _default(self, size: int) -> Config:
        """Return what a call would run without the range, unless that was seen to fail."""
        problem = self._problem_at(size)
        default = self._proposals.default(problem)
        if default in self._failed:
            raise self._nothing(str(problem))
        return default

    def _answer_at(self, answers: Sequence[Config]) -> Callable[[int], Config]:
        ends = [cell.last for cell in self._cells]
        return lambda size: answers[min(bisect_left(ends, size), len(ends) - 1)]

    def _conclude(self) -> RangeResult:
        if not self._results:
            raise self._nothing(str(self.request.range))
        chosen = self._answers()
        answer_at = self._answer_at(chosen)
        ratio_at = range_answers.ratios(
            self._results, self._estimates, self._baseline, self._compared.between(answer_at)
        )
        timings = [found.timing for each in self._results.values() for found in each.values()]
        pieces = range_answers.pieces(
            self._cells,
            chosen,
            lambda config: self._keys.get(self._kernel_of(config), ""),
            ratio_at,
            allow_torch=self.request.base.allow_torch,
        )
        entry = RangeEntry(
            self.request.range,
            pieces,
            range_answers.summary(self._regrets),
            tuple(range_answers.points(self._results, answer_at, self._regrets, ratio_at)),
            context=self.request.base.context,
            baseline=next((timing.reference for timing in timings if timing.reference), ""),
            contended_by=next((timing.contended_by for timing in timings if timing.contended_by), ""),
            run=self.run_name,
        )
        self._setting.save(ranges=[entry])
        self._tell("done")
        return self._result(entry, reused=not self._ran)

    def _nothing(self, what: str) -> NoWinnerError:
        why = f"; the last size failed with: {self._error}" if self._error else ""
        return NoWinnerError(f"no working kernel for {what}{why}", self._outcomes)

    def _finished(self) -> RangeResult | None:
        """Return what the table says if this very run wrote it and its kernels are still there."""
        setting, table = self._setting, self._setting.load_table()
        for entry in table.ranges if table is not None else ():
            same = entry.range == self.request.range and entry.run == self.run_name and not entry.contended_by
            keys = {piece.artifact_key for piece in entry.pieces if piece.artifact_key}
            if same and all(setting.store.find(setting.arch.name, key) is not None for key in keys):
                return self._result(entry, reused=True)
        return None

    def _result(self, entry: RangeEntry, *, reused: bool) -> RangeResult:
        setting = self._setting
        return RangeResult(
            entry,
            arch=setting.arch.name,
            device=setting.device.name if setting.device else "",
            outcomes=dict(self._outcomes),
            sizes=len(self._results),
            kernels=len(self._keys),
            seconds=self._clock() - self._start,
            reused=reused,
        )

    def _tell(self, stage: str) -> None:
        done = len(self._results) + len(self._given_up)
        self._observe(
            Progress(
                problem=self.request.range.low,
                stage=stage,
                done=done,
                total=max(self._planned, done),
                outcomes=dict(self._outcomes),
                elapsed_s=self._clock() - self._start,
            )
        )


def untuned_range(request: RangeRequest, setting: Setting) -> RangeResult:
    """Return the default of each size as if it had been tuned; nothing is measured or written."""
    base, cells = request.base, cells_of(request.range)
    space = find_space(request.range.low.family, base.arch)
    problems = [request.range.at(cell.size) for cell in cells]
    chosen = [default_config(space, problem, base.sm_count) for problem in problems if problem is not None]
    pieces = range_answers.pieces(
        cells, chosen, lambda config: "", lambda size, config: None, allow_torch=False
    )
    return RangeResult(RangeEntry(request.range, pieces, context=base.context), setting.arch.name, "")
