"""Kernels compiled in a thread of their own, while calls are served by something else.

The thread and its compile daemon start with the first kernel that is missing, and end when none has been
for a few seconds. Programs that miss nothing have neither.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from cutegen.build import Artifact, Failure, Result
from cutegen.build.render import Source
from cutegen.errors import CutegenError, LaunchError
from cutegen.system.forks import renew_in_children

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BackgroundCompiler", "Builds", "PendingKernel"]

#: Seconds without work after which thread and daemon end. Starting them again takes about two.
IDLE_S = 10.0
#: Most seconds until a new request is seen while others are being compiled.
POLL_S = 0.05
#: Seconds that the end of the program may wait for the daemon to be put away.
GOODBYE_S = 6.0


class Builds(Protocol):
    """What the thread asks of a :class:`~cutegen.build.Builder`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def submit(self, sources: Iterable[Source]) -> None:
        """Ask for the artifacts of sources."""

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        """Return what is finished, waiting up to so long for something."""
        ...


class PendingKernel:
    """A kernel that is being compiled, or that could not be.

    Args:
        error: Why there is no kernel, if that is known already.

    Attributes:
        error: Why there is no kernel; None as long as there may be one.
    """

    def __init__(self, error: CutegenError | None = None) -> None:
        self.error = error
        self._done = threading.Event()
        if error is not None:
            self._done.set()

    @property
    def finished(self) -> bool:
        """Whether there is a kernel now, or never will be."""
        return self._done.is_set()

    def finish(self, error: CutegenError | None = None) -> None:
        """Say that it has come to its end, in an error or well."""
        self.error = error
        self._done.set()

    def abandon(self) -> None:
        """Be finished in a child of fork, where the thread that would have finished it is not."""
        self._done = threading.Event()  # the parent's may be locked
        self._done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is finished, or for so many seconds; return whether it is."""
        return self._done.wait(timeout_s)


@dataclass(frozen=True)
class _Job:
    """A source, and what to do in the thread with what comes of it."""

    source: Source
    ready: Callable[[Artifact], None]
    failed: Callable[[CutegenError], None]
    compilation: PendingKernel

    def end(self, result: Result | CutegenError) -> None:
        try:
            if isinstance(result, CutegenError):
                raise result
            if isinstance(result, Failure):
                raise result.error()
            self.ready(result)
        except CutegenError as error:
            self.failed(error)
            self.compilation.finish(error)
        else:
            self.compilation.finish()


class BackgroundCompiler:
    """Compiles what it is given, several kernels at a time; may be asked from any thread.

    Args:
        builder: Opens what compiles; called in the thread.
    """

    def __init__(self, builder: Callable[[], Builds]) -> None:
        self._builder = builder
        self._asked: list[_Job] = []
        self._changed = threading.Condition()
        self._closed = self._registered = False
        self._thread: threading.Thread | None = None
        renew_in_children(self)

    def renew(self) -> None:
        """Begin anew in a child of fork; what the parent compiles is for the parent."""
        self._asked, self._changed, self._thread = [], threading.Condition(), None

    def start(
        self, source: Source, ready: Callable[[Artifact], None], failed: Callable[[CutegenError], None]
    ) -> PendingKernel:
        """Begin to compile ``source``; return at once.

        Args:
            source: What to compile.
            ready: Called in the thread with the artifact. What it raises counts as a failure.
            failed: Called there with the error if there is no artifact.
        """
        compilation = PendingKernel()
        with self._changed:
            self._asked.append(_Job(source, ready, failed, compilation))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cutegen compiler", daemon=True)
                self._thread.start()
            if not self._registered:
                self._registered = True
                atexit.register(self.close)
            self._changed.notify()
        return compilation

    def close(self) -> None:
        """End the thread and whatever it compiles."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(GOODBYE_S)

    def _run(self) -> None:
        running: dict[int, _Job] = {}
        error: CutegenError = LaunchError("the background compiler ended before its work was done")
        try:
            with self._builder() as builder:
                while (new := self._next(busy=bool(running))) is not None:
                    for job in new:
                        running[id(job.source)] = job
                        try:
                            builder.submit([job.source])
                        except CutegenError as refused:  # the others go on
                            running.pop(id(job.source)).end(refused)
                    for source, result in builder.poll(POLL_S):
                        running[id(source)].end(result)
                        del running[id(source)]  # behind it: what ends in an unexpected error has failed
        except CutegenError as raised:
            error = raised
        finally:
            self._end(running, error)

    def _next(self, *, busy: bool) -> list[_Job] | None:
        """Return what was asked for since the last time, waiting a while if not busy; None to end."""
        with self._changed:
            if not busy and not self._asked and not self._closed:
                self._changed.wait(IDLE_S)
            if self._closed:
                return None
            if not busy and not self._asked:
                self._thread = None  # from here on a new request starts a new thread
                return None
            new, self._asked = self._asked, []
            return new

    def _end(self, running: dict[int, _Job], error: CutegenError) -> None:
        """Let what is unfinished fail, unless another thread has taken over."""
        lost = list(running.values())
        with self._changed:
            if self._thread is threading.current_thread():
                lost += self._asked
                self._asked, self._thread = [], None
        for job in lost:
            if self._closed:
                job.compilation.finish(error)  # the program ends; nobody wants to read of it
            else:
                job.end(error)
