"""The processes of a tuning run, compiler and measuring child: started when first needed, ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cutegen.build import Artifact, Result
from cutegen.build.artifact import require_written
from cutegen.build.render import Source
from cutegen.errors import DeviceError
from cutegen.family import Problem
from cutegen.measure import Candidate, CheckResult, Opened, TimingRun
from cutegen.measure.contention import Guard, Watch
from cutegen.measure.policy import Policy
from cutegen.operator_api import Offers
from cutegen.system.closing import Closing
from cutegen.tuning.guarded_bench import GuardedBench

__all__ = ["Backends", "Bench", "Children", "Compiler"]


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
        self._compiler: Compiler | None = None
        self._bench: Bench | None = None
        self._guarded = GuardedBench(lambda: self.bench, make_guard, clock=clock)
        self._results: dict[str, Result] = {}
        #: Submitted sources without a result.
        self._pending: set[str] = set()

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

    @property
    def guarded(self) -> GuardedBench:
        """The bench behind a guard against other users of the GPU."""
        return self._guarded

    def start_compiler(self) -> None:
        """Start the compiler without waiting for it."""
        self.compiler.start()

    def start_bench(self) -> None:
        """Start the measuring child without waiting for it, so that it imports torch meanwhile."""
        if self._make_bench is not None:
            self.bench.start()

    def result(self, source: Source) -> Result | None:
        """Return the artifact or failure of ``source``; None if it is unfinished or was not submitted."""
        return self._results.get(source.digest)

    def submit(self, sources: Iterable[Source], *, urgent: bool = False) -> None:
        """Submit ``sources`` to the compiler, each once; ``urgent`` ones go before all that wait."""
        lasting = {d for d, r in self._results.items() if isinstance(r, Artifact) or not r.again}
        known = lasting | self._pending
        new = {source.digest: source for source in sources if source.digest not in known}
        if new:
            self.compiler.submit(new.values(), urgent=urgent)
            self._pending.update(new)  # what the compiler did not take may be submitted again
            for digest in new:
                self._results.pop(digest, None)

    def poll(self, timeout_s: float) -> bool:
        """Take in finished artifacts, waiting up to ``timeout_s`` seconds; whether there were any.

        Raises:
            StoreError: One could not be written. It may be submitted again; the others remain pending.
        """
        if not self._pending:
            return False
        finished = self.compiler.poll(timeout_s)
        for source, result in finished:
            self._pending.discard(source.digest)
            if isinstance(result, Artifact) or not result.unwritten:
                self._results[source.digest] = result
        return bool(require_written(finished))

    def close(self) -> None:
        """End the bench and the compiler; compilations in flight are lost."""
        bench, self._bench = self._bench, None
        compiler, self._compiler = self._compiler, None
        self._guarded.close()
        try:
            if bench is not None:
                bench.close()
        finally:
            if compiler is not None:
                compiler.close()
            self._pending.clear()
            self._results.clear()
