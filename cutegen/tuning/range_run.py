"""The loop for a range: propose, compile, measure few sizes, then more where an answer is in doubt."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import log2

from cutegen.arch import Arch
from cutegen.build.render import Source, recipe_of, render
from cutegen.digest import digest
from cutegen.errors import CheckError, CutegenError, LaunchError, MeasureError, NoWinnerError
from cutegen.families.registry import find_family, find_space, is_legal, space_of, spaces_beside
from cutegen.family import Problem
from cutegen.measure.context import BACK_TO_BACK
from cutegen.records.range_entry import RangeEntry
from cutegen.records.trials import TrialStore
from cutegen.runtime.dispatch import MEASURED_LEAD
from cutegen.search.defaults import default_config
from cutegen.search.parallel_rank import rank_all
from cutegen.search.range_model import Estimates
from cutegen.search.range_plan import (
    Cell,
    cells_of,
    contenders,
    first_sizes,
    most_disputed,
    most_doubtful,
    ready_first,
    shortlist,
)
from cutegen.search.range_predict import Predictions
from cutegen.search.strategies import likely
from cutegen.search.twins import alone
from cutegen.space import Config
from cutegen.tuning import range_answers as given
from cutegen.tuning.backends import Children
from cutegen.tuning.history import Ledger
from cutegen.tuning.problem_run import ProblemRun
from cutegen.tuning.progress import Observer, Progress, ignore_progress
from cutegen.tuning.range_request import RangeRequest, SizeRequest
from cutegen.tuning.range_result import RangeResult
from cutegen.tuning.setting import Setting

__all__ = ["RangeRun", "untuned_range"]

#: What a size may be given up for: it does not fit the GPU, say.
_OF_ONE_SIZE = (NoWinnerError, MeasureError, CheckError, LaunchError)
#: Where a model proposes default candidates the whole space is ranked at one in three sizes.
_EVERY_THIRD = 3
#: Default candidates are proposed as a search for so many kernels would: eight. They are this share of the
#: kernels, since predictions are good enough to tell which of them is fast.
_LIKELY_OF, _DEFAULTS = 24, 0.7
#: A kernel that is proposed at a size is thought of at so many sizes around it.
_NEARBY = 2
#: Where all contenders fail others are tried, so often.
_FURTHER_TRIES = 2
#: So many sizes ahead are looked at for one that waits for no kernel: a look takes some 10 ms.
_AHEAD = 6
#: To find them takes a tenth of a second, in which the GPU idles.
_DOUBTFUL_AT_A_TIME = 4


class RangeRun:
    """Finds the answers for a range and writes every trial down as soon as it is known.

    Args:
        request: What to do.
        setting: Where and with what.
        children: Compiler and measuring child.
        trials: The open database.
        observe: Told about progress.
        again: Whether to measure anew what earlier runs did.
        clock: Seconds of a steady clock.
    """

    def __init__(
        self,
        request: RangeRequest,
        setting: Setting,
        children: Children,
        trials: TrialStore,
        *,
        observe: Observer = ignore_progress,
        again: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        run = request.run_name(setting.device, setting.toolchain.digest)
        self.run_name = digest([run, time.time_ns()], length=16) if again else run
        self._setting = setting
        self._children = children
        self._trials = trials
        self._observe = observe
        self._again = again
        self._clock = clock
        self._start = clock()
        self._space = find_space(request.range.low.family, request.base.arch)
        self._cells = cells_of(request.range)
        self._predict = Predictions(request.range, self._space, request.base.sm_count)
        self._estimates = Estimates(self._predict, self._predict.tile_of)
        self._sources: dict[str, Source] = {}
        self._pool: dict[Config, list[int]] = {}
        self._named: dict[int, list[Config]] = {}
        self._checked: set[Config] = set()
        self._results: dict[int, dict[Config, given.Measured]] = {}
        self._keys: dict[Config, str] = {}
        self._regrets: dict[int, float] = {}
        self._outcomes: Counter[str] = Counter()
        self._error: CutegenError | None = None
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
        self._propose()
        effort = self.request.effort
        sizes = _coarse_first(first_sizes(self._cells, effort.sizes))
        self._planned = len(sizes) + effort.doubtful + effort.random
        self._submit(sizes)
        due = self._due(sizes)
        for size in ready_first(sizes, self._is_compiled, _AHEAD):
            if size in sizes[:2] or not self._late(budget_s):
                self._measure(size, "sizes", also=due.get(size, ()))
        self._measure_doubtful(budget_s)
        self._measure_random(budget_s)
        return self._conclude()

    def _due(self, sizes: Sequence[int]) -> dict[int, list[Config]]:
        """Return what the table names now, by that of ``sizes`` which is nearest: it is measured there."""
        found: dict[int, list[Config]] = {}
        for at, configs in self._named.items():
            size = min(sizes, key=lambda other: abs(log2(other / at)))
            found.setdefault(size, []).extend(c for c in configs if self._predict(size, c) is not None)
        return found

    def _late(self, limit_s: float | None) -> bool:
        return limit_s is not None and self._clock() - self._start >= limit_s

    # -- candidates

    def _propose(self) -> None:
        """Choose the kernels: what the table names now, default candidates, then of the whole space.

        Default candidates are known at once, and many kernels are of these: the compiler begins with them
        while the whole space is ranked.
        """
        request, effort, base = self.request, self.request.effort, self.request.base
        self._children.start_bench()
        sizes = first_sizes(self._cells, effort.ranked)
        problems = {size: problem for size in sizes if (problem := request.range.at(size)) is not None}
        fixed = base.fixed or None
        named = self._named = self._incumbents()
        self._predict.trust(config for configs in named.values() for config in configs)
        kernels = dict.fromkeys(self._kernel_of(config) for configs in named.values() for config in configs)
        kernels = dict.fromkeys(islice(kernels, effort.kernels))
        proposals = {size: self._likely(problem) for size, problem in problems.items()}
        first = self._shortlist(proposals, round(_DEFAULTS * (effort.kernels - len(kernels))))
        self._submit_kernels(set(first), proposals)
        kernels |= dict.fromkeys(first)
        searched = self._searched(problems, proposals)
        ranked = rank_all([*searched.values()], base.arch, base.sm_count, effort.proposed, fixed, brief=True)
        for size, problem in searched.items():
            more = (self._as_measured(problem, config) for config in ranked[problem])
            proposals[size] = [*dict.fromkeys([*proposals[size], *more])]
        for size, configs in named.items():
            proposals[size] = [*configs, *proposals.get(size, [])]
        kernels |= dict.fromkeys(self._shortlist(proposals, effort.kernels - len(kernels), kernels))
        for size, configs in proposals.items():
            for config in configs:
                if self._kernel_of(config) in kernels:
                    self._pool.setdefault(config, []).append(size)
        for config, proposed in [*self._pool.items()]:
            for other in self._switched(config):
                self._pool.setdefault(other, []).extend(proposed)
        self._predict.expect(self._pool)

    def _switched(self, config: Config) -> list[Config]:
        """Return the config with each switch among its run-time knobs, such as the order of tiles, turned.

        Models hardly see what these change, and they cost no compilation. Source: in one wave the order of
        tiles made 3 to 7 % on an H200, one way with two tiles along m, the other with three.
        """
        base, space = self.request.base, space_of(config, self._space.family, self._space.arch)
        switches = [k for k in sorted(space.run_time_knobs) if set(space.domains[k]) == {False, True}]
        return [config.replace(**{k: not config[k]}) for k in switches if k not in base.fixed]

    def _searched(
        self, problems: Mapping[int, Problem], proposals: Mapping[int, Sequence[Config]]
    ) -> dict[int, Problem]:
        """Return those at which the whole space is ranked: that takes cores from the compiler.

        These are some of them if a model proposes default candidates, and where there are further algorithms
        all: nothing else proposes these.
        """
        every = _EVERY_THIRD if any(len(configs) > 1 for configs in proposals.values()) else 1
        others = spaces_beside(self._space)
        return {
            size: problem
            for at, (size, problem) in enumerate(problems.items())
            if at % every == 0 or any(not other.explain(problem, {}) for other in others)
        }

    def _likely(self, problem: Problem) -> list[Config]:
        """Return what a model puts first of the default candidates, or the default alone."""
        base = self.request.base
        found = likely(self._space, problem, base.sm_count, _LIKELY_OF, base.fixed or None)
        found = list(map(partial(self._as_measured, problem), found)) or [self._default_of(problem)]
        return [c for c in found if all(c.get(knob) in values for knob, values in base.fixed.items())]

    def _shortlist(
        self, proposals: Mapping[int, Sequence[Config]], limit: int, chosen: Collection[Config] = ()
    ) -> list[Config]:
        self._predict.expect(dict.fromkeys(config for configs in proposals.values() for config in configs))
        return shortlist(self._times_of_kernels(proposals), limit, chosen)

    def _submit_kernels(self, kernels: Collection[Config], proposals: Mapping[int, Sequence[Config]]) -> None:
        """Ask the compiler for kernels, those first that are proposed at the sizes to be measured first."""
        found: dict[Config, tuple[int, Config]] = {}
        for size in _coarse_first([*proposals]):
            for config in proposals[size]:
                found.setdefault(self._kernel_of(config), (size, config))
        at = self.request.range.at
        self._children.submit(
            self._render(problem, config, self._space.arch)
            for kernel, (size, config) in found.items()
            if kernel in kernels and (problem := at(size)) is not None
        )

    def _times_of_kernels(self, proposals: Mapping[int, Sequence[Config]]) -> dict[int, dict[Config, float]]:
        """Return what kernels are predicted to take at each size: those proposed there and nearby."""
        sizes, found = sorted(proposals), {}
        for at, size in enumerate(sizes):
            near = sizes[max(0, at - _NEARBY) : at + _NEARBY + 1]
            times: dict[Config, float] = {}
            for config in dict.fromkeys(config for other in near for config in proposals[other]):
                if (us := self._predict(size, config)) is not None:
                    kernel = self._kernel_of(config)
                    times[kernel] = min(us, times.get(kernel, us))
            found[size] = times
        return found

    def _as_measured(self, problem: Problem, config: Config) -> Config:
        """Return a config as it is likely to be faster in the context that is measured."""
        base = self.request.base
        if base.context == BACK_TO_BACK:
            return config
        space = space_of(config, self._space.family, self._space.arch)
        return alone(space, problem, config, base.fixed)

    def _kernel_of(self, config: Config) -> Config:
        """Return the part of a config that is compiled in, which names its kernel."""
        return space_of(config, self._space.family, self._space.arch).compile_view(config)

    def _incumbents(self) -> dict[int, list[Config]]:
        """Return the configs of ours that the table names now, by size."""
        table, whole = self._setting.load_table(), self.request.range
        found: dict[int, list[Config]] = {}
        if table is None:
            return found
        named = [(entry.problem, entry.config) for entry in table.entries.values() if entry.problem in whole]
        for old in table.ranges:
            if (old.range.size, old.range.kind) == (whole.size, whole.kind):
                named += [
                    (p, piece.config) for piece in old.pieces if (p := whole.at_most(piece.last)) is not None
                ]
        for problem, config in named:
            if (
                config is not None
                and config.source == "cutegen"
                and is_legal(config, problem, self.request.base.arch)
            ):
                found.setdefault(problem.sizes[whole.size], []).append(config)
        return found

    def _submit(self, sizes: Sequence[int]) -> None:
        """Ask the compiler for every kernel, those that the first sizes need before the others."""
        for at, size in enumerate(sizes):
            self._children.submit(self._sources_at(size), urgent=at < 2)

    def _sources_at(self, size: int) -> list[Source]:
        """Return the kernels of what is to be measured at ``size``."""
        problem = self.request.range.at(size)
        assert problem is not None
        return [self._render(problem, config, self._space.arch) for config in self._contenders(size)]

    def _is_compiled(self, size: int) -> bool:
        self._children.poll(0.0)
        return all(self._children.result(source) is not None for source in self._sources_at(size))

    def _render(self, problem: Problem, config: Config, arch: Arch) -> Source:
        """Render a kernel once: sizes share it."""
        recipe = recipe_of(problem, config, arch)
        if recipe not in self._sources:
            self._sources[recipe] = render(problem, config, arch)
        return self._sources[recipe]

    def _contenders(self, size: int) -> list[Config]:
        """Return what to measure at ``size``; of one kernel first what was proposed for sizes nearby."""
        count, kernel_of = self.request.effort.contenders, self._kernel_of
        is_proven = self._predict.is_proven
        nearest = {config: min(abs(log2(size / at)) for at in sizes) for config, sizes in self._pool.items()}
        configs = sorted(nearest, key=nearest.__getitem__)
        return contenders(self._estimates, size, configs, count, kernel_of=kernel_of, is_proven=is_proven)

    # -- measurements

    def _measure(self, size: int, stage: str, *, also: Iterable[Config] = ()) -> Mapping[Config, float]:
        """Measure the contenders at ``size`` beside each other; return microseconds of those that work."""
        request = self.request.at(size)
        if request is None:
            return {}
        run = ProblemRun(
            request,
            self._children,
            self._ledger(request),
            self._setting.toolchain,
            observe=ignore_progress,
            render=self._render,
            checked=self._checked,
        )
        try:
            run.screen([*dict.fromkeys([*also, *self._contenders(size)])])
            for _ in range(_FURTHER_TRIES):
                self._drop_failed(run)
                if any(attempt.ok for attempt in run.attempts.values()):
                    break
                run.screen(self._contenders(size))
        except _OF_ONE_SIZE as error:
            self._error = error
        self._take_in(size, run)
        self._tell(stage)
        return self._estimates.measured.get(size, {})

    def _ledger(self, request: SizeRequest) -> Ledger:
        setting, policy = self._setting, request.final_policy
        return Ledger(
            self._trials,
            request.problem,
            setting.arch.name,
            setting.device,
            self.run_name,
            policy,
            forget=self._again,
        )

    def _drop_failed(self, run: ProblemRun) -> None:
        for config, attempt in run.attempts.items():
            if attempt.done and not attempt.ok:
                self._failed.add(config)
                self._pool.pop(config, None)

    def _take_in(self, size: int, run: ProblemRun) -> None:
        self._ran |= run.ran
        self._outcomes += run.outcomes()
        times: dict[Config, float] = {}
        for config, attempt in run.attempts.items():
            if attempt.timing is not None:
                times[config] = attempt.timing.paired.mid
                self._keys[self._kernel_of(config)] = attempt.artifact_key
                self._results.setdefault(size, {})[config] = given.Measured(attempt.timing, attempt.trial)
        self._drop_failed(run)
        if times:
            self._estimates.learn(size, times)
        else:
            self._given_up.add(size)

    def _measure_doubtful(self, budget_s: float | None) -> None:
        """Measure where an answer may be wrong, a few sizes at a time: each tells of the next."""
        effort = self.request.effort
        left = effort.doubtful
        while left > 0:
            cells = [cell for cell in self._cells if cell.size not in self._given_up]
            count = min(left, _DOUBTFUL_AT_A_TIME)
            found = most_doubtful(self._estimates, cells, lambda at: given.rivals(self._estimates, at), count)
            sizes = [*dict.fromkeys([*self._disputed(cells), *found])][:count]
            left -= len(sizes)
            for size in sizes:
                if self._late(effort.seconds) or self._late(budget_s):
                    return
                self._measure(size, "doubtful")
            if not sizes:
                return

    def _disputed(self, cells: Sequence[Cell]) -> list[int]:
        """Return sizes of which it is in doubt whether calls are better left to the baseline: one of four."""
        low = self.request.range.low
        if not find_family(low.family).is_library_call(low):
            return []
        ratios = given.best_ratios(self._results)
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
                self._regrets[size] = given.regret_of(times, config)

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
        found = given.answers(self._estimates, self._cells)
        return [config or self._default(cell.size) for cell, config in zip(self._cells, found, strict=True)]

    def _default(self, size: int) -> Config:
        """Return what a call would run without the range, unless that was seen to fail."""
        problem = self.request.range.at(size)
        assert problem is not None
        default = self._default_of(problem)
        if default in self._failed:
            raise self._nothing(str(problem))
        return default

    def _default_of(self, problem: Problem) -> Config:
        default = default_config(self._space, problem, self.request.base.sm_count)
        return self._as_measured(problem, default)

    def _answer_at(self, answers: Sequence[Config]) -> Callable[[int], Config]:
        ends = [cell.size for cell in self._cells]
        return lambda size: answers[min(bisect_left(ends, size), len(ends) - 1)]

    def _conclude(self) -> RangeResult:
        if not self._results:
            raise self._nothing(str(self.request.range))
        chosen = self._answers()
        timings = [found.timing for each in self._results.values() for found in each.values()]
        pieces = given.pieces(
            self._cells,
            chosen,
            lambda config: self._keys.get(self._kernel_of(config), ""),
            given.ratios(self._results, self._estimates),
            allow_torch=self.request.base.allow_torch,
        )
        entry = RangeEntry(
            self.request.range,
            pieces,
            given.summary(self._regrets),
            given.points(self._results, self._answer_at(chosen), self._regrets),
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
    pieces = given.pieces(cells, chosen, lambda config: "", lambda size, config: None, allow_torch=False)
    return RangeResult(RangeEntry(request.range, pieces, context=base.context), setting.arch.name, "")


def _coarse_first(sizes: Sequence[int]) -> list[int]:
    """Return the ends, then every fourth, then the others: what is known early tells what to try later."""
    places = sorted(
        range(len(sizes)), key=lambda at: (at not in (0, len(sizes) - 1), at % 4 != 0, at % 2 != 0, at)
    )
    return [sizes[at] for at in places]
