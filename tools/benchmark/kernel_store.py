"""Where a tool keeps the kernels that it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cutegen.build.store import Store
from cutegen.system.temporary import TemporaryFolder

__all__ = ["kernel_store"]


@contextmanager
def kernel_store(folder: Path | None = None) -> Iterator[Store]:
    """Hold the store in ``folder``; without one, an empty store that is gone afterwards."""
    if folder is not None:
        yield Store(folder)
        return
    with TemporaryFolder() as temporary:
        yield Store(temporary.path)
