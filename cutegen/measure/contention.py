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
#: A process that keeps SMs at work for less of the time than this, in percent, is left alone:
#: medians and paired ratios are not moved by so few samples. Source: judgement.
BUSY_PERCENT = 5.0
#: Seconds that are waited at most. Source: judgement: other people's tests and tuning runs end within this;
#: a training job does not, and a message is worth more than a run that seems to hang.
WAIT_S = 600.0
#: Use of the GPU counts as present if it was so few seconds ago. NVML samples at least once a second.
_RECENT_S = 2.0
#: Seconds between looks while waiting, varied by half so that two waiting runs do not go on together.
_LOOK_S = 2.0
#: Readings of the whole GPU's utilisation, and seconds between them: longer than NVML's longest sample, one
#: second, so that the last is of a time in which nothing of ours ran.
_READINGS, _READING_S = 10, 0.25


@dataclass(frozen=True)
class Process:
    """One process on the GPU.

    Attributes:
        pid: Its id.
        name: Of its program; empty if unknown.
        memory_bytes: Device memory that it holds; None if unknown.
        percent: Of the time in which it had SMs at work; None if unknown.
        own: Whether it is this process or started by it.
        running: Whether it is there now, rather than only while NVML sampled.
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
    """What NVML says about the processes on a GPU.

    Attributes:
        processes: Those that run there, and those that used it in the time that was asked about.
        complete: Whether these are all, under the ids that this process knows them by. In a container NVML
            lists none, or all under the ids of the host.
    """

    processes: tuple[Process, ...]
    complete: bool


class Watch(Protocol):
    """Looks at one GPU."""

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
    """Whether ``look`` cannot tell who uses the GPU, so that its utilisation while we are idle must."""
    return not look.complete or any(p.percent is None for p in look.processes if not p.own)


def contenders(look: Look, idle_percent: float | None) -> str:
    """Return who competes for the GPU, in words; empty if nobody is seen to.

    A process that only holds a context and memory, such as an idle notebook, does not.

    Args:
        look: The processes there.
        idle_percent: The GPU's utilisation while nothing of ours ran; None if nobody asked, or it is unknown.
    """
    others = [p for p in look.processes if not p.own] if look.complete else []
    busy = [p for p in others if p.percent is not None and p.percent >= BUSY_PERCENT]
    if not busy and idle_percent is not None and idle_percent >= BUSY_PERCENT:
        return _unknown(look, idle_percent)
    return _listed(busy)


def _unknown(look: Look, idle_percent: float) -> str:
    """Return what is known of a process that computes without being named."""
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
        watch: Looks at the GPU.
        mode: ``wait`` for others to finish, ``warn`` and go on, or ``refuse``.
        say: Told in one line what is the matter.
        clock: Seconds since the epoch.
        sleep: Waits so many seconds.

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
        """Return who competes, in words, before measuring starts: empty unless the mode is ``warn``.

        Nothing of ours may be running on the GPU.

        Args:
            thorough: Whether to look although it takes time: up to a second of waiting for our own use to
                fade, in containers and wherever else NVML cannot tell whose use it is.
            limit_s: Seconds to wait at most, if fewer than usual.

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
        """Return who competed since :meth:`begin`, in words; empty if nobody was seen to."""
        look = self._watch.look(self._since_s)
        return contenders(look, self._idle_percent() if thorough and is_blind(look) else None)

    def close(self) -> None:
        """Let go of what looks at the GPU."""
        self._watch.close()

    def _present(self, thorough: bool) -> str:
        look = self._watch.look(self._clock() - _RECENT_S)
        look = replace(look, processes=tuple(p for p in look.processes if p.running))
        if is_blind(look) and not thorough:
            return self._told  # as it was when somebody looked
        return contenders(look, self._idle_percent() if is_blind(look) else None)

    def _idle_percent(self) -> float | None:
        """Return the least utilisation of some readings, as soon as one is low; ours fades meanwhile."""
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
        """Wait until nobody competes and return who still does when the time is over."""
        self._say(
            f"the GPU is in use by {who}; waiting up to {limit_s:.0f} s, since times measured beside other "
            "work are off (busy='warn', or --busy warn, goes on)"
        )
        start = self._clock()
        while who and self._clock() - start < limit_s:
            self._sleep(_LOOK_S * random.uniform(0.5, 1.5))
            who = self._present(thorough=True)
        return who
