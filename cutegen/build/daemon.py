"""The compile daemon: imports the compiler once, forks one child per source, publishes the results."""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cutegen.build.artifact import SOURCE, Failure, from_entry
from cutegen.build.child import Job, compile_into, warm_up
from cutegen.build.compilation import Compilation
from cutegen.build.forked_child import GO, run_and_exit
from cutegen.build.link import Linker
from cutegen.build.store import KeyLock, Store, StoredEntry
from cutegen.digest import Json, digest
from cutegen.errors import BuildError, StoreError

__all__ = ["Daemon", "main"]

#: Compilations use all cores. They run at a lower priority than the measuring process, which imports torch
#: beside them and then times kernels.
NICENESS = 5
#: Seconds until a key that another process is building is looked at again.
RETRY_S = 0.05
#: Seconds between looks at whether the parent still lives.
IDLE_S = 1.0
REAP_S = 0.005


class Daemon:
    """Reads jobs as JSON lines from ``inbox`` and writes one JSON line per finished job to ``outbox``.

    The end of ``inbox``, or the death of the parent, kills all children and ends :meth:`serve`.

    Args:
        store: Where results go.
        linker: Makes libraries.
        toolchain: What ``meta.json`` records as the toolchain.
        workers: Most children at a time.
        timeout_s: Seconds one child may take.
        inbox: Descriptor of jobs.
        outbox: Descriptor of results.
    """

    def __init__(
        self,
        store: Store,
        linker: Linker,
        toolchain: Json,
        workers: int,
        timeout_s: float,
        inbox: int,
        outbox: int,
    ) -> None:
        self._store = store
        self._linker = linker
        self._toolchain = toolchain
        self._workers = workers
        self._timeout_s = timeout_s
        self._inbox, self._outbox = inbox, outbox
        self._parent = os.getppid()
        self._jobs: deque[Job] = deque()
        self._deferred: deque[tuple[float, Job]] = deque()
        self._running: dict[int, Compilation] = {}
        #: Jobs that wait for a kernel which another job compiles, by the trace of that kernel.
        self._waiting_for: dict[str, list[Compilation]] = {}
        self._in, self._out = bytearray(), bytearray()
        self._open = True
        self._selector = selectors.DefaultSelector()
        for descriptor in (inbox, outbox):
            os.set_blocking(descriptor, False)
        self._selector.register(inbox, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Work until the inbox ends; then kill what still runs."""
        try:
            while self._open and os.getppid() == self._parent:
                self._start_jobs()
                for key, events in self._selector.select(self._select_timeout_s()):
                    self._handle(key, events)
                self._finish_jobs()
        finally:
            self._kill_all()

    def tell(self, message: Mapping[str, Json]) -> None:
        """Queue one line for the parent; never blocks."""
        self._out += json.dumps(message).encode() + b"\n"
        self._flush()

    # -- input and output

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fd == self._outbox:
            self._flush()
        elif key.fd == self._inbox:
            self._read_jobs()
        else:
            self._read_answer(self._running[key.data])

    def _read_jobs(self) -> None:
        try:
            data = os.read(self._inbox, 1 << 16)
        except BlockingIOError:
            return
        self._open = bool(data)
        self._in += data
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        jobs = [Job(**json.loads(line)) for line in lines]
        self._jobs.extendleft(job for job in reversed(jobs) if job.urgent)
        self._jobs.extend(job for job in jobs if not job.urgent)

    def _read_answer(self, run: Compilation) -> None:
        data = os.read(run.report, 1 << 16)
        run.answer += data
        if run.job.opening is not None and not run.trace and b"\n" in run.answer:
            self._take_trace(run)
        if not data:
            self._close_report(run)

    def _take_trace(self, run: Compilation) -> None:
        """Let the child go on unless the kernel that it traced is compiled, or being compiled, already."""
        line, _, rest = bytes(run.answer).partition(b"\n")
        run.answer = bytearray(rest)
        told = json.loads(line)
        if self._jobs:
            _import_parts_of_torch(told["torch"])
        # The same trace is another kernel under another toolchain.
        run.trace = digest({"traced": told["traced"], "toolchain": self._toolchain})
        run.facts = told["facts"]
        if run.trace in self._waiting_for:
            self._waiting_for[run.trace].append(run)
            run.is_duplicate = True
        else:
            run.is_duplicate = self._entry_of_trace(run) is not None
            if not run.is_duplicate:
                self._waiting_for[run.trace] = []
        with suppress(BrokenPipeError):
            os.write(run.orders, b"s" if run.is_duplicate else GO)

    def _close_report(self, run: Compilation) -> None:
        if not run.ended:
            self._selector.unregister(run.report)
            os.close(run.report)
            os.close(run.orders)
            run.ended = True

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self._outbox, self._out)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._open = False
        wanted, registered = bool(self._out), self._outbox in self._selector.get_map()
        if wanted and not registered:
            self._selector.register(self._outbox, selectors.EVENT_WRITE, None)
        elif registered and not wanted:
            self._selector.unregister(self._outbox)

    def _select_timeout_s(self) -> float:
        """Return how long to wait for messages before a job is due to be started, reaped or killed."""
        now = time.monotonic()
        waits = [IDLE_S]
        if any(run.ended for run in self._running.values()):
            waits.append(REAP_S)
        if self._deferred and len(self._running) < self._workers:
            waits.append(self._deferred[0][0] - now)
        waits += [run.started + self._timeout_s - now for run in self._running.values()]
        return max(0.0, min(waits))

    # -- jobs

    def _start_jobs(self) -> None:
        now = time.monotonic()
        while self._deferred and self._deferred[0][0] <= now:
            self._jobs.append(self._deferred.popleft()[1])
        while self._jobs and len(self._running) < self._workers:
            job = self._jobs.popleft()
            try:
                self._start(job)
            except StoreError as error:
                self.tell({"key": job.key, "status": "store", "message": str(error)})

    def _start(self, job: Job) -> None:
        lock = self._store.try_lock(job.arch, job.key)
        if lock is None:
            self._deferred.append((time.monotonic() + RETRY_S, job))
            return
        try:
            if self._already_there(job):
                lock.release()
                self.tell({"key": job.key, "status": "stored"})
                return
            folder = self._store.stage(lock)
            self._fork(job, lock, folder)
        except OSError as error:
            self._store.unstage(lock)
            lock.release()
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"cannot start a compilation in {self._store.root}: {error.strerror}") from error

    def _already_there(self, job: Job) -> bool:
        """Whether another process has built it meanwhile; a time-out under a shorter limit does not count."""
        entry = self._store.read(job.arch, job.key)
        if entry is None:
            return False
        try:
            result = from_entry(entry)
        except BuildError:
            return False
        return not isinstance(result, Failure) or result.stands(self._timeout_s)

    def _fork(self, job: Job, lock: KeyLock, folder: Path) -> None:
        (folder / SOURCE).write_text(job.text, encoding="utf-8")
        final = self._store.folder(job.arch, job.key)
        parent = os.getpid()
        reading, writing = os.pipe()
        ordered, orders = os.pipe()
        pid = os.fork()
        if pid == 0:
            run_and_exit(
                lambda traced: compile_into(job, folder, final, self._linker, traced),
                folder,
                writing,
                ordered,
                parent,
            )
        # The child does this too. Whoever comes first, from here on kill() reaches it.
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        os.close(writing)
        os.close(ordered)
        run = Compilation(job, lock, folder, pid, reading, orders, time.monotonic())
        self._running[pid] = run
        self._selector.register(reading, selectors.EVENT_READ, pid)

    def _finish_jobs(self) -> None:
        now = time.monotonic()
        for run in list(self._running.values()):
            if not run.timed_out and now > run.started + self._timeout_s:
                run.timed_out = True
                run.kill()
                self._close_report(run)
            if run.ended:
                pid, status = os.waitpid(run.pid, os.WNOHANG)
                if pid:
                    del self._running[pid]
                    self._conclude(run, status)

    def _conclude(self, run: Compilation, status: int) -> None:
        run.kill()  # anything the child started
        if run.settled:  # the kernel was ready before this child had ended
            return
        if run.is_duplicate and os.WIFEXITED(status):
            if not any(run in waiting for waiting in self._waiting_for.values()):
                self._answer_duplicate(run, None)
            return
        for waiting in self._waiting_for.values():
            if run in waiting:  # it was killed before it could wait
                waiting.remove(run)
        log = run.read_log()
        answer = run.outcome(status, self._timeout_s, log)
        if answer["outcome"] == "store":  # the child knows the reason, and its own folder alone
            answer["message"] = f"cannot write to {self._store.root}: {answer['message']}"
        ended = dict(answer)
        self._tell_answer(run, answer, log)
        for other in self._waiting_for.pop(run.trace, []) if run.trace and not run.is_duplicate else ():
            self._answer_duplicate(other, ended)

    def _entry_of_trace(self, run: Compilation) -> StoredEntry | None:
        """Return the entry of the kernel that a job traced, if another job has compiled it."""
        key = self._store.find_trace(run.job.arch, run.trace)
        return None if key is None else self._store.find(run.job.arch, key)

    def _answer_duplicate(self, run: Compilation, failed: Mapping[str, Json] | None) -> None:
        """Answer a job whose kernel another one compiled: with that artifact, or with how it failed."""
        entry = self._entry_of_trace(run)
        answer: dict[str, Json]
        if entry is not None:
            try:
                answer = run.copy_from(entry)
            except StoreError as error:
                answer = {"outcome": "store", "message": str(error)}
        elif failed is not None and failed["outcome"] != "ok":
            answer = dict(failed)
        else:  # the entry was removed meanwhile
            run.settled = True
            self._store.unstage(run.lock)
            run.lock.release()
            self._jobs.append(run.job)
            return
        self._tell_answer(run, answer, "")

    def _tell_answer(self, run: Compilation, answer: dict[str, Json], log: str) -> None:
        run.settled = True
        try:
            self._store_answer(run, answer, log)
        except StoreError as error:
            self._store.unstage(run.lock)
            answer = {"key": run.job.key, "status": "store", "message": str(error)}
        run.lock.release()
        self.tell(answer)

    def _store_answer(self, run: Compilation, answer: dict[str, Json], log: str) -> None:
        """Publish ``answer``, and change it into the message for the parent."""
        keep = answer.pop("keep", True)
        if run.trace:
            answer.update(trace=run.trace, facts=run.facts)
        if answer["outcome"] == "store":
            raise StoreError(str(answer["message"]))
        if keep:
            self._write_log(run, log if answer["outcome"] != "ok" else "")
            self._store.publish(run.lock, {**self._about(run.job), **answer})
            if run.trace and answer["outcome"] == "ok" and not run.is_duplicate:
                self._store.note_trace(run.job.arch, run.trace, run.job.key)
            answer.clear()
            answer.update(key=run.job.key, status="stored")
        else:
            self._store.unstage(run.lock)
            answer.update(key=run.job.key, status="failed", log=log)

    def _write_log(self, run: Compilation, log: str) -> None:
        try:
            run.write_log(log)
        except OSError as error:
            raise StoreError(f"cannot write to {self._store.root}: {error.strerror}") from error

    def _about(self, job: Job) -> dict[str, Json]:
        return {
            "symbol": job.symbol,
            "source_digest": digest(job.text),
            "toolchain": self._toolchain,
            "timeout_s": self._timeout_s,
            "created_at": round(time.time(), 3),
            **job.about,
        }

    def _kill_all(self) -> None:
        for run in self._running.values():
            run.kill()
        for run in self._running.values():
            os.waitpid(run.pid, 0)
        waiting = [run for runs in self._waiting_for.values() for run in runs]
        for run in {id(run): run for run in (*self._running.values(), *waiting) if not run.settled}.values():
            self._store.unstage(run.lock)
            run.lock.release()
        self._running.clear()


def _import_parts_of_torch(names: Sequence[str]) -> None:
    """Import parts of torch that a child has loaded, so that later children inherit them."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        with suppress(Exception):  # not every module can be imported by name; the child then does it itself
            importlib.import_module(name)
    if missing:
        gc.freeze()


def main(arguments: Sequence[str]) -> int:
    """Serve the parent that started this process; ``arguments`` is one text of JSON, by the builder."""
    given = json.loads(arguments[0])
    parent = os.getppid()
    outbox = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to the log
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    scratch = Path(given["scratch"])
    try:
        linker = Linker(scratch)
        compiler = warm_up(torch=bool(given.get("torch")))
        store = Store(Path(given["root"]))
        daemon = Daemon(store, linker, given["toolchain"], given["workers"], given["timeout_s"], 0, outbox)
        daemon.tell({"status": "ready", "compiler": compiler})
        gc.collect()
        gc.freeze()  # children then do not touch, and so do not copy, the pages of objects made so far
        os.nice(NICENESS)
        daemon.serve()
    finally:
        if os.getppid() != parent:  # the parent, which else removes it, is gone
            shutil.rmtree(scratch, ignore_errors=True)
    return 0
