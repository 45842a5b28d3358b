"""Whether other processes compete for the GPU, and what to do then: wait, warn or refuse."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cutegen.errors import DeviceError, UsageError

__all__ = ["BUSY_MODES", "Guard", "Look", "Process", "Watch", "contenders", "is_blind", "require_busy"]

_log = logging.getLogger("cutegen")

#: What to do while another process uses the GPU.
BUSY_MODES = ("wait", "warn", "refuse")
#: A process that uses SMs for less than this share of the time, in percent, is ignored: so few disturbed
#: samples do not move medians and paired ratios. Source: judgement.
BUSY_PERCENT = 5.0
#: Most seconds to wait for other processes. Source: judgement: tests and tuning runs end within this time; a
#: training job does not, and an error message is then better than a run that seems to hang.
WAIT_S = 600.0
#: The GPU counts as in use until this many seconds after the last use. NVML samples at least once a second.
_RECENT_S = 2.0
#: Seconds between looks while waiting, randomised by half so that two waiting runs do not start together.
_LOOK_S = 2.0
#: Most readings of the GPU's utilisation, and seconds between them. Together they take longer than NVML's
#: longest sample, one second, so that the last one covers only time in which this run was idle.
_READINGS, _READING_S = 10, 0.25


@dataclass(frozen=True)
class Process:
    """One process on the GPU.

    Attributes:
        pid: Its id.
        name: Of its program; empty if unknown.
        memory_bytes: Device memory that it holds; None if unknown.
        percent: Share of the time in which it used SMs; None if unknown.
        own: Whether it is this process or a descendant.
        running: Whether it runs now, rather than only while NVML sampled.
    """

    pid: int
    name: str = ""
    memory_bytes: int | None = None
    percent: float | None = None
    own: bool = False
    running: bool = True

    def __str__(self) -> str:
        facts = [self.name] if self.name else []
        facts += [f"{self.memory_bytes / 1e9:.1f} GB"] if self.memory_bytes is not None else []
        facts += [f"{self.percent:.0f} % of the time"] if self.percent is not None else []
        return f"pid {self.pid}" + (f" ({', '.join(facts)})" if facts else "")


@dataclass(frozen=True)
class Look:
    """What NVML reports about the processes on a GPU.

    Attributes:
        processes: Those that run there, and those that used it in the time in question.
        complete: Whether the list is complete, with process ids of this pid namespace. In a container NVML
            lists none, or all with the ids of the host.
    """

    processes: tuple[Process, ...]
    complete: bool


class Watch(Protocol):
    """Reports the processes on one GPU."""

    def look(self, since_s: float) -> Look:
        """Return the processes there, with their use of the GPU since a time in seconds since the epoch."""

    def percent(self) -> float | None:
        """Return the share of NVML's last sample in which any kernel ran; None if unknown."""

    def close(self) -> None:
        """Let go of NVML."""


def require_busy(mode: str) -> str:
    """Return ``mode`` if it is one of :data:`BUSY_MODES`.

    Raises:
        UsageError: It is none.
    """
    if mode not in BUSY_MODES:
        raise UsageError(f"busy={mode!r} is unknown; valid: {', '.join(BUSY_MODES)}")
    return mode


def is_blind(look: Look) -> bool:
    """Whether ``look`` does not show which process uses the GPU; its utilisation while we are idle must."""
    return not look.complete or any(p.percent is None for p in look.processes if not p.own)


def contenders(look: Look, idle_percent: float | None) -> str:
    """Return the processes that compete for the GPU, in words; empty if none is seen.

    A process that only holds a context and memory, such as an idle notebook, does not compete.

    Args:
        look: The processes there.
        idle_percent: The GPU's utilisation while this run was idle; None if it was not read or is unknown.
    """
    others = [p for p in look.processes if not p.own] if look.complete else []
    busy = [p for p in others if p.percent is not None and p.percent >= BUSY_PERCENT]
    if not busy and idle_percent is not None and idle_percent >= BUSY_PERCENT:
        return _unknown(look, idle_percent)
    return _listed(busy)


def _unknown(look: Look, idle_percent: float) -> str:
    """Return what is known of a competing process that NVML does not name."""
    use = f"{idle_percent:.0f} % of the time"
    suspects = _listed([p for p in look.processes if not p.own and p.percent is None])
    if not suspects:
        return f"a process that NVML does not list ({use})"
    if look.complete:
        return f"{suspects} ({use})"
    return f"a process outside of this container ({use}); NVML lists {suspects}, ours included"


def _listed(processes: Sequence[Process]) -> str:
    return ", ".join(map(str, sorted(processes, key=lambda p: (-(p.percent or 0.0), p.pid))))


class Guard:
    """Checks before and after measuring that no other process uses the GPU.

    Args:
        watch: Reports the processes on the GPU.
        mode: ``wait`` for others to finish, ``warn`` and go on, or ``refuse``.
        say: Gets one line about what was found.
        clock: Seconds since the epoch.
        sleep: Waits a number of seconds.

    Raises:
        UsageError: There is no such mode.
    """

    def __init__(
        self,
        watch: Watch,
        mode: str = "wait",
        *,
        say: Callable[[str], None] = _log.warning,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._watch = watch
        self._mode = require_busy(mode)
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._since_s = 0.0
        self._told = ""

    def begin(self, *, thorough: bool, limit_s: float | None = None) -> str:
        """Return the competing processes, in words, before measuring: empty unless the mode is ``warn``.

        This run must not be using the GPU.

        Args:
            thorough: Whether to read utilisation where NVML cannot attribute it, as in containers. That takes
                up to a second, until this run's own use is out of NVML's sample.
            limit_s: Most seconds to wait, if fewer than usual.

        Raises:
            DeviceError: Others use the GPU, and the mode is ``refuse``, or they still do after waiting.
        """
        who = self._present(thorough)
        after = ""
        if who and self._mode == "wait":
            limit_s = WAIT_S if limit_s is None else max(0.0, min(WAIT_S, limit_s))
            who, after = self._wait(who, limit_s), f" after {limit_s:.0f} s of waiting"
        if who and self._mode != "warn":
            raise DeviceError(
                f"the GPU is in use by {who}{after}, and times measured beside other work are off; free it, "
                "or go on with busy='warn' (--busy warn)"
            )
        if who and not self._told:
            self._say(f"the GPU is in use by {who}: times will be off, and are recorded as contended")
        self._told = who
        self._since_s = self._clock()
        return who

    def end(self, *, thorough: bool) -> str:
        """Return the processes that competed since :meth:`begin`, in words; empty if none was seen."""
        look = self._watch.look(self._since_s)
        return contenders(look, self._idle_percent() if thorough and is_blind(look) else None)

    def close(self) -> None:
        """Close the watch."""
        self._watch.close()

    def _present(self, thorough: bool) -> str:
        look = self._watch.look(self._clock() - _RECENT_S)
        look = replace(look, processes=tuple(p for p in look.processes if p.running))
        if is_blind(look) and not thorough:
            return self._told  # as the last thorough look found it
        return contenders(look, self._idle_percent() if is_blind(look) else None)

    def _idle_percent(self) -> float | None:
        """Return the lowest of some readings of utilisation, or the first low one: our own use fades."""
        least: float | None = None
        for _ in range(_READINGS):
            percent = self._watch.percent()
            if percent is None:
                return None
            least = percent if least is None else min(least, percent)
            if least < BUSY_PERCENT:
                break
            self._sleep(_READING_S)
        return least

    def _wait(self, who: str, limit_s: float) -> str:
        """Wait until no process competes; return those that still do when the time is up."""
        self._say(
            f"the GPU is in use by {who}; waiting up to {limit_s:.0f} s, since times measured beside other "
            "work are off (busy='warn', or --busy warn, goes on)"
        )
        start = self._clock()
        while who and self._clock() - start < limit_s:
            self._sleep(_LOOK_S * random.uniform(0.5, 1.5))
            who = self._present(thorough=True)
        return who
