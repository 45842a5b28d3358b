"""Which file system holds a path, whether other machines may use it too, and whether code runs from it."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["file_system", "is_network", "is_noexec"]

#: Types of file systems that several machines (or a machine and its guests) can have mounted at a time.
#: All of FUSE counts: sshfs and the clients of most object stores are of it.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "davfs", "ceph", "glusterfs", "lustre"),
    *("gpfs", "beegfs", "orangefs", "pvfs2", "panfs", "wekafs", "ocfs2", "gfs2", "acfs", "fuse"),
    *("9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs"),
}
_MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path) -> str:
    """Return the type of the file system that holds ``path``, such as ``ext4``; empty where nothing says.

    ``path`` need not exist: then it is the type of what it would be created in.
    """
    wanted = os.path.realpath(path)
    found, length = "", 0
    for line in _lines():
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(" "), kind.split(" ")
        if len(fields) < 5:
            continue
        point = _unescaped(fields[4])
        inside = wanted == point or wanted.startswith(f"{point.rstrip('/')}/")
        if inside and len(point) >= length:  # of two mounts in one place the later one is on top
            found, length = kinds[0], len(point)
    return found


def is_network(path: Path) -> bool:
    """Return whether ``path`` lies on a file system that other machines may use at the same time."""
    kind = file_system(path)
    return kind in _NETWORK or kind.startswith("fuse.")


def is_noexec(path: Path) -> bool:
    """Return whether the file system of ``path`` is mounted so that no library can be loaded from it."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def _lines() -> list[str]:
    try:
        return _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return []


def _unescaped(text: str) -> str:
    """Return a path as it is; the kernel writes blanks, line ends and backslashes in it as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
