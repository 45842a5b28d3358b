"""Timing while no other process uses the GPU: looks before and after, and a second try if one came in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cutegen.family import Problem
from cutegen.measure import Candidate, TimingRun
from cutegen.measure.contention import Guard
from cutegen.measure.policy import Policy

if TYPE_CHECKING:
    from cutegen.tuning.backends import Bench

__all__ = ["GuardedBench"]

#: A thorough look for other users of the GPU is repeated before a problem is opened if the last one is older
#: than this many seconds: it takes up to a second where NVML cannot attribute utilisation to processes.
#: Source: judgement; a process that starts in between is found after the deciding rounds or at the next look.
_LOOK_AFTER_S = 10.0


class GuardedBench:
    """Opens and times on a bench behind a guard against other users of the GPU.

    Args:
        bench: Returns the measuring child.
        make_guard: Makes the guard when it is first needed; None measures without one.
        clock: Seconds of a steady clock.
    """

    def __init__(
        self,
        bench: Callable[[], Bench],
        make_guard: Callable[[], Guard] | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._make_guard = make_guard
        self._guard: Guard | None = None
        self._clock = clock
        self._looked_s = -math.inf

    def time(
        self,
        candidates: Sequence[Candidate],
        policy: Policy,
        keep: Sequence[str],
        left_s: float | None = None,
        *,
        decides: bool = False,
    ) -> TimingRun:
        """Time ``candidates`` as :meth:`Bench.time`, while no other process uses the GPU.

        If another process started to use it meanwhile, all are timed once more. Timings are marked as
        contended if that was disturbed again, or if the user chose to go on beside other processes.

        Args:
            candidates: What to time; all for the open problem.
            policy: How to time it.
            keep: Names of candidates whose energy is measured if any is.
            left_s: Seconds to wait for other processes at most; None for the usual.
            decides: Whether to look thoroughly afterwards.

        Raises:
            DeviceError: Another process uses the GPU, and the user chose not to go on then.
        """
        guard = self._watching()
        if guard is None:
            return self._bench().time(candidates, policy, keep)
        before = self._look(guard, thorough=False, left_s=left_s)
        run = self._bench().time(candidates, policy, keep)
        who = before or self._look_back(guard, thorough=decides)
        if who and not before:
            before = self._look(guard, thorough=True, left_s=left_s)
            left = [candidate for candidate in candidates if candidate.name not in run.failures]
            again = self._bench().time(left, policy, keep)
            run = replace(again, failures={**run.failures, **again.failures})
            who = before or self._look_back(guard, thorough=decides)
        return run.contended(who) if who else run

    def open(self, problem: Problem, left_s: float | None = None) -> None:
        """Open ``problem`` on the bench, after a thorough look for other users if the last one is old.

        Nothing of this run is on the GPU at that moment, so any use of it is another process's.

        Args:
            problem: What candidates will compute.
            left_s: Seconds to wait for other processes at most; None for the usual.

        Raises:
            DeviceError: Another process uses the GPU, and the user chose not to go on then.
        """
        if (guard := self._watching()) and self._clock() - self._looked_s > _LOOK_AFTER_S:
            self._look(guard, thorough=True, left_s=left_s)
        self._bench().open(problem)

    def close(self) -> None:
        """Close the guard; a later call makes a new one."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def _watching(self) -> Guard | None:
        """Return the guard; None if there is none."""
        if self._guard is None and self._make_guard is not None:
            self._guard = self._make_guard()
        return self._guard

    def _look(self, guard: Guard, *, thorough: bool, left_s: float | None) -> str:
        who = guard.begin(thorough=thorough, limit_s=left_s)
        self._note_look(thorough)
        return who

    def _look_back(self, guard: Guard, *, thorough: bool) -> str:
        who = guard.end(thorough=thorough)
        self._note_look(thorough)
        return who

    def _note_look(self, thorough: bool) -> None:
        if thorough:
            self._looked_s = self._clock()
