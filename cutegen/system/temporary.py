"""Folders in the temporary directory that a later run removes when ``kill -9`` kept their owner from it."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from cutegen.errors import StoreError
from cutegen.system.closing import Closing
from cutegen.system.mounts import is_network

__all__ = ["TemporaryFolder", "sweep"]

_PREFIX = "cutegen-scratch-"
_LOCK = "in-use.lock"


class TemporaryFolder(Closing):
    """A new folder of mode 0700, for this process and for children that inherit its lock.

    A context manager that removes it.

    Attributes:
        path: The folder.
        lock: Descriptor whose lock says that the folder is in use. The kernel drops the lock when every
            process that has the descriptor is gone.

    Raises:
        StoreError: It cannot be made.
    """

    def __init__(self) -> None:
        self.lock = -1
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        except OSError as error:
            raise StoreError(f"cannot make a temporary folder: {error.strerror or error}") from error
        draft = self.path / f"{_LOCK}.draft"
        try:
            self.lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot write to {self.path.parent}: {error.strerror}") from error
        with suppress(OSError):  # where files cannot be locked, sweep() finds no lock and removes nothing
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only a file of this name counts, and it is locked before it gets the name.
            draft.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder with all that is in it; calling it again does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def sweep() -> None:
    """Remove the folders of this user's processes that were killed before they could.

    A folder counts if :class:`TemporaryFolder` made it, it belongs to this user alone, and no process holds
    its lock. On a network file system nothing is removed: locks may not reach other machines there.
    """
    try:
        top = Path(tempfile.gettempdir())
        names = [name for name in os.listdir(top) if name.startswith(_PREFIX)]  # noqa: PTH208
    except OSError:
        return
    if names and not is_network(top):
        for name in names:
            _remove_abandoned(top / name)


def _remove_abandoned(folder: Path) -> None:
    lock = -1
    try:
        status = folder.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if ours and stat.S_IMODE(status.st_mode) == 0o700:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # another process removes it or uses it, or it is no such folder
        pass
    finally:
        if lock >= 0:
            os.close(lock)
