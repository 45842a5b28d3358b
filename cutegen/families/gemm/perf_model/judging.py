"""How well predictions choose: by the regret of the choice on matrices left out, never by errors of times."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cutegen.families.gemm.problem import Problem

    Doubles = NDArray[numpy.float64]
    Places = NDArray[numpy.intp]

__all__ = [
    "FOLDS",
    "behind_best",
    "choices",
    "folds",
    "matrices",
    "nearness",
    "numbered",
    "regret",
    "regrets",
]

#: Parts of the matrices of which each is left out once.
FOLDS = 5
#: What is this much slower than the best counts 1/e of it: nobody chooses it.
_FAR = 0.25


def behind_best(shape: Places, us: Doubles) -> Doubles:
    """Return each time over the best of its shape, which is given by number."""
    import numpy as np

    best = np.full(int(shape.max()) + 1, np.inf)
    np.minimum.at(best, shape, us)
    return np.asarray(us / best[shape])


def nearness(behind: Doubles) -> Doubles:
    """Return how much points count in a fit: those that are near the best of their shape, most."""
    import numpy as np

    return np.asarray(np.exp(-(behind - 1) / _FAR) + 0.03)


def numbered(keys: Iterable[Hashable]) -> Places:
    """Return the number of each key: equal keys have the same, in the order in which they come first."""
    import numpy as np

    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.intp)


def matrices(problems: Iterable[Problem]) -> Places:
    """Return the number of the (n, k) of each problem."""
    return numbered((problem.n, problem.k) for problem in problems)


def folds(matrices: Places) -> Places:
    """Return which fold leaves each point out; all points of an (n, k), given by number, go together."""
    import numpy as np

    order = np.random.default_rng(0).permutation(int(matrices.max()) + 1)
    return np.asarray(order[matrices] % FOLDS)


def choices(shape: Places, predicted: Doubles) -> list[Places]:
    """Return the places of the points of each shape, in predicted order."""
    import numpy as np

    order = np.lexsort((predicted, shape))
    starts = np.flatnonzero(np.diff(shape[order], prepend=-1))
    return np.split(order, starts[1:])


def regrets(shape: Places, us: Doubles, predicted: Doubles) -> Doubles:
    """Return a row for each shape: how far behind the best of its points the choice is.

    The columns are the first choice, the best of the first three and the best of the first eight.
    """
    import numpy as np

    times = [us[places] for places in choices(shape, predicted)]
    return np.array([[t[:count].min() / t.min() for count in (1, 3, 8)] for t in times])


def regret(found: Doubles) -> dict[str, float]:
    """Return what :func:`regrets` come to: geometric means less one, and the tail of the first choice."""
    import numpy as np

    first, three, eight = np.exp(np.log(found).mean(0)) - 1
    tenth, worst = np.quantile(found[:, 0], 0.9) - 1, found[:, 0].max() - 1
    named = {"first": first, "best_of_3": three, "best_of_8": eight}
    named |= {"first_tenth": tenth, "first_worst": worst}
    return {name: round(float(value), 4) for name, value in named.items()}
