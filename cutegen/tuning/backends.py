"""The processes of a tuning run, compiler and measuring child: started when first needed, ended together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cutegen.build import Result
from cutegen.build.render import Source
from cutegen.errors import DeviceError
from cutegen.family import Problem
from cutegen.measure import Candidate, CheckResult, Opened, TimingRun
from cutegen.measure.contention import Guard, Watch
from cutegen.measure.policy import Policy
from cutegen.operator_api import Offers
from cutegen.system.closing import Closing

__all__ = ["Backends", "Bench", "Children", "Compiler"]


#: A thorough look for other users of the GPU is repeated before a problem is opened if the last one is older
#: than this many seconds: it takes up to a second where NVML cannot attribute utilisation to processes.
#: Source: judgement; a process that starts in between is found after the deciding rounds or at the next look.
_LOOK_AFTER_S = 10.0


class Compiler(Protocol):
    """What a run needs of a builder."""

    def find(self, source: Source) -> Result | None:
        """Return what is known of ``source`` without compiling."""

    def start(self) -> None:
        """Start what compiles without waiting for it; nothing where there is no compiler."""

    def submit(self, sources: Iterable[Source], *, urgent: bool = False) -> None:
        """Ask for the artifacts of ``sources``, ``urgent`` ones before all that wait."""

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        """Return what is finished, waiting a while for something."""

    def close(self) -> None:
        """End everything."""


class Bench(Protocol):
    """What a run needs of the measuring child."""

    def start(self) -> None:
        """Start the child without waiting for it."""

    def open(self, problem: Problem, seed: int = 0) -> Opened:
        """Make operands and reference of ``problem``."""

    def check(self, candidate: Candidate) -> CheckResult:
        """Compare what ``candidate`` computes with the reference."""

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        """Time ``candidates`` and the reference in interleaved rounds; ``keep`` as in the real Bench."""

    def close(self) -> None:
        """End the child."""


@dataclass(frozen=True)
class Backends:
    """What a run uses instead of the usual, such as a test's stand-ins; None stands for the usual.

    Attributes:
        compiler: Makes the builder.
        bench: Makes the measuring child.
        watch: Makes what reports the processes on the GPU, instead of NVML.
        offers: Returns the kernels of NVIDIA's Operator API that are candidates for a problem.
    """

    compiler: Callable[[], Compiler] | None = None
    bench: Callable[[], Bench] | None = None
    watch: Callable[[], Watch] | None = None
    offers: Callable[[Problem], Offers] | None = None


class Children(Closing):
    """Holds compiler and bench over several problems; a context manager that ends both.

    Args:
        make_compiler: Starts nothing by itself; the builder starts its daemon when something is missing.
        make_bench: Likewise for the measuring child; None where there is no GPU.
        make_guard: Makes the guard against other users of the GPU; None where there is no GPU.
        clock: Seconds of a steady clock.
    """

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        make_bench: Callable[[], Bench] | None = None,
        make_guard: Callable[[], Guard] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_compiler = make_compiler
        self._make_bench = make_bench
        self._make_guard = make_guard
        self._compiler: Compiler | None = None
        self._bench: Bench | None = None
        self._guard: Guard | None = None
        self._clock = clock
        self._looked_s = -math.inf
        self._results: dict[str, Result] = {}
        self._asked: set[str] = set()

    @property
    def measures(self) -> bool:
        """Whether candidates are run, not only compiled."""
        return self._make_bench is not None

    @property
    def compiler(self) -> Compiler:
        """The builder."""
        if self._compiler is None:
            self._compiler = self._make_compiler()
        return self._compiler

    @property
    def bench(self) -> Bench:
        """The measuring child; its first answer takes seconds.

        Raises:
            DeviceError: There is no GPU to measure on.
        """
        if self._make_bench is None:
            raise DeviceError("nothing can be measured without a GPU")
        if self._bench is None:
            self._bench = self._make_bench()
        return self._bench

    def start_compiler(self) -> None:
        """Start the compiler without waiting for it."""
        self.compiler.start()

    def start_bench(self) -> None:
        """Start the measuring child without waiting for it, so that it imports torch meanwhile."""
        if self._make_bench is not None:
            self.bench.start()

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
            return self.bench.time(candidates, policy, keep)
        before = self._look(guard, thorough=False, left_s=left_s)
        run = self.bench.time(candidates, policy, keep)
        who = before or self._look_back(guard, thorough=decides)
        if who and not before:
            before = self._look(guard, thorough=True, left_s=left_s)
            left = [candidate for candidate in candidates if candidate.name not in run.failures]
            again = self.bench.time(left, policy, keep)
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
        self.bench.open(problem)

    def _watching(self) -> Guard | None:
        """Return the guard against other users of the GPU; None without a GPU."""
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

    def result(self, source: Source) -> Result | None:
        """Return the artifact or failure of ``source``; None if it is unfinished or was not submitted."""
        return self._results.get(source.digest)

    def submit(self, sources: Iterable[Source], *, urgent: bool = False) -> None:
        """Submit ``sources`` to the compiler, each once; ``urgent`` ones go before all that wait."""
        new = {source.digest: source for source in sources if source.digest not in self._asked}
        self._asked.update(new)
        if new:
            self.compiler.submit(new.values(), urgent=urgent)

    def poll(self, timeout_s: float) -> bool:
        """Take in finished artifacts, waiting up to ``timeout_s`` seconds; whether there were any."""
        if len(self._results) == len(self._asked):
            return False
        finished = self.compiler.poll(timeout_s)
        self._results.update((source.digest, result) for source, result in finished)
        return bool(finished)

    def close(self) -> None:
        """End the bench and the compiler; compilations in flight are lost."""
        bench, self._bench = self._bench, None
        compiler, self._compiler = self._compiler, None
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()
        try:
            if bench is not None:
                bench.close()
        finally:
            if compiler is not None:
                compiler.close()
            self._asked.clear()
            self._results.clear()
