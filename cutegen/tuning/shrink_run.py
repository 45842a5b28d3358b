"""Times of a family's configs on some shapes: recorded ones, and measured ones where none are recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from cutegen.digest import digest
from cutegen.errors import ConfigError, UsageError
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.records.trials import TrialStore
from cutegen.search.strategies import rank
from cutegen.space import Config
from cutegen.tuning.candidate_runner import PROBLEM_FAILURES
from cutegen.tuning.history import FAILED
from cutegen.tuning.progress import Observer, Progress, ignore_progress
from cutegen.tuning.request import EFFORTS, Request
from cutegen.tuning.screening import Screening, SourceCache
from cutegen.tuning.session import Session
from cutegen.tuning.setting import Setting
from cutegen.tuning.shrinking import Times, relative

__all__ = ["ShrinkRun"]

#: Problems whose kernels the compiler has at a time: the one that is measured and the next ones.
_SUBMITTED_AHEAD = 3


class ShrinkRun:
    """Gathers times relative to those of the default configs.

    Args:
        setting: Where, and with what to measure.
        trials: The open database; None where there is none.
        results: Microseconds of configs by problem, from results files, the latest last.
        kernels: How many configs are timed on each problem, at most, the default among them.
        observe: Called with the progress.
        clock: Seconds of a steady clock.
    """

    def __init__(
        self,
        setting: Setting,
        trials: TrialStore | None,
        results: Sequence[Mapping[str, Mapping[str, float]]] = (),
        *,
        kernels: int,
        observe: Observer = ignore_progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setting, self._trials, self._results = setting, trials, results
        self._kernels, self._observe, self._clock = kernels, observe, clock
        self._render = SourceCache()
        self._start = clock()
        self._used: set[str] = set()
        self._failed: set[tuple[Problem, Config]] = set()
        self._gpus: set[str] = set()
        self._run_name = digest(["shrink", time.time_ns()], length=16)

    @property
    def recorded(self) -> int:
        """How many trials of the database were used."""
        return len(self._used)

    @property
    def gpu(self) -> str:
        """The GPUs whose recorded trials were used."""
        return ", ".join(sorted(self._gpus))

    def times(self, problems: Sequence[Problem], budget_s: float | None = None) -> dict[Problem, Times]:
        """Return the times of every problem, measuring what is missing if there is a GPU.

        Args:
            problems: The shapes, all of one family.
            budget_s: Seconds after which no further problem is measured.

        Raises:
            UsageError: Some problem has no times, and there is no GPU, or no time was left to measure it.
            CutegenError: As :meth:`~cutegen.tuning.AutoTuner.tune`.
        """
        found = {problem: self.known(problem) for problem in problems}
        missing = {p: self._missing(p, found[p]) for p in problems} if self._setting.device else {}
        missing = {problem: configs for problem, configs in missing.items() if configs}
        if missing:
            self._measure_all(missing, budget_s)
            found |= {problem: self.known(problem) for problem in missing}
        return self._complete(found)

    def _missing(self, problem: Problem, known: Times) -> list[Config]:
        """Return the configs to measure on ``problem``, its default first; none if all have times."""
        default, timed = known
        space, sms = find_space(problem.family, self._setting.arch), self._setting.sm_count
        asked = rank(space, problem, sms, self._kernels, default=default)
        done = {default, *timed, *(config for p, config in self._failed if p == problem)}
        new = [config for config in asked if config not in done]
        return [default, *new] if new or default not in timed else []

    def _measure_all(self, missing: Mapping[Problem, Sequence[Config]], budget_s: float | None) -> None:
        """Measure problem after problem while the kernels of the next two are compiled."""
        setting, queue = self._setting, list(missing.items())
        assert self._trials is not None
        with setting.children() as children:
            session = Session(setting, children, self._trials, again=True)
            screening = Screening(session, self._run_name, self._render)
            for at, (problem, configs) in enumerate(queue):
                if budget_s is not None and self._clock() - self._start >= budget_s:
                    return
                soon = queue[at : at + _SUBMITTED_AHEAD]
                children.submit(self._render(p, c, setting.arch) for p, some in soon for c in some)
                self._tell(problem, at, len(queue))
                request = Request(problem, setting.arch, setting.sm_count, effort=EFFORTS["quick"])
                with suppress(*PROBLEM_FAILURES):  # then it has no times, and _complete says so
                    screening.start(request).screen(configs)

    def _complete(self, found: Mapping[Problem, Times]) -> dict[Problem, Times]:
        """Return ``found`` if every problem has times of all it could run, or of two configs at least."""
        lacking = []
        for problem, (_, timed) in found.items():
            space = find_space(problem.family, self._setting.arch)
            if len(timed) < 2 and len(list(islice(space.configs(problem), 2))) > 1:
                lacking.append(str(problem))
        if lacking:
            raise UsageError(
                f"{len(lacking)} of {len(found)} shapes have no times of their default and another config: "
                f"{'; '.join(lacking[:3])}{' ...' if lacking[3:] else ''}; run this on a GPU, with a larger "
                "--budget if it ended by that, or give --results of tools/bench_family.py"
            )
        return dict(found)

    def _tell(self, problem: Problem, done: int, count: int) -> None:
        self._observe(Progress(problem, "screen", done, count, elapsed_s=self._clock() - self._start))

    def known(self, problem: Problem) -> Times:
        """Return what is recorded of ``problem``: in results files, and in trials on such a GPU of kernels
        that would be made the same today. Newer times take the place of older ones."""
        default = find_space(problem.family, self._setting.arch).default(problem)
        found: dict[Config, float] = {}
        for each in self._results:
            found.update(relative(problem, each.get(str(problem), {}), default, self._setting.arch))
        for group in self._groups(problem):
            if default in group:
                found.update({config: us / group[default] for config, us in group.items()})
        return default, found

    def _groups(self, problem: Problem) -> list[dict[Config, float]]:
        """Return recorded times, those that were measured beside each other together, the newest last."""
        device = self._setting.device
        groups: dict[Hashable, dict[Config, float]] = {}
        trials = [] if self._trials is None else self._trials.find(problem, device.key if device else None)
        for trial in trials:
            config, timing = trial.config, trial.timing
            if trial.arch != self._setting.arch.name or config is None or config.source != "cutegen":
                continue
            if not self._is_current(problem, config, trial.source_digest):
                continue
            if timing is None and trial.outcome in FAILED:
                self._failed.add((problem, config))
            if timing is not None and not timing.contended_by:
                key = (trial.run, trial.policy, trial.device_key)
                groups.setdefault(key, {})[config] = timing.paired.mid
                self._used.add(trial.id)
                self._gpus.add(trial.device.name if trial.device else "")
        return list(groups.values())

    def _is_current(self, problem: Problem, config: Config, source_digest: str) -> bool:
        space = find_space(problem.family, self._setting.arch)
        try:
            space.require(problem, config)
        except ConfigError:
            return False
        return self._render(problem, config, self._setting.arch).digest == source_digest
