"""How the calls of a process were answered: by problem always, by call only where it may cost something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

from cutegen.family import Problem
from cutegen.system.forks import RenewedLock
from cutegen.system.remembered import Remembered

__all__ = ["AWAITED", "MISSED", "TORCH", "Tally"]

#: What answers beside the rules of lookup: torch, as the table or the predictions want it; something else
#: while the kernel is being compiled; something else since the kernel is not there and nothing may be loaded.
TORCH, AWAITED, MISSED = "torch", "awaited", "missed"
#: Problems that are remembered; of more, the first are forgotten.
_MOST = 16384


class Tally:
    """Counts of one set of kernels; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = RenewedLock()
        self._rules: Remembered[Problem, str] = Remembered(_MOST)
        self._calls: dict[str, _Ticks] = {}
        self._missed: dict[Problem, _Ticks] = {}
        self._compiled = 0

    def answered(self, problem: Problem, rule: str) -> None:
        """Remember what answers a problem from now on."""
        with self._lock:
            self._rules.keep(problem, rule)

    def compiled(self) -> None:
        """Count a kernel that is compiled because a call needs it."""
        with self._lock:
            self._compiled += 1

    def of_call(self, rule: str) -> Callable[[], object]:
        """Return what is to be called for every call that ``rule`` answers: a few tens of nanoseconds."""
        with self._lock:
            return self._calls.setdefault(rule, _Ticks()).tick

    def of_miss(self, problem: Problem) -> Callable[[], object]:
        """Return what is to be called for every call of a problem whose kernel may not be loaded any more."""
        with self._lock:
            if len(self._missed) >= _MOST:
                self._missed.pop(next(iter(self._missed)))
            return self._missed.setdefault(problem, _Ticks()).tick

    @property
    def problems(self) -> dict[str, int]:
        """How many problems each rule answers, of those that were called."""
        with self._lock:
            return dict(Counter(self._rules.values()).most_common())

    @property
    def calls(self) -> dict[str, int]:
        """How many calls each rule answered, of those that count."""
        with self._lock:
            found = {rule: ticks.read() for rule, ticks in self._calls.items()}
        return {rule: number for rule, number in found.items() if number}

    @property
    def missed(self) -> dict[Problem, int]:
        """How many calls were made of problems whose kernels may not be loaded."""
        with self._lock:
            found = {problem: ticks.read() for problem, ticks in self._missed.items()}
        return {problem: number for problem, number in found.items() if number}

    @property
    def late_compiles(self) -> int:
        """How many kernels were compiled because a call needed them."""
        with self._lock:
            return self._compiled

    def reset(self) -> None:
        """Begin anew; what counts calls now goes on doing so."""
        with self._lock:
            self._rules.clear()
            self._compiled = 0
            for ticks in (*self._calls.values(), *self._missed.values()):
                ticks.reset()


class _Ticks:
    """A counter that a call advances without a lock: a step of an iterator, which no other thread splits."""

    def __init__(self) -> None:
        self._numbers = count()
        self.tick = self._numbers.__next__
        self._own = 0

    def read(self) -> int:
        """Return how often :attr:`tick` was called; a reading is a step too, which later ones leave out."""
        found = self.tick() - self._own
        self._own += 1
        return found

    def reset(self) -> None:
        found = self.read()
        self._own += found
