"""Whether a cache holds only what its user, or one who is trusted, has written: kernels from it are run."""

from __future__ import annotations

import os
from pathlib import Path

from cutegen.errors import StoreError
from cutegen.system.private import why_untrusted

__all__ = ["CacheTrust", "store_failure"]


class CacheTrust:
    """Checks the folders of one cache; each is looked at once.

    Every folder from the root to an entry must belong to this user or to the superuser, and neither its group
    nor everybody may write to it.

    Args:
        root: The folder of the cache.
        shared: Trust the user who owns ``root`` as well.
    """

    def __init__(self, root: Path, shared: bool) -> None:
        self._root = root
        self._shared = shared
        self._trusted: set[Path] = set()

    def require(self, folder: Path) -> None:
        """Refuse ``folder`` if it, or one above it up to the root, may hold what another user wrote.

        Raises:
            StoreError: It may; the message names the folder and the remedy.
        """
        if folder in self._trusted:
            return
        if folder != self._root:
            self.require(folder.parent)
        try:
            reason = why_untrusted(folder, self._owners())
        except FileNotFoundError:
            return
        except OSError as error:
            raise store_failure(f"read {folder}", error) from error
        if reason:
            raise StoreError(
                f"cache {self._root} is refused: {folder} {reason}, so another user could have put code "
                f"there that would be run; {self._remedy(reason)}"
            )
        self._trusted.add(folder)

    def _owners(self) -> set[int]:
        owners = {os.geteuid(), 0}
        return owners | {self._root.stat().st_uid} if self._shared else owners

    def _remedy(self, reason: str) -> str:
        import shlex  # only for this message

        own = "set CUTEGEN_CACHE_DIR to a folder of your own"
        if "written" in reason:
            return (
                f"if all of it is yours, run: chmod -R go-w {shlex.quote(str(self._root))}; otherwise {own}"
            )
        return own if self._shared else f"{own}, or trust that user and only read: Store(root, shared=True)"


def store_failure(what: str, error: OSError) -> StoreError:
    """Return the error of a cache in which the system refused to do ``what``, with the remedy."""
    reason = error.strerror or str(error)
    return StoreError(
        f"cannot {what}: {reason}; free the space, change the permissions or set CUTEGEN_CACHE_DIR"
    )
