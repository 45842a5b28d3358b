"""Atomic replacement of files: readers see the old content or the new content, never a part of it."""

from __future__ import annotations

import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from cutegen.errors import StoreError
from cutegen.text import shown

__all__ = [
    "is_file_name",
    "publish",
    "publishing",
    "real_path",
    "require_file_name",
    "require_place",
    "why_no_folder",
]

#: Mode of a new file, before the umask.
_NEW_MODE = 0o644
_DRAFT = re.compile(r"\.cutegen-[0-9a-f]{32}")
#: A draft that nobody has written to for so many seconds was left by a process that was killed: writing one
#: takes seconds, and clocks of machines that share a folder differ by less than a day.
_ABANDONED_S = 86400.0


def publish(path: Path, data: bytes, what: str) -> None:
    """Write ``data`` to the file ``path``; as :func:`publishing`."""
    with publishing(path, what) as file:
        file.write(data)


@contextmanager
def publishing(path: Path, what: str) -> Iterator[BinaryIO]:
    """Yield an open draft file that replaces ``path`` when the block ends without an error.

    The draft is in the same folder. Its name is unpredictable and it is created exclusively, so no existing
    file or link is written to. If ``path`` is a symbolic link, its target is replaced and the link stays. The
    new file keeps the mode of the old one, and its owner and group where permitted. A missing folder is
    created. Drafts of this user's that a killed process left there are removed, once they are a day old.

    Args:
        path: The file.
        what: What it is, for messages: ``dispatch table``.

    Raises:
        StoreError: The file cannot be written, or ``path`` is not a regular file. The old file is
            unchanged and no draft is left.
    """
    try:
        target = real_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        old = _status(target)
        _sweep(target.parent)
        draft = target.with_name(f".cutegen-{uuid.uuid4().hex}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(draft, flags, _NEW_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if old is not None:
                    _take_after(file.fileno(), old)
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{what} {path} cannot be written: {error.strerror or error}") from error


def require_place(path: Path, what: str) -> None:
    """Do nothing if the file ``path`` can be published, as far as is known before the work that fills it.

    Args:
        path: The file.
        what: What it is, for messages.

    Raises:
        StoreError: It cannot.
    """
    target = real_path(path)
    try:
        why = why_no_folder(target.parent)
        if not why:
            _status(target)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise StoreError(f"{what} {path} cannot be written: {why}")


def is_file_name(text: str) -> bool:
    """Return whether a file can have this name; none holds a NUL byte, say."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def require_file_name(path: Path | str) -> Path:
    """Return ``path``.

    Raises:
        StoreError: No file can have this name.
    """
    if not is_file_name(str(path)):
        raise StoreError(f"{shown(str(path))} is not a valid file name")
    return Path(path)


def why_no_folder(folder: Path) -> str:
    """Return why files cannot be made in ``folder``, which may be made first; empty if they can.

    Raises:
        OSError: It cannot be looked at.
    """
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        return f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} is not writable; name a file in a folder that is"
    return ""


def real_path(path: Path) -> Path:
    """Return ``path`` with all symbolic links resolved; the file need not exist.

    Raises:
        StoreError: No file can have this name.
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise StoreError(f"{shown(str(path))} is not a valid file name: {error}") from error


@lru_cache(maxsize=1024)  # once in a process: a folder may hold many files
def _sweep(folder: Path) -> None:
    """Remove the drafts that processes of this user left in ``folder`` when they were killed."""
    before = time.time() - _ABANDONED_S
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _DRAFT.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if ours and status.st_mtime < before:
                    os.unlink(entry.path)  # noqa: PTH108


def _status(target: Path) -> os.stat_result | None:
    try:
        status = target.lstat()  # links are resolved; one that is left is a loop
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise OSError(f"{target} is a folder; name a file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{target} is not a regular file")
    return status


def _take_after(descriptor: int, old: os.stat_result) -> None:
    own = os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
        with suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & 0o777)
