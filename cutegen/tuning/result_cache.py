"""What one :class:`~cutegen.tuning.AutoTuner` remembers: results by problem, its tunings, hits of lookups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cutegen.family import Problem
from cutegen.space import Config
from cutegen.tuning.result import TuneResult

__all__ = ["HistoryEntry", "ResultCache"]


@dataclass(frozen=True)
class HistoryEntry:
    """One tuning that an :class:`AutoTuner` did.

    Attributes:
        problem: What was tuned.
        candidates: How many candidates got an outcome.
        best: The winning config.
        objective: What it was chosen by.
        time_us: Its measured microseconds; None where there is no GPU.
        seconds: Wall-clock time of the tuning.
    """

    problem: Problem
    candidates: int
    best: Config
    time_us: float | None
    seconds: float
    objective: str = "time"


class ResultCache:
    """Results by problem and objective, of one process."""

    def __init__(self) -> None:
        self._results: dict[tuple[Problem, str], TuneResult] = {}
        self._history: list[HistoryEntry] = []
        self._hits = 0
        self._lookups = 0

    def add(self, result: TuneResult, *, again: bool = True) -> None:
        """Note that ``result`` was found; remember it as the newest if it is what to answer ``again``."""
        if again:
            self._results.pop((result.problem, result.objective), None)
            self._results[result.problem, result.objective] = result
        self._history.append(
            HistoryEntry(
                problem=result.problem,
                candidates=result.candidates,
                best=result.config,
                time_us=result.time_us,
                seconds=result.seconds,
                objective=result.objective,
            )
        )

    def find(self, problem: Problem, objective: str) -> TuneResult | None:
        """Return the result of ``problem``, None if there is none, and count the lookup."""
        self._lookups += 1
        known = self._results.get((problem, objective))
        self._hits += known is not None
        return known

    def clear(self) -> None:
        """Forget results and counts; the history stays."""
        self._results.clear()
        self._hits = self._lookups = 0

    def __len__(self) -> int:
        return len(self._results)

    @property
    def by_problem(self) -> Mapping[Problem, TuneResult]:
        """The newest result of each problem, whatever its objective."""
        return MappingProxyType({problem: result for (problem, _), result in self._results.items()})

    @property
    def hit_rate(self) -> float:
        """The share of lookups that found a result; 0 before the first."""
        return self._hits / self._lookups if self._lookups else 0.0

    @property
    def history(self) -> tuple[HistoryEntry, ...]:
        """Every tuning, oldest first."""
        return tuple(self._history)
