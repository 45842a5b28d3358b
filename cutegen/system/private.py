"""Folders that only their owner may write to: made so, and checked before code in them is run."""

from __future__ import annotations

import stat
from collections.abc import Collection
from pathlib import Path

__all__ = ["make_private", "why_untrusted"]


def make_private(folder: Path) -> None:
    """Create ``folder`` and the folders above it that are missing, for this user alone (mode 0700).

    A folder that exists is left as it is.

    Raises:
        OSError: It cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def why_untrusted(folder: Path, owners: Collection[int]) -> str:
    """Return how another user may have put files into ``folder``; empty if only its owner can.

    Args:
        folder: An existing folder; a symbolic link is followed.
        owners: Ids of the users who may own it.

    Raises:
        OSError: It cannot be looked at.
    """
    status = folder.stat()
    if status.st_uid not in owners:
        return f"belongs to user {_user(status.st_uid)}"
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP:
        return f"can be written by its group (mode {mode:04o})"
    return ""


def _user(number: int) -> str:
    import pwd

    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return str(number)
