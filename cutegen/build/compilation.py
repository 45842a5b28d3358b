"""A source that a forked child compiles, as the daemon sees it, and what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cutegen.build.artifact import LOG, OBJECT, SOURCE
from cutegen.build.child import Job
from cutegen.build.forked_child import plain
from cutegen.build.store import LIBRARY, KeyLock, StoredEntry
from cutegen.digest import Json
from cutegen.errors import StoreError

__all__ = ["Compilation"]

#: Signals that other programs and limits of the system end a process with, and what they tell.
_FROM_OUTSIDE = {
    signal.SIGKILL: "probably for want of memory; use fewer workers",
    signal.SIGTERM: "by another program, such as one that watches memory",
    signal.SIGINT: "by another program",
    signal.SIGHUP: "by another program",
    signal.SIGXCPU: "at the limit of processor time",
    signal.SIGXFSZ: "at the limit of file sizes",
    signal.SIGBUS: "probably for want of space in a file system; free some",
}
#: Characters of a compiler log that are kept, from its end.
LOG_LIMIT = 65536


@dataclass(eq=False)
class Compilation:
    """A job that a child works on.

    Attributes:
        job: What is compiled.
        lock: The lock of its key.
        folder: The staging folder that the child fills.
        pid: Process id of the child, which leads a process group of its own.
        report: Descriptor that the child writes to: what it traced on a line, then its answer.
        orders: Descriptor that the child reads from.
        started: When it was forked, by the steady clock.
        answer: What the child has written so far.
        ended: Whether the child writes no more.
        timed_out: Whether it was killed for taking too long.
        trace: Names the kernel that was traced, if the source opens modules of users.
        facts: What the user's code was told about the hardware.
        is_duplicate: Whether another job compiles that kernel, or has compiled it.
        settled: Whether its job was answered, or is to begin anew, although the child may still run.
    """

    job: Job
    lock: KeyLock
    folder: Path
    pid: int
    report: int
    orders: int
    started: float
    answer: bytearray = field(default_factory=bytearray)
    ended: bool = False
    timed_out: bool = False
    trace: str = ""
    facts: dict[str, Json] = field(default_factory=dict)
    is_duplicate: bool = False
    settled: bool = False

    def kill(self) -> None:
        """Kill the child and everything that it started."""
        with suppress(ProcessLookupError):  # it was gone already
            os.killpg(self.pid, signal.SIGKILL)

    def read_log(self) -> str:
        """Return the end of what the compiler printed, without colour codes."""
        try:
            text = (self.folder / LOG).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""  # the child died before it wrote any
        return plain(text)[-LOG_LIMIT:].strip()

    def write_log(self, log: str) -> None:
        """Put ``log`` in place of what the child wrote; an empty one leaves no file.

        Raises:
            OSError: It cannot be written.
        """
        (self.folder / LOG).unlink(missing_ok=True)
        if log:
            (self.folder / LOG).write_text(log, encoding="utf-8")

    def outcome(self, status: int, limit_s: float, log: str) -> dict[str, Json]:
        """Return the child's answer, or how it died.

        Args:
            status: As ``os.waitpid`` gives it.
            limit_s: Seconds that it was allowed to take.
            log: What the compiler printed.
        """
        if self.timed_out:
            return {"outcome": "timeout", "message": f"compilation took longer than {limit_s:g} s"}
        if os.WIFSIGNALED(status):
            return _death(os.WTERMSIG(status), log)
        try:
            answer: dict[str, Json] = json.loads(self.answer)
        except ValueError:
            return _silence(os.WEXITSTATUS(status))
        return answer

    def copy_from(self, entry: StoredEntry) -> dict[str, Json]:
        """Take the files of ``entry``, which is the same kernel; return what ``meta.json`` shall say.

        Raises:
            StoreError: They cannot be copied.
        """
        try:
            for name in (OBJECT, LIBRARY):
                shutil.copyfile(entry.folder / name, self.folder / name)
        except OSError as error:
            raise StoreError(f"cannot copy {entry.folder}: {error.strerror}") from error
        kept = ("outcome", "message", "resources", "symbol")
        found = {name: entry.meta[name] for name in kept if name in entry.meta}
        return {**found, "same_as": entry.key, "build_s": round(time.monotonic() - self.started, 4)}


def _silence(code: int) -> dict[str, Json]:
    """Return the answer for a child that ended without one: whatever stopped it may be gone next time."""
    message = f"the compiler exited with status {code} and no answer"
    return {"outcome": "abort", "message": message, "keep": False, "again": True}


def _death(number: int, log: str) -> dict[str, Json]:
    """Return the answer for a child that died of a signal."""
    cause = signal.Signals(number)
    if cause in _FROM_OUTSIDE:  # not the compiler's doing, so a later run may fare better
        message = f"compilation was killed ({cause.name}), {_FROM_OUTSIDE[cause]}"
        return {"outcome": "abort", "message": message, "keep": False, "again": True}
    where = re.search(rf'/{SOURCE}", line (\d+) in (\S+)', log)  # the stack that the dying process left
    place = f" at line {where[1]} of the source, in {where[2]}" if where else ""
    return {"outcome": "abort", "message": f"the compiler died without a message ({cause.name}){place}"}
