"""Canonical JSON and short SHA-256 digests: stable names for values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

__all__ = ["Json", "canonical_json", "digest"]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


def canonical_json(value: Json) -> str:
    """Return the one JSON text of ``value``: sorted keys, no spaces, ASCII only.

    Raises:
        TypeError: ``value`` holds something JSON cannot carry.
        ValueError: ``value`` holds a NaN or an infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Json | bytes, *, length: int = 32) -> str:
    """Return the first ``length`` hexadecimal digits (of 64) of the SHA-256 of ``value``.

    Strings and bytes are hashed as they are, every other value as its canonical JSON.
    """
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")  # JSON strings may hold lone surrogates
    else:
        data = canonical_json(value).encode()
    return hashlib.sha256(data).hexdigest()[:length]
