"""Calls of models that torch answered in place of a kernel of ours, counted by reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from cutegen.system.forks import RenewedLock

__all__ = ["count", "counts", "known", "refuse", "reset"]

_log = logging.getLogger("cutegen")
_lock = RenewedLock()
_counts: Counter[str] = Counter()
#: Calls that a kernel refused, by what decides it; a program with more starts over.
_refused: dict[Hashable, str] = {}
_MOST, _MOST_REASONS = 4096, 256


def known(kind: Callable[..., Hashable], *operands: Any) -> str:
    """Return why a call of the same kind was refused, as ``kind`` makes it of the operands; else nothing."""
    return _refused.get(kind(*operands), "") if _refused else ""


def refuse(key: Hashable, reason: str) -> None:
    """Remember that calls of this kind are refused, and log the first of each reason."""
    with _lock:
        if len(_refused) >= _MOST:
            _refused.clear()
        first = reason not in _counts
        _refused[key] = reason
    if first:
        _log.info("torch computes a layer: %s", reason)


def count(reason: str) -> None:
    """Count one call, or one traced call of a graph."""
    with _lock:
        _counts[reason if reason in _counts or len(_counts) < _MOST_REASONS else "other reasons"] += 1


def counts() -> dict[str, int]:
    """Return how many calls torch answered in optimized models, by reason."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Begin counting anew."""
    with _lock:
        _counts.clear()
        _refused.clear()
