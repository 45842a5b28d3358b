"""How many compilations this machine can run at a time."""

from __future__ import annotations

import os
from pathlib import Path

from cutegen.errors import UsageError
from cutegen.text import shown

__all__ = ["default_workers", "require_workers"]

#: Memory of one compilation, in bytes. Source: resident set of a compile child, measured as 260 to 340 MB.
BYTES_PER_WORKER = 400 * 2**20
_CGROUP = Path("/sys/fs/cgroup")


def default_workers() -> int:
    """Return the cores this process may use, or fewer where memory is short; at least 1."""
    memory = min(_available_bytes(), _cgroup_bytes())
    return max(1, min(_cores(), memory // BYTES_PER_WORKER))


def require_workers(workers: int | None) -> int:
    """Return how many compilations run at a time, :func:`default_workers` for None.

    Raises:
        UsageError: It is no number of at least 1; with fewer nothing would ever end.
    """
    if workers is None:
        return default_workers()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers is {shown(workers)}; valid: 1 and more, or None for one per core")
    return workers


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    words = _read(_CGROUP / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def _available_bytes() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _cgroup_bytes() -> int:
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else 2**62


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
