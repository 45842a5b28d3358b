"""Find the kernel and the integers of one size of a pinned range; a part of the loader of its own.

In a deployment the loader runs this file in its own namespace when a problem is not pinned by itself but
ranges are. Folders without ranges do not have it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from cutegen.deploy.launch import PinnedError
from cutegen.deploy.manifest import FIELDS

__all__ = ["RangeLookup"]


class RangeLookup:
    """The ranges of a deployment."""

    def __init__(self, deployment: Any, ranges: list[Any]) -> None:
        self._deployment, self._ranges = deployment, ranges
        #: The ranges whose files were all there.
        self._whole: set[str] = set()

    def of_key(self, key: tuple[Any, ...]) -> dict[str, Any] | None:
        """Return the record of the kernel that answers a GEMM of this key; None if no range does."""
        for record in self._ranges:
            try:
                at = FIELDS.index(record["size"])
                fits = record["key"] == [*key[:at], None, *key[at + 1 :]]
            except (KeyError, TypeError, ValueError) as error:
                raise self._malformed("a range", error) from error
            found = self.of_size(record, key[at]) if fits else None
            if found is not None:
                return found
        return None

    def of_size(self, record: dict[str, Any], size: int) -> dict[str, Any] | None:
        """Return the record of the kernel that answers a size of a range; None where none does.

        Raises:
            PinnedError: A kernel of the range is missing, or the manifest is malformed.
        """
        problem = str(record.get("problem"))
        folder = self._deployment.folder
        try:
            found = _pick(record, size)
            names = [kernel["library"] for kernel in record["kernels"] if kernel["symbol"]]
            missing = [name for name in names if problem not in self._whole and not (folder / name).exists()]
        except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as error:
            raise self._malformed(f"the range {problem}", error) from error
        if missing:
            raise PinnedError(f"{problem} needs {missing[0]}, which is missing in {folder}; copy it again")
        self._whole.add(problem)
        return found

    def _malformed(self, what: str, error: Exception) -> PinnedError:
        found: PinnedError = self._deployment._malformed(f"{what}: {type(error).__name__}: {error}")
        return found


def _pick(record: dict[str, Any], size: int) -> dict[str, Any] | None:
    """Return what a range says of a size; errors of a malformed one are of many kinds.

    A range has steps, each up to a last size: the place of the kernel among its kernels, the bytes of the
    workspace, whether that holds zeros, and the integers of the launch.
    """
    steps = record["steps"]
    at = bisect_left(steps, size, key=lambda step: step[0])
    if size < record["first"] or size % record["multiple_of"] or at == len(steps):
        return None
    _, kernel, workspace_bytes, zeroed, scalars = steps[at]
    if kernel is None:
        return None
    launch = {"workspace_bytes": workspace_bytes, "zeroed": zeroed, "scalars": scalars}
    return {**record, **record["kernels"][kernel], **launch}
