"""Calls of models that torch answered in place of a kernel of ours, counted by reason."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

__all__ = ["count", "counters", "known", "prepare", "refuse", "reset_counters"]

_log = logging.getLogger("cutegen")
_lock = threading.Lock()
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


def counters() -> Mapping[str, Any]:
    """Return what models did since the start or :func:`reset_counters`.

    ``fallbacks``: calls that torch answered in optimized models, by reason. A compiled graph counts once,
    when it is traced.
    """
    with _lock:
        return {"fallbacks": dict(_counts)}


def reset_counters() -> None:
    """Begin counting anew."""
    with _lock:
        _counts.clear()
        _refused.clear()


def prepare() -> None:
    """Nothing: counting needs no torch."""
