"""The processes that use a GPU, as NVML reports them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cutegen.measure.contention import Look, Process
from cutegen.measure.nvml import NvmlHandle
from cutegen.text import printable

__all__ = ["NvmlWatch"]

#: Inode of the initial pid namespace. Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO.
_HOST_PIDS = 0xEFFFFFFC
#: Lists of processes by kind of context.
_LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
_NAME_LENGTH = 40


class NvmlWatch(NvmlHandle):
    """Reports the processes on one GPU through NVML; what NVML does not report is unknown, never an error.

    NVML gives the process ids of the host, since the driver knows no pid namespaces. In a container they say
    nothing about which processes are ours, so looks are not complete there.
    """

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid)
        self._own: set[int] = set()

    def look(self, since_s: float) -> Look:
        """Return the processes there, with their use of the GPU since a time in seconds since the epoch."""
        listed = self._listed()
        if listed is None:
            return Look((), complete=False)
        if not _has_host_pids():
            return Look(tuple(Process(pid, memory_bytes=m) for pid, m in listed.items()), complete=False)
        used = self._used(since_s)
        everyone = {**dict.fromkeys(used or ()), **listed}
        return Look(
            tuple(
                Process(
                    pid=pid,
                    name=self._name(pid),
                    memory_bytes=memory,
                    percent=None if used is None else used.get(pid, 0.0),
                    own=self._is_own(pid),
                    running=pid in listed,
                )
                for pid, memory in everyone.items()
            ),
            complete=True,
        )

    def percent(self) -> float | None:
        """Return the share of NVML's last sample in which any kernel ran; None if unknown."""
        if self._handle is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError:
            return None

    def _listed(self) -> dict[int, int | None] | None:
        """Return the bytes that each process holds; None if NVML lists no processes at all."""
        if self._handle is None:
            return None
        found: dict[int, int | None] = {}
        known = False
        for name in _LISTS:
            try:
                processes = getattr(self._nvml, name)(self._handle)
            except (AttributeError, self._nvml.NVMLError):
                continue
            known = True
            found.update((int(p.pid), p.usedGpuMemory) for p in processes)
        return found if known else None

    def _used(self, since_s: float) -> dict[int, float] | None:
        """Return the largest share of a sample in which each process computed; None where it is unknown."""
        nvml: Any = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, int(since_s * 1e6))
        except nvml.NVMLError as error:
            nothing = (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND)
            return {} if getattr(error, "value", None) in nothing else None
        used: dict[int, float] = {}
        for sample in samples:
            # Entries that the driver has not filled in hold nonsense.
            if sample.timeStamp > since_s * 1e6 and sample.pid and 0 <= sample.smUtil <= 100:
                used[int(sample.pid)] = max(used.get(int(sample.pid), 0.0), float(sample.smUtil))
        return used

    def _name(self, pid: int) -> str:
        try:
            name = str(self._nvml.nvmlSystemGetProcessName(pid))
        except (self._nvml.NVMLError, UnicodeDecodeError):
            return ""
        return printable(Path(name.partition(" ")[0]).name[:_NAME_LENGTH])

    def _is_own(self, pid: int) -> bool:
        """Whether it is this process or a descendant; one that was stays so when it has ended."""
        if pid not in self._own and os.getpid() in _lineage(pid):
            self._own.add(pid)
        return pid in self._own


def _has_host_pids() -> bool:
    """Whether this process is in the host's pid namespace."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return False


def _lineage(pid: int) -> list[int]:
    """Return ``pid`` and its ancestors, as far as they can be seen."""
    found: list[int] = []
    while pid > 0 and pid not in found:
        found.append(pid)
        try:
            status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(status.rpartition(")")[2].split()[1])  # the name before it may hold anything
    return found
