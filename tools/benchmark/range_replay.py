"""A range of m, replayed on a recorded sweep: what is measured of each second size, what answers the others.

The sizes of a sweep are about a doubling apart, and those of a tuned range a tenth of that: what lies between
is judged harder here than by ``tools/check_range.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from cutegen.arch import find_arch
from cutegen.families.registry import find_space
from cutegen.measure.statistics import geometric_mean
from cutegen.search.defaults import strategy_of
from cutegen.search.range_model import Estimates
from cutegen.search.range_plan import contenders
from cutegen.search.range_predict import unproven
from cutegen.space import Config

__all__ = ["COUNTS", "Recorded", "range_regret"]

#: Contenders at a size.
COUNTS = (4, 8, 14)
#: Sizes that a matrix needs to be replayed as a range.
_SIZES = 6


@dataclass(frozen=True)
class Recorded:
    """A config that was timed on a shape.

    Attributes:
        config: Which.
        us: Microseconds that it took.
        predicted: By the model.
        proven: Whether it is a default candidate.
    """

    config: Config
    us: float
    predicted: float
    proven: bool


#: What was recorded of one (n, k), by m.
Matrix = Mapping[int, Sequence[Recorded]]


def range_regret(matrices: Sequence[Matrix]) -> dict[str, dict[str, float]]:
    """Return how far a range is behind the best timed, by number of contenders at a size.

    Returns:
        ``measured``: the best of the contenders at measured sizes; ``between``: the answers at the others;
        both as geometric means less one; and the worst of each. Nothing if no matrix has enough sizes.
    """
    long = [matrix for matrix in matrices if len(matrix) >= _SIZES]
    if not long:
        return {}
    return {str(count): _summary([_replayed(matrix, count) for matrix in long]) for count in COUNTS}


def _summary(found: Sequence[tuple[list[float], list[float]]]) -> dict[str, float]:
    measured = [one for regrets, _ in found for one in regrets]
    between = [one for _, regrets in found for one in regrets]
    return {
        "measured": round(geometric_mean(measured) - 1, 4),
        "measured_worst": round(max(measured) - 1, 4),
        "between": round(geometric_mean(between) - 1, 4),
        "between_worst": round(max(between) - 1, 4),
    }


def _replayed(matrix: Matrix, count: int) -> tuple[list[float], list[float]]:
    """Return times over the best: of the best contender at each second size, of the answer at the others."""
    space = find_space("gemm", find_arch("sm_90a"))
    known = {m: {each.config: each for each in found} for m, found in matrix.items()}
    proven = {each.config for found in matrix.values() for each in found if each.proven}
    configs = dict.fromkeys(config for found in known.values() for config in found)

    def predict(m: int, config: Config) -> float | None:
        found = known[m].get(config)
        return None if found is None else found.predicted * (1.0 if found.proven else exp(unproven(m)))

    strategy = strategy_of(space)
    assert strategy is not None
    estimates = Estimates(predict, lambda config: strategy.tile(config, "m"))
    sizes, measured = sorted(known), []
    for m in sizes[::2]:
        tried = contenders(
            estimates, m, configs, count, kernel_of=space.compile_view, is_proven=proven.__contains__
        )
        times = {config: known[m][config].us for config in tried}
        estimates.learn(m, times)
        measured.append(min(times.values()) / _best(matrix[m]))
    return measured, list(_between(estimates, sizes[1::2], known, matrix))


def _between(
    estimates: Estimates,
    sizes: Sequence[int],
    known: Mapping[int, Mapping[Config, Recorded]],
    matrix: Matrix,
) -> Iterator[float]:
    for m in sizes:
        found = {c: each for c in known[m] if (each := estimates.estimate(m, c)) is not None}
        answer = min(found, key=lambda c: log(found[c].cautious_us))
        yield known[m][answer].us / _best(matrix[m])


def _best(found: Sequence[Recorded]) -> float:
    return min(each.us for each in found)
