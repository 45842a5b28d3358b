"""Writing to pipes."""

from __future__ import annotations

import os

__all__ = ["write_all"]


def write_all(descriptor: int, data: bytes) -> None:
    """Write ``data`` to a blocking descriptor, which may take it in several pieces.

    Raises:
        OSError: It cannot be written, such as BrokenPipeError where the reader is gone.
    """
    while data:
        data = data[os.write(descriptor, data) :]
