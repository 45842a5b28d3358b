"""A dictionary of things that are made once, with an end to how many are kept."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Remembered"]

_K = TypeVar("_K")
_V = TypeVar("_V")


class Remembered(dict[_K, _V]):
    """A dictionary whose oldest entries go when it is full.

    It is for what is made from more than its key: ``functools.lru_cache`` would compare all arguments.

    Args:
        most: So many entries are kept.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: _K, value: _V) -> _V:
        """Remember ``value`` from now on, and return it."""
        if len(self) >= self._most:
            self.pop(next(iter(self)))
        self[key] = value
        return value
