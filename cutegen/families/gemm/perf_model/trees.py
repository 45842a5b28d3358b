"""Boosted trees in arrays: corrections of a rough estimate, for many rows at once.

Trees are oblivious: each asks the same few questions of every row, whose answers number its leaf.
``tools/fit_gemm.py`` and ``tools/fit_torch_mm.py`` fit them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float32]

__all__ = ["Trees"]

#: What a leaf is a multiple of in a file, and more than any feature is.
_UNIT, _NEVER = 1e-5, 1e30
#: Questions of a tree whose answers fit a byte.
_MOST_DEPTH = 8
#: What all trees together may add to a logarithm. Source: those that the package ships add 4.9 at most; the
#: exponential of this is still a finite time in single precision.
_MOST_ADDED = 60.0
#: Parts of a model that are remembered, and the most columns that they are written out for: programs ask
#: again and again for a few of them, tools for many sizes of sets.
_MOST_PARTS, _WIDE = 16, 128
#: Columns that are few for numpy's sums.
_SHORT = 32


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
    _parts: dict[tuple[int, int, int], _Part] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, found: Mapping[str, Any], features: int, least: int = 1) -> Trees:
        """Return the trees of a file: its ``asked``, ``limits``, ``leaves`` in ``unit``, and ``base``.

        Whatever a file says, sums of the trees stay within their arrays and are finite.

        Args:
            found: What the file says.
            features: So many features there are to ask about.
            least: Fewest trees.

        Raises:
            LookupError: One of these is missing.
            OverflowError: A number is too large.
            TypeError: Something else stands where numbers should.
            ValueError: They do not fit each other.
        """
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            asked = np.array(found["asked"], np.intp)
            leaves = np.array(found["leaves"], np.float32) * np.float32(float(found["unit"]))
            limits = np.array(found["limits"], np.float32)
        base = float(found["base"])
        fits = asked.ndim == 2 and limits.shape == asked.shape and 1 <= len(asked) <= _MOST_DEPTH
        if not fits or leaves.shape != (asked.shape[1], 1 << len(asked)):
            raise ValueError(
                f"trees of {asked.shape}, {limits.shape} and {leaves.shape} do not fit each other"
            )
        if len(leaves) < least:
            raise ValueError(f"{len(leaves)} trees; valid: {least} and more")
        if not 0 <= asked.min(initial=0) <= asked.max(initial=0) < features:
            raise ValueError(f"trees ask about features that there are not; valid: 0 to {features - 1}")
        if not np.isfinite(limits).all():
            raise ValueError("limits are larger than single precision holds")
        added = abs(base) + float(abs(leaves).max(1).sum())
        if not added <= _MOST_ADDED:
            raise ValueError(f"trees that add up to {added:g} to a logarithm; valid: {_MOST_ADDED:g} at most")
        return cls(asked, limits, leaves, len(asked), base)

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`of` reads: leaves as integers, each rounded to a hundred-thousandth."""
        return {
            "unit": _UNIT,
            "base": round(self.base, 6),
            "asked": self.asked.tolist(),
            "limits": [[float(f"{limit:.7g}") for limit in row] for row in self.limits.tolist()],
            "leaves": [[round(leaf / _UNIT) for leaf in row] for row in self.leaves.tolist()],
        }

    def joined(self, others: Trees) -> Trees:
        """Return trees whose sum is that of both."""
        import numpy as np

        depth = max(self.depth, others.depth)
        parts = [trees._deepened(depth) for trees in (self, others)]
        return Trees(
            np.concatenate([part.asked for part in parts], 1),
            np.concatenate([part.limits for part in parts], 1),
            np.concatenate([part.leaves for part in parts]),
            depth,
            self.base + others.base,
        )

    def scaled(self, factor: float) -> Trees:
        """Return trees whose sum is ``factor`` times that of these."""
        import numpy as np

        return Trees(
            self.asked, self.limits, self.leaves * np.float32(factor), self.depth, self.base * factor
        )

    def _deepened(self, depth: int) -> Trees:
        """Return the same trees with further questions, whose answers are always no."""
        import numpy as np

        more = depth - self.depth
        asked = np.pad(self.asked, ((0, more), (0, 0)))
        limits = np.pad(self.limits, ((0, more), (0, 0)), constant_values=_NEVER)
        leaves = np.pad(self.leaves, ((0, 0), (0, (1 << depth) - (1 << self.depth))))
        return Trees(asked, limits, leaves, depth, self.base)

    def __len__(self) -> int:
        return len(self.leaves)

    def sums(self, features: Array, first: int = 0, last: int | None = None) -> Array:
        """Return the sum of some trees, all by default, for each column of ``features``; without ``base``."""
        import numpy as np

        columns = features.shape[1]
        part = self._part(first, len(self) if last is None else last, columns)
        answers = (features.take(part.asked, 0) > part.limits).view(np.uint8).reshape(self.depth, -1)
        answers *= part.places
        numbers = np.bitwise_or.reduce(answers, 0).reshape(-1, columns)
        leaves = part.leaves.take(numbers + part.starts)
        # All add tree after tree, as C does, which a sum of one column would not. einsum adds short rows
        # in less than half the time.
        if columns == 1:
            one: Array = np.add.accumulate(leaves, 0)[-1]
            return one
        found: Array = np.einsum("ij->j", leaves) if columns <= _SHORT else np.add.reduce(leaves, 0)
        return found

    def _part(self, first: int, last: int, columns: int) -> _Part:
        """Return some trees as arrays that fit so many columns; remembered, since calls ask for the same."""
        columns = columns if columns <= _WIDE else 1
        key = first, last, columns
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            found = self._parts[key] = _Part.of(self, first, last, columns)
        return found


class _Part(NamedTuple):
    """Some of the trees, as :meth:`Trees.sums` looks at them for a number of columns.

    Attributes:
        asked: Feature of each question: those of every tree's first question, and so on.
        limits: What it is compared with, once for each column, or only once where there are many.
        places: What a yes to each of a tree's questions adds to the number of its leaf.
        leaves: Of all trees, one behind the other.
        starts: Where those of each tree start, likewise.
    """

    asked: NDArray[numpy.intp]
    limits: Array
    places: NDArray[numpy.uint8]
    leaves: Array
    starts: NDArray[numpy.int32]

    @classmethod
    def of(cls, trees: Trees, first: int, last: int, columns: int) -> _Part:
        import numpy as np

        asked, limits = trees.asked[:, first:last].ravel(), trees.limits[:, first:last].ravel()
        starts = np.arange(0, (last - first) << trees.depth, 1 << trees.depth, dtype=np.int32)
        return cls(
            asked,
            np.repeat(limits[:, None], columns, 1),
            (1 << np.arange(trees.depth)).astype(np.uint8)[:, None],
            trees.leaves[first:last].ravel(),
            np.repeat(starts[:, None], columns, 1),
        )
