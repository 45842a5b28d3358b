"""Boosted trees in arrays: corrections of a rough estimate, for many rows at once.

Trees are oblivious: each asks the same few questions of every row, whose answers number its leaf.
``tools/fit_gemm.py`` and ``tools/fit_torch_mm.py`` fit them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float32]

__all__ = ["Trees"]


@dataclass(frozen=True)
class Trees:
    """A sum of trees.

    Attributes:
        asked: Feature that each question looks at: first those of every tree's first question, and so on.
        limits: What it is compared with; an answer is yes above.
        leaves: What each tree adds, by tree and then by answers.
        depth: Questions of a tree, at most 8.
        base: What is added before all trees.
    """

    asked: NDArray[numpy.intp]
    limits: Array
    leaves: Array
    depth: int
    base: float

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Trees:
        """Return the trees of a file: its ``asked``, ``limits``, ``leaves`` in ``unit``, and ``base``."""
        import numpy as np

        asked = np.array(found["asked"], np.intp)
        leaves = np.array(found["leaves"], np.float32) * np.float32(found["unit"])
        limits = np.array(found["limits"], np.float32)
        return cls(asked, limits, leaves, len(asked), found["base"])

    def __len__(self) -> int:
        return len(self.leaves)

    def sums(self, features: Array, first: int = 0, last: int | None = None) -> Array:
        """Return the sum of some trees, all by default, for each column of ``features``; without ``base``."""
        import numpy as np

        last = len(self) if last is None else last
        trees = last - first
        asked, limits = self.asked[:, first:last].ravel(), self.limits[:, first:last].reshape(-1, 1)
        answers = (features.take(asked, 0) > limits).view(np.uint8).reshape(self.depth, -1)
        numbers = answers[-1].copy()
        for answer in answers[-2::-1]:
            numbers += numbers
            numbers += answer
        leaf = numbers.reshape(trees, -1) + np.arange(0, trees << self.depth, 1 << self.depth)[:, None]
        found: Array = self.leaves[first:last].ravel().take(leaf).sum(0)
        return found
