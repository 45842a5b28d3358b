"""What a child of ``fork`` finds: none of the threads of its parent, and the locks as these left them.

A lock that another thread held stays locked for ever there, and what another thread was to finish is never
finished. So whoever has such things says here how to begin anew.
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol

__all__ = ["Renewable", "RenewedLock", "renew_in_children"]


class Renewable(Protocol):
    """What must begin anew in a child of fork."""

    def renew(self) -> None:
        """Forget the threads of the parent. Called in the child, where there is one thread."""


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(renewable: Renewable) -> None:
    """Renew an object in every child of fork, as long as it lives."""
    _renewables.add(renewable)


def _renew_all() -> None:
    for renewable in tuple(_renewables):
        renewable.renew()


os.register_at_fork(after_in_child=_renew_all)


class RenewedLock:
    """A lock that a thread may take several times; children of fork find it free, or their own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        renew_in_children(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free, unless the thread that lives on has it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()
