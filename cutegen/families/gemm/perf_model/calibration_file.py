"""The file of a calibration: all models read the same content of it, whatever becomes of the file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from cutegen.errors import StoreError
from cutegen.system.documents import parse_json, read_bytes

__all__ = ["CALIBRATION", "calibration_digest", "read_calibration"]

#: What the file is, in messages.
CALIBRATION = "calibration"


def calibration_digest(data: bytes) -> str:
    """Return what files of other contents do not share."""
    return hashlib.sha256(data).hexdigest()[:16]


def read_calibration(path: Path, digest: str = "") -> dict[str, Any]:
    """Return what the file ``path`` holds.

    Args:
        path: The file.
        digest: What :func:`calibration_digest` says of the content that is meant; empty for any.

    Raises:
        StoreError: There is no such file, it is no JSON object, or its content is another one by now.
    """
    data = read_bytes(path, CALIBRATION, malformed=StoreError)
    if digest not in ("", calibration_digest(data)):
        raise StoreError(f"calibration {path} was replaced after it was taken into use; start again")
    found = parse_json(data, f"{CALIBRATION} {path}", malformed=StoreError)
    if not isinstance(found, dict):
        raise StoreError(f"{path} is no calibration: it holds no JSON object")
    return found
