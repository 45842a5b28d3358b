"""Fits boosted trees of the form of :class:`~cutegen.families.gemm.perf_model.trees.Trees` to measured times.

Each tree is oblivious: it asks the same questions of every row, so a question is chosen by what it gains over
all of the tree's leaves together. Features are compared with a few borders each. numpy alone does it: where
times are measured there need be nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegen.families.gemm.perf_model.trees import Trees

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Doubles = NDArray[numpy.float64]

__all__ = ["Boosting"]


@dataclass(frozen=True)
class Boosting:
    """How trees are fitted.

    Attributes:
        trees: How many.
        depth: Questions of each.
        rate: Share of what a tree would correct that it does correct.
        hold: Weight of a pretended row in each leaf that is right already, which keeps small leaves small.
        borders: Most borders of a feature.
        asked: Part of the features, drawn anew for each tree, that it may ask about.
        sampled: Part of the points, likewise, that decide its questions.
        seed: Of these draws.
    """

    trees: int
    depth: int
    rate: float
    hold: float = 3.0
    borders: int = 64
    asked: float = 1.0
    sampled: float = 1.0
    seed: int = 0

    def fit(self, features: Doubles, wanted: Doubles, weight: Doubles | None = None) -> Trees:
        """Return trees whose sum is near ``wanted``.

        Args:
            features: One row for each point.
            wanted: What the trees should say of each.
            weight: How much each point counts; all the same by default.
        """
        import numpy as np

        weight = np.ones(len(wanted)) if weight is None else weight / weight.mean()
        borders = [self._borders(column) for column in features.T]
        bins = np.stack([np.searchsorted(b, column) for b, column in zip(borders, features.T, strict=True)])
        base = float((wanted * weight).sum() / weight.sum())
        left = wanted - base
        found = []
        chance = np.random.default_rng(self.seed)
        for _ in range(self.trees):
            known = [
                each if drawn else each[:0]
                for each, drawn in zip(borders, chance.random(len(borders)) < self.asked, strict=True)
            ]
            counted = weight * (chance.random(len(weight)) < self.sampled)
            questions, leaf = self._grow(bins, known, left, counted)
            count = 1 << self.depth
            sums = np.bincount(leaf, weight * left, count)
            leaves = self.rate * sums / (np.bincount(leaf, weight, count) + self.hold)
            left = left - leaves[leaf]
            found.append((questions, leaves))
        asked = np.array([[q[0] for q in questions] for questions, _ in found], np.intp).T
        limits = np.array([[q[1] for q in questions] for questions, _ in found], np.float32).T
        return Trees(asked, limits, np.array([leaves for _, leaves in found], np.float32), self.depth, base)

    def left_out(
        self, features: Doubles, wanted: Doubles, weight: Doubles | None, fold: NDArray[numpy.intp]
    ) -> Doubles:
        """Return what trees say of each point that have not seen its fold; 0 where there is no other fold."""
        import numpy as np

        found = np.zeros(len(wanted))
        for number in range(int(fold.max()) + 1):
            there = fold == number
            if there.any() and not there.all():
                trees = self.fit(features[~there], wanted[~there], None if weight is None else weight[~there])
                rows = np.ascontiguousarray(features[there].T.astype(np.float32))
                found[there] = trees.sums(rows) + trees.base
        return found

    def _borders(self, column: Doubles) -> Doubles:
        """Return where a feature may be cut: between its values, in about equal numbers of points."""
        import numpy as np

        values, counts = np.unique(column, return_counts=True)
        middles = (values[1:] + values[:-1]) / 2
        if len(middles) <= self.borders:
            return np.asarray(middles)
        below = np.cumsum(counts)[:-1]
        places = np.searchsorted(below, len(column) * np.arange(1, self.borders + 1) / (self.borders + 1))
        return np.asarray(middles[np.unique(np.minimum(places, len(middles) - 1))])

    def _grow(
        self, bins: NDArray[numpy.intp], borders: list[Doubles], left: Doubles, weight: Doubles
    ) -> tuple[list[tuple[int, float]], NDArray[numpy.intp]]:
        """Return the questions of one tree, feature and limit, and the leaf of each point."""
        import numpy as np

        leaf = np.zeros(len(left), np.intp)
        pull, questions = weight * left, []
        for depth in range(self.depth):
            best, question = -1.0, (0, 0)
            for feature, own in enumerate(borders):
                if not len(own):
                    continue
                width = len(own) + 1
                at = leaf * width + bins[feature]
                shape = (1 << depth, width)
                sums = np.bincount(at, pull, shape[0] * width).reshape(shape).cumsum(1)
                mass = np.bincount(at, weight, shape[0] * width).reshape(shape).cumsum(1)
                low, low_mass = sums[:, :-1], mass[:, :-1]
                high, high_mass = sums[:, -1:] - low, mass[:, -1:] - low_mass
                gains = (low**2 / (low_mass + self.hold) + high**2 / (high_mass + self.hold)).sum(0)
                place = int(gains.argmax())
                if gains[place] > best:
                    best, question = float(gains[place]), (feature, place)
            feature, place = question
            limit = float(borders[feature][place]) if len(borders[feature]) else np.inf
            questions.append((feature, limit))
            leaf |= (bins[feature] > place).astype(np.intp) << depth
        return questions, leaf
