"""Which sizes of a range to measure, which configs there, and which config answers each size in the end."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log, log2

from cutegen.families.ranges import Range
from cutegen.search.range_model import Estimates
from cutegen.space import Config

__all__ = [
    "Cell",
    "cells_of",
    "contenders",
    "few_configs",
    "first_sizes",
    "most_disputed",
    "most_doubtful",
    "ready_first",
    "settle",
    "shortlist",
]

#: Tiles along a size come in steps of so many. Source: the N of an MMA instruction of Hopper and Blackwell.
_STEP = 8
#: Cells of a doubling, where steps would be more.
_CELLS = 64
#: What stands for a cell is so much smaller than its last size, which is a multiple of a power of two.
#: Libraries have kernels that only such sizes use. Source: on an H200 ``torch.mm`` took 17.2 us for
#: 208x5632x3072, and 13.8 to 14.1 us for 212 and 213 rows (docs/results/middle_kernels.json.xz).
_ASIDE = 3
#: A config is worth a place among the answers if it shortens them by this fraction in the geometric mean, or
#: one of them by the second. Source: judgement; on simulated GPUs answers take 0.05 % longer with 0.1 % and
#: 2 %.
_WORTH, _WORTH_ONCE = 0.0002, 0.005
#: By how much a prediction is off, and how much slower than the best it is to have no kernel at all, both as
#: logarithms. Source: the fit to a sweep of an H200, on (n, k) and kernels that were left out.
_ERROR, _NOTHING = 0.03, 0.3
#: What a cell that nothing answers costs more than the best, as a logarithm: more than any config.
_UNANSWERED = 10.0
#: A second config of a kernel is tried where it is ahead of other kernels by this fraction: the model hardly
#: sees what it differs in.
_ALIKE = 0.06
#: An answer goes on into the next cell if it is at most this fraction slower there than the best.
_KEEP = 0.005


@dataclass(frozen=True)
class Cell:
    """Neighbouring sizes that are taken to have one answer.

    Attributes:
        first: The smallest.
        size: Stands for all: with the largest tiles that any of them needs, and not of special divisibility.
        last: The largest that the layout allows.
        weight: Doublings that it spans.
    """

    first: int
    size: int
    last: int
    weight: float


def cells_of(whole: Range) -> tuple[Cell, ...]:
    """Return the cells of a range, the smallest first."""
    ends = [value for value in (1, 2, 4) if whole.first <= value < whole.last]
    value = _STEP
    while value < whole.last:
        ends += [value] if value >= whole.first else []
        value += max(_STEP, (1 << value.bit_length() - 1) // _CELLS)
    found: list[Cell] = []
    first = whole.first
    for end in [*ends, whole.last]:
        problem = whole.at_most(end)
        last = 0 if problem is None else problem.sizes[whole.size]
        if last >= first:
            found.append(Cell(first, _standing_for(whole, first, last), last, log2((last + 1) / first)))
            first = last + 1
    return tuple(found)


def _standing_for(whole: Range, first: int, last: int) -> int:
    """Return which size of a cell is measured; the end of the range stands for itself."""
    aside = last - _ASIDE
    return last if last == whole.last or aside < first or whole.at(aside) is None else aside


def first_sizes(cells: Sequence[Cell], count: int) -> list[int]:
    """Return about ``count`` sizes at even distances in doublings, at most one a cell, both ends included."""
    sizes = [cell.size for cell in cells]
    if count >= len(sizes):
        return sizes
    closest, widest = 0.0, log2(sizes[-1] / sizes[0])
    for _ in range(40):
        step = (closest + widest) / 2
        closest, widest = (step, widest) if len(_apart(sizes, step)) > count else (closest, step)
    return _apart(sizes, widest)


def _apart(sizes: Sequence[int], step: float) -> list[int]:
    chosen = [sizes[0]]
    for size in sizes[1:-1]:
        if log2(size / chosen[-1]) >= step and log2(sizes[-1] / size) >= step / 2:
            chosen.append(size)
    return [*chosen, sizes[-1]]


def ready_first(sizes: Sequence[int], is_ready: Callable[[int], bool], ahead: int) -> Iterator[int]:
    """Yield ``sizes`` in their order, but of the next ``ahead`` the first that is ready, if one is."""
    left = list(sizes)
    while left:
        size = next(filter(is_ready, left[:ahead]), left[0])
        left.remove(size)
        yield size


def shortlist(
    times: Mapping[int, Mapping[Config, float]], limit: int, chosen: Collection[Config] = ()
) -> list[Config]:
    """Return the kernels to compile: at most ``limit``, that leave at all sizes the best choice.

    The first of them are worth most.

    A choice of several that are predicted to be about as fast is better than one, since predictions are off
    by :data:`_ERROR`: what counts at a size is the fastest to be expected of those chosen.

    Args:
        times: Predicted microseconds of promising kernels at some sizes.
        limit: Most kernels, beside those that are chosen already.
        chosen: These.
    """
    import numpy as np

    kernels = sorted({kernel for found in times.values() for kernel in found}, key=lambda each: each.digest)
    place = {kernel: at for at, kernel in enumerate(kernels)}
    likely = np.zeros((len(kernels), len(times)))
    for at, found in enumerate(times.values()):
        best = min(found.values(), default=1.0)
        for kernel, took in found.items():
            likely[place[kernel], at] = (best / took) ** (1 / _ERROR)
    taken = [place[kernel] for kernel in chosen if kernel in place]
    had = np.full(len(times), exp(-_NOTHING / _ERROR)) + likely[taken].sum(0)
    added: list[int] = []
    for _ in range(min(limit, len(kernels) - len(taken))):
        gains = np.log1p(likely / had).sum(1)
        gains[taken + added] = -1.0
        added.append(int(gains.argmax()))
        had += likely[added[-1]]
    return [kernels[at] for at in added]


def contenders(
    estimates: Estimates,
    size: int,
    configs: Iterable[Config],
    count: int,
    *,
    kernel_of: Callable[[Config], Config],
    alike: int = 2,
    is_proven: Callable[[Config], bool] = lambda config: True,
) -> list[Config]:
    """Return the configs to measure at ``size``: those that may be fastest there, few of one kernel.

    Half of them are of proven kernels, if there are so many: many others look fast because predictions of
    them are further off.

    Args:
        estimates: What is known.
        size: Where.
        configs: Which there are; of equally promising ones of a kernel the first is taken.
        count: Most of them.
        kernel_of: Names the compiled kernel of a config.
        alike: Most configs of one kernel.
        is_proven: Whether predictions of a config are as good as any.
    """
    found = ((estimates.estimate(size, config), config) for config in configs)
    hoped = {config: each.hopeful_us for each, config in found if each is not None}
    seen: Counter[Config] = Counter()
    order: dict[Config, float] = {}
    for config in sorted(hoped, key=hoped.__getitem__):
        kernel = kernel_of(config)
        if seen[kernel] < alike:
            order[config] = hoped[config] * (1 + _ALIKE * seen[kernel])
            seen[kernel] += 1
    few = sorted(order, key=order.__getitem__)
    kept = set([config for config in few if is_proven(config)][: -(-count // 2)])
    others = [config for config in few if config not in kept][: count - len(kept)]
    return sorted([*kept, *others], key=order.__getitem__)


def most_doubtful(
    estimates: Estimates, cells: Sequence[Cell], configs: Callable[[int], Iterable[Config]], count: int
) -> list[int]:
    """Return up to ``count`` sizes at which a measurement may help most.

    That is where the cautious choice may be furthest behind the hopeful one, times how far its neighbours
    are. Between two measured sizes the middle stands for all.

    Args:
        estimates: What is known.
        cells: Of the range.
        configs: Those that may answer a size.
        count: Most sizes.
    """
    scores: list[tuple[float, int]] = []
    for below, above, middle in _gaps(sorted(estimates.measured), [cell.size for cell in cells]):
        found = [each for c in configs(middle) if (each := estimates.estimate(middle, c)) is not None]
        if found:
            worst = min(each.cautious_us for each in found) / min(each.hopeful_us for each in found)
            scores.append((log(worst) * log2(above / below), middle))
    return [size for _, size in sorted(scores, reverse=True)[:count]]


def most_disputed(ratios: Mapping[int, float], cells: Sequence[Cell], level: float, count: int) -> list[int]:
    """Return up to ``count`` sizes between two of which one is to be left to the baseline and one is not.

    Those first between which ratios change most, times how far the two are apart.

    Args:
        ratios: The baseline's time over the best measured one, by size.
        cells: Of the range.
        level: From this ratio on a size is not left to the baseline.
        count: Most sizes.
    """
    scores = [
        (abs(log(ratios[above] / ratios[below])) * log2(above / below), middle)
        for below, above, middle in _gaps(sorted(ratios), [cell.size for cell in cells])
        if (ratios[below] < level) != (ratios[above] < level)
    ]
    return [size for _, size in sorted(scores, reverse=True)[:count]]


def _gaps(measured: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each two measured sizes that follow one another with others between, and the middle of these."""
    for below, above in pairwise(measured):
        between = sizes[bisect_left(sizes, below + 1) : bisect_left(sizes, above)]
        if between:
            middle = min(between, key=lambda size: abs(log(size * size / (below * above))))
            yield below, above, middle


def few_configs(times: Sequence[Mapping[Config, float]], weights: Sequence[float]) -> list[Config]:
    """Return few configs that between them are about as fast as all: each is worth its place.

    Args:
        times: Microseconds of configs in each cell.
        weights: Of the cells.
    """
    costs: dict[Config, list[tuple[int, float]]] = {}
    for at, cell in enumerate(times):
        for config, took in cell.items():
            costs.setdefault(config, []).append((at, log(took)))
    now = [log(min(cell.values())) + _UNANSWERED for cell in times]
    chosen: list[Config] = []

    def worth(config: Config) -> tuple[float, float]:
        gains = [(weights[at], now[at] - cost) for at, cost in costs[config] if cost < now[at]]
        return sum(weight * gain for weight, gain in gains), max((gain for _, gain in gains), default=0.0)

    while costs:
        found = {config: worth(config) for config in costs}
        config = max(found, key=lambda c: found[c][0])
        if found[config][0] < _WORTH * sum(weights):
            config = max(found, key=lambda c: found[c][1])
            if found[config][1] < _WORTH_ONCE:
                break
        chosen.append(config)
        for at, cost in costs.pop(config):
            now[at] = min(now[at], cost)
    return chosen


def settle(times: Sequence[Mapping[Config, float]]) -> list[Config]:
    """Return which config answers each cell: the fastest, or the one before where it is about as fast."""
    found: list[Config] = []
    for cell in times:
        best = min(cell, key=cell.__getitem__)
        before = found[-1] if found else best
        stays = cell.get(before, inf) <= cell[best] * (1 + _KEEP)
        found.append(before if stays else best)
    return found
