"""Sources in, artifacts out: the cache first, the compile daemon only for what is missing."""

from __future__ import annotations

import select
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING

from cutegen.build.artifact import Failure, Result, about, find_result, require_written
from cutegen.build.daemon_process import DaemonProcess
from cutegen.build.parallelism import require_workers
from cutegen.build.store import Store
from cutegen.build.toolchain import Toolchain, artifact_key, symbol_of
from cutegen.digest import Json
from cutegen.errors import BuildError, StoreError
from cutegen.system.closing import Closing
from cutegen.system.temporary import sweep

if TYPE_CHECKING:
    from cutegen.build.render import Source

__all__ = ["Builder"]

#: How often a daemon that died under its work is replaced before the builder gives up.
RESTARTS = 2


class Builder(Closing):
    """Compiles sources in child processes and keeps every outcome, failures too, in the store.

    A context manager; leaving it, or the death of this process, ends all compilation at once.
    Not for use from several threads.

    Args:
        store: Where artifacts are found and put.
        toolchain: Whose artifacts to look for; default the installed one. With another one, such as a
            bundle's, only what the store already has can be had.
        workers: Most compilations at a time; default one per core, fewer where memory is short.
        timeout_s: Seconds one compilation may take.

    Raises:
        UsageError: ``workers`` is less than 1.
    """

    def __init__(
        self,
        store: Store,
        toolchain: Toolchain | None = None,
        workers: int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self.store = store
        self.toolchain = toolchain or Toolchain.current()
        self.workers = require_workers(workers)
        self.timeout_s = timeout_s
        self._ready: deque[tuple[Source, Result]] = deque()
        self._waiting: dict[str, list[Source]] = {}
        #: By whether torch is imported in them.
        self._daemons: dict[bool, DaemonProcess] = {}
        self._restarts = 0
        sweep()

    @property
    def pending(self) -> int:
        """Sources submitted whose result :meth:`poll` has not handed out yet."""
        return len(self._ready) + sum(map(len, self._waiting.values()))

    def find(self, source: Source) -> Result | None:
        """Return what the store has for ``source``, or None; compiles nothing.

        Raises:
            StoreError: The store cannot be read.
        """
        result = find_result(self.store, source.arch, artifact_key(source, self.toolchain))
        return None if isinstance(result, Failure) and not result.stands(self.timeout_s) else result

    def start(self) -> None:
        """Start the compile daemon if it can run, so that it is ready when :meth:`submit` needs it."""
        with suppress(BuildError, StoreError):  # submit says so if anything must be compiled
            self._require_compiler()
            self._daemon(torch=False)

    def submit(self, sources: Iterable[Source], *, urgent: bool = False) -> None:
        """Ask for the artifacts of ``sources``; :meth:`poll` hands them out.

        Args:
            sources: What is asked for.
            urgent: Whether they come before all that waits to be compiled.

        Raises:
            BuildError: Something must be compiled and there is no compiler, or not the one asked for.
            StoreError: The store cannot be read, or something must be compiled and the store is shared.
        """
        for source in sources:
            key = artifact_key(source, self.toolchain)
            if key in self._waiting:
                self._waiting[key].append(source)
                continue
            result = self.find(source)
            if result is not None:
                self._ready.append((source, result))
                continue
            self._require_compiler()
            self._send(key, source, urgent=urgent)
            self._waiting[key] = [source]

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        """Return what is finished; wait up to ``timeout_s`` seconds (None: without limit) for something.

        The list is empty when time ran out or nothing is pending. A source whose result could not be written
        ends in a failure with the outcome ``store``.

        Raises:
            BuildError: The daemon cannot run; the message holds its last words.
            StoreError: The store cannot be read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            more = self._receive(0.0 if self._ready else left)
            if not more and (self._ready or left == 0.0):
                break
        done = list(self._ready)
        self._ready.clear()
        return done

    def build(self, sources: Iterable[Source]) -> Iterator[tuple[Source, Result]]:
        """Yield every source with its result, as they are finished: what the store has comes first.

        Raises:
            BuildError: As :meth:`submit` and :meth:`poll`.
            StoreError: As :meth:`submit` and :meth:`poll`, or a result could not be written.
        """
        self.submit(sources)
        while self.pending:
            yield from require_written(self.poll())

    def close(self) -> None:
        """End the daemon and everything it runs; what is pending is forgotten."""
        daemons, self._daemons = tuple(self._daemons.values()), {}
        self._waiting.clear()
        self._ready.clear()
        for daemon in daemons:
            daemon.close()

    # -- the daemons

    def _require_compiler(self) -> None:
        if self._daemons:
            return
        self.store.require_writable()
        here = Toolchain.current()
        if self.toolchain.digest != here.digest:
            raise BuildError(f"cannot compile for toolchain {self.toolchain}; installed is {here}")
        if not here.complete:
            raise BuildError(
                f"cannot compile: {here}; pip install nvidia-cutlass-dsl apache-tvm-ffi, "
                "or import a bundle that was built elsewhere"
            )

    def _send(self, key: str, source: Source, *, urgent: bool = False) -> None:
        self._daemon(_needs_torch(source)).send(
            {
                "key": key,
                "arch": source.arch,
                "symbol": symbol_of(key, source.signature.family),
                "text": source.text,
                "about": about(source),
                "opening": None if source.opening is None else asdict(source.opening),
                "urgent": urgent,
            }
        )

    def _daemon(self, torch: bool) -> DaemonProcess:
        """Return the running daemon with torch, or without it."""
        if torch not in self._daemons:
            arguments: dict[str, Json] = {
                "root": str(self.store.root),
                "toolchain": self.toolchain.to_json(),
                "workers": self.workers,
                "timeout_s": self.timeout_s,
                "torch": torch,
            }
            self._daemons[torch] = DaemonProcess(arguments)
        return self._daemons[torch]

    def _receive(self, timeout_s: float | None) -> bool:
        """Process the daemons' messages; return whether there were any within the time."""
        if not self._daemons:
            raise BuildError("the builder is closed")
        daemons = dict(self._daemons)
        waiting = select.poll()  # select() refuses descriptors from 1024 on
        for daemon in daemons.values():
            waiting.register(daemon.output, select.POLLIN)
        timeout_ms = None if timeout_s is None else timeout_s * 1000
        ready = {descriptor for descriptor, _ in waiting.poll(timeout_ms)}
        for torch, daemon in daemons.items():
            if daemon.output.fileno() in ready:
                messages = daemon.receive()
                if messages is None:
                    self._daemon_died(torch)
                for message in messages or ():
                    self._take(message)
        return bool(ready)

    def _take(self, message: dict[str, Json]) -> None:
        """Process one message: a result is ready."""
        if message["status"] == "ready":
            return
        key = str(message["key"])
        for source in self._waiting.pop(key, []):
            self._ready.append((source, self._result_of(message, key, source)))

    def _result_of(self, message: dict[str, Json], key: str, source: Source) -> Result:
        if message["status"] == "store":
            return Failure(key, "store", str(message["message"]), "", again=True)
        if message["status"] == "failed":  # and nothing is in the store
            words = str(message["message"]), str(message.get("log", ""))
            return Failure(key, str(message["outcome"]), *words, again=bool(message.get("again")))
        gone = f"the entry of {key} vanished from {self.store.root} right after it was written"
        return self.find(source) or Failure(key, "store", gone, "", again=True)

    def _daemon_died(self, torch: bool) -> None:
        daemon = self._daemons.pop(torch)
        status, words = daemon.died()
        silent = f"exit status {status}, and no log in {tempfile.gettempdir()}, which may be full"
        last = words.splitlines()[-1] if words else silent
        self._restarts += 1
        if not daemon.ready or self._restarts > RESTARTS:
            self.close()
            raise BuildError(
                f"the compile daemon could not {'go on' if daemon.ready else 'start'}: {last}", log=words
            )
        for key, sources in self._waiting.items():
            if _needs_torch(sources[0]) == torch:
                self._send(key, sources[0])


def _needs_torch(source: Source) -> bool:
    """Whether a module of the user's that a source imports needs torch, which is blocked for all others."""
    return source.opening is not None and source.opening.torch
