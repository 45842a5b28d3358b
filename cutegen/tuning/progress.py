"""What a tuning run reports while it works: stage, counts per outcome, best so far, time left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cutegen.family import Problem

__all__ = ["Observer", "Progress", "ignore_progress"]


@dataclass(frozen=True)
class Progress:
    """One moment of a run.

    Attributes:
        problem: What is being tuned.
        stage: ``compile``, ``check``, ``screen``, ``refine``, ``final`` or ``done``.
        done: Candidates that have their outcome.
        total: Candidates in all, so far.
        outcomes: How many ended in each outcome.
        best_us: Fastest screened time in microseconds, None before the first.
        left_s: Seconds of the budget that remain, None without a budget.
        elapsed_s: Seconds since this problem was begun.
    """

    problem: Problem
    stage: str
    done: int
    total: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    best_us: float | None = None
    left_s: float | None = None
    elapsed_s: float = 0.0


Observer = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """Do nothing with it."""
