"""The time of one run: what it has spent on which stage, and what is left of its budget."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RunClock"]


class RunClock:
    """Starts when it is made, and anew with :meth:`begin`.

    Args:
        now: Seconds of a steady clock.

    Attributes:
        stages: Seconds spent in each stage.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.stages: dict[str, float] = {}
        self._now = now
        self._start = self._noted = now()
        self._budget_s: float | None = None

    def begin(self, budget_s: float | None) -> None:
        """Start a run that may take ``budget_s`` seconds; None for no limit."""
        self._start = self._noted = self._now()
        self._budget_s = budget_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._now() - self._start

    @property
    def left_s(self) -> float | None:
        """Seconds left of the budget, below 0 once it is spent; None if there is no limit."""
        return None if self._budget_s is None else self._budget_s - self.elapsed_s

    def add_time(self, stage: str) -> None:
        """Add the time since the last call to ``stage``."""
        now = self._now()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._noted
        self._noted = now
