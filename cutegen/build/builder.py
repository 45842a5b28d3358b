"""Sources in, artifacts out: the cache first, the compile daemon only for what is missing."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from cutegen.build.artifact import LOG, Failure, Result, about, find_result
from cutegen.build.parallelism import default_workers
from cutegen.build.store import Store
from cutegen.build.toolchain import Toolchain, artifact_key, symbol_of
from cutegen.digest import Json
from cutegen.errors import BuildError, StoreError
from cutegen.system.closing import Closing
from cutegen.system.interpreter import python_command, python_environment
from cutegen.system.temporary import TemporaryFolder, sweep

if TYPE_CHECKING:
    from cutegen.build.render import Source

__all__ = ["Builder"]

#: How often a daemon that died under its work is replaced before the builder gives up.
RESTARTS = 2
#: Seconds the daemon gets to end by itself.
GOODBYE_S = 5.0


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
        self.workers = workers or default_workers()
        self.timeout_s = timeout_s
        self._ready: deque[tuple[Source, Result]] = deque()
        self._waiting: dict[str, list[Source]] = {}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._scratch: TemporaryFolder | None = None
        self._received = bytearray()
        self._greeted = False
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

    def submit(self, sources: Iterable[Source]) -> None:
        """Ask for the artifacts of ``sources``; :meth:`poll` hands them out.

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
            self._waiting[key] = [source]
            self._send(key, source)

    def poll(self, timeout_s: float | None = None) -> list[tuple[Source, Result]]:
        """Return what is finished; wait up to ``timeout_s`` seconds (None: without limit) for something.

        The list is empty when time ran out or nothing is pending.

        Raises:
            BuildError: The daemon cannot run; the message holds its last words.
            StoreError: A result could not be written; the other sources stay pending.
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
            StoreError: As :meth:`submit` and :meth:`poll`.
        """
        self.submit(sources)
        while self.pending:
            yield from self.poll()

    def close(self) -> None:
        """End the daemon and everything it runs; what is pending is forgotten."""
        daemon, self._daemon = self._daemon, None
        self._waiting.clear()
        self._ready.clear()
        if daemon is not None:
            try:
                _close_quietly(daemon.stdin)
                with suppress(subprocess.TimeoutExpired):
                    # Before its greeting it has nothing to put in order.
                    daemon.wait(GOODBYE_S if self._greeted else 0.0)
            finally:
                _kill(daemon)
                _close_quietly(daemon.stdout)
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    # -- the daemon

    def _require_compiler(self) -> None:
        if self._daemon is not None:
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

    def _send(self, key: str, source: Source) -> None:
        job = {
            "key": key,
            "arch": source.arch,
            "symbol": symbol_of(key, source.signature.family),
            "text": source.text,
            "about": about(source),
        }
        daemon = self._daemon or self._start()
        assert daemon.stdin is not None
        with suppress(BrokenPipeError):  # the next read finds the end of its output and tells why
            daemon.stdin.write(json.dumps(job).encode() + b"\n")
            daemon.stdin.flush()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {n: v for n, v in python_environment().items() if not n.startswith("CUTE_DSL_")}
        # The daemon forks, so it must neither look for a device nor start a pool of threads.
        environment.update(CUDA_VISIBLE_DEVICES="", CUTE_DSL_ARCH="sm_100a")
        environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self._scratch = TemporaryFolder()
        # The C compiler and the DSL look for files in the working directory, and in the temporary one under
        # names that others can foresee. There is nothing in this one, and what they leave in it is removed.
        folder = self._scratch.path
        environment["TMPDIR"] = str(folder)
        arguments = {
            "root": str(self.store.root),
            "toolchain": self.toolchain.to_json(),
            "workers": self.workers,
            "timeout_s": self.timeout_s,
            "scratch": str(folder),
        }
        command = python_command("cutegen.build.daemon", [json.dumps(arguments)])
        self._received.clear()
        self._greeted = False
        try:
            with (folder / LOG).open("wb") as log:
                self._daemon = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=folder,
                    pass_fds=(self._scratch.lock,),  # the folder is in use while either of the two lives
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the daemon
                )
        except OSError as error:
            raise StoreError(f"cannot start the compile daemon: {error}") from error
        return self._daemon

    def _receive(self, timeout_s: float | None) -> bool:
        """Take in what the daemon has sent; whether there was anything within the time."""
        daemon = self._daemon
        if daemon is None or daemon.stdout is None:
            raise BuildError("the builder is closed")
        ready, _, _ = select.select([daemon.stdout], [], [], timeout_s)
        if not ready:
            return False
        data = os.read(daemon.stdout.fileno(), 1 << 16)
        if not data:
            self._daemon_died()
            return True
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        problems = [problem for line in lines if (problem := self._take(json.loads(line)))]
        if problems:
            raise StoreError(problems[0])
        return True

    def _take(self, message: dict[str, Json]) -> str:
        """Note what the daemon says; return what is wrong with the store, if anything."""
        status = message["status"]
        if status == "ready":
            self._greeted = True
            return ""
        key = str(message["key"])
        sources = self._waiting.pop(key, [])
        if status == "store":
            return str(message["message"])
        for source in sources:
            result: Result | None
            if status == "failed":
                result = Failure(
                    key, str(message["outcome"]), str(message["message"]), str(message.get("log", ""))
                )
            else:
                result = self.find(source)
            if result is None:
                return f"the entry of {key} vanished from {self.store.root} right after it was written"
            self._ready.append((source, result))
        return ""

    def _daemon_died(self) -> None:
        assert self._daemon is not None and self._scratch is not None
        status = self._daemon.wait()
        words = (self._scratch.path / LOG).read_text(encoding="utf-8", errors="replace").strip()
        waiting, greeted = dict(self._waiting), self._greeted
        ready = list(self._ready)
        self.close()
        last = words.splitlines()[-1] if words else f"exit status {status}"
        self._restarts += 1
        if not greeted or self._restarts > RESTARTS:
            raise BuildError(
                f"the compile daemon could not {'go on' if greeted else 'start'}: {last}", log=words
            )
        self._ready.extend(ready)
        self._waiting.update(waiting)
        for key, sources in waiting.items():
            self._send(key, sources[0])


def _close_quietly(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with suppress(BrokenPipeError):
            stream.close()


def _kill(daemon: subprocess.Popen[bytes]) -> None:
    if daemon.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
