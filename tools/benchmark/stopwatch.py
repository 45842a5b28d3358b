"""Where a call's time goes: functions of the package timed from outside, each without those inside it."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["COLLECTOR", "Stopwatch"]

#: The step that Python's garbage collector counts as, wherever it interrupts.
COLLECTOR = "collector"


class Stopwatch:
    """Adds up microseconds by step; a step that runs inside another counts for itself only."""

    def __init__(self) -> None:
        self._us: defaultdict[str, float] = defaultdict(float)
        #: What is running: when each began, and how long others have run inside it.
        self._running: list[list[float]] = []

    def take(self) -> dict[str, float]:
        """Return what has been added up, and begin anew."""
        found, self._us = dict(self._us), defaultdict(float)
        return found

    def begin(self) -> None:
        """Begin a step."""
        self._running.append([time.perf_counter(), 0.0])

    def end(self, step: str) -> None:
        """End the step that began last."""
        began, inside = self._running.pop()
        took = (time.perf_counter() - began) * 1e6
        self._us[step] += took - inside
        if self._running:
            self._running[-1][1] += took

    def timed(self, function: Callable[..., Any], step: str) -> Callable[..., Any]:
        """Return ``function``, timed as ``step``."""

        def timing(*arguments: Any, **named: Any) -> Any:
            self.begin()
            try:
                return function(*arguments, **named)
            finally:
                self.end(step)

        return timing

    @contextmanager
    def watching(self, steps: Mapping[str, tuple[Any, str]]) -> Iterator[Stopwatch]:
        """Time attributes of modules and classes, and the garbage collector, while this lasts.

        Args:
            steps: The names of steps, each with what has the function as an attribute, and its name there.
        """
        kept = [(owner, name, getattr(owner, name)) for owner, name in steps.values()]

        def collecting(phase: str, info: Mapping[str, int]) -> None:
            self.begin() if phase == "start" else self.end(COLLECTOR)

        for step, (owner, name) in steps.items():
            setattr(owner, name, self.timed(getattr(owner, name), step))
        gc.callbacks.append(collecting)
        try:
            yield self
        finally:
            gc.callbacks.remove(collecting)
            for owner, name, function in kept:
                setattr(owner, name, function)
