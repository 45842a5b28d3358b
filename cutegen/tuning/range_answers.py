"""From measurements at some sizes of a range to answers for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, log2

from cutegen.families.registry import find_family
from cutegen.family import Problem
from cutegen.measure.statistics import TIE_BAND, geometric_mean
from cutegen.measure.timing import Timing
from cutegen.records.range_entry import Piece, Point, Regret
from cutegen.search.interpolation import interpolated
from cutegen.search.range_model import Estimates
from cutegen.search.range_plan import Cell, few_configs, settle
from cutegen.space import Config

__all__ = [
    "Baseline",
    "KernelOf",
    "Measured",
    "answers",
    "best_ratios",
    "pieces",
    "points",
    "ratios",
    "regret_of",
    "rivals",
    "summary",
]

#: A size is answered by one of the fastest kernels of each of the nearest measured sizes: how many of both.
#: Each counts once, with its fastest config: else the orders of tiles of one or two kernels take all places.
#: Source: six runs of four matrices on an H200, each size from 257 on answered from the others: 1.6 % behind
#: the best of its contenders in the geometric mean, 1.9 % with the fastest six configs; less in each run. Of
#: eight sizes, since loaded ones are close to one another: on simulated GPUs answers for 1025 to 2048 rows
#: are 1.8 % behind the best of 120 kernels, and 2.2 % with four and twice the doubt of today.
_BEST, _NEAREST = 8, 8


#: By how much a lead over a library's call counts for less where the power limit may decide, and from how
#: many floating-point operations for each byte on it may. Source: 148 random sizes of three matrices in
#: five runs on an H200, from 129 rows on: the ratios at which one kernel and the call settled were 2 % under
#: the range's estimates up to 2000 rows, and 3 to 8 % beyond. With this, calls of each run would have been
#: as fast or faster in the geometric mean, and so would the slowest (docs/tuning.md, "Ranges").
#: So it is with leads of loaded sizes: on 8448x4352 and 10752x3840, 100 random sizes each, calls would have
#: been at 1.024 and 1.012 of it without this and at 1.026 and 1.012 with it, at worst at 0.915 and 0.891
#: without and at 1.000 and 0.975 with it.
_SUSTAINED, _INTENSITY = 1.05, 200
#: The same from which on a library's call is timed at many sizes: its kernels change from one to the next,
#: and with them its time by a tenth or more. Source: 5376x7424 on an H200, where ratios to it were 1.06 at
#: 207 rows, 0.94 at 209 and 1.14 at 226 (docs/results/range_check_5376x7424.json).
_UNEVEN = 100
#: Doublings over which an error of what is expected of the baseline fades. Source: the same five runs.
_BASELINE_REACH = 0.15


@dataclass(frozen=True)
class Baseline:
    """What is known of the baseline aside from measurements.

    Attributes:
        expected_us: Microseconds that it is expected to take at a size; None if nobody predicts them.
        problem_at: The problem of a size.
    """

    expected_us: Callable[[int], float | None]
    problem_at: Callable[[int], Problem]

    def is_uneven(self, size: int) -> bool:
        """Return whether it is a library's call at ``size``, and of a kind that changes between sizes."""
        return self._is_library_call(size, _UNEVEN)

    def doubt(self, size: int) -> float:
        """Return by which factor a lead over it at ``size`` is to be taken for less."""
        return _SUSTAINED if self._is_library_call(size, _INTENSITY) else 1.0

    def _is_library_call(self, size: int, intensity: float) -> bool:
        """Return whether it is one, with at least so many floating-point operations for each byte."""
        problem = self.problem_at(size)
        library = find_family(problem.family).is_library_call(problem)
        return library and problem.flops >= intensity * problem.min_bytes


@dataclass(frozen=True)
class Measured:
    """A measurement of a config at a size.

    Attributes:
        timing: Its timing.
        trial: Id of the recorded trial.
    """

    timing: Timing
    trial: str


#: Measurements by size, then by config.
Results = Mapping[int, Mapping[Config, Measured]]
#: The part of a config that is compiled in, which names its kernel.
KernelOf = Callable[[Config], Config]


def rivals(estimates: Estimates, size: int, kernel_of: KernelOf) -> list[Config]:
    """Return the configs that may answer ``size``: of the best kernels of the measured sizes around it."""
    near = sorted(estimates.measured, key=lambda other: (abs(log2(size / other)), other))[:_NEAREST]
    best = (_best(found, kernel_of) for found in map(estimates.measured.__getitem__, near))
    return list(dict.fromkeys(config for configs in best for config in configs))


def _best(times_us: Mapping[Config, float], kernel_of: KernelOf) -> list[Config]:
    """Return the fastest config of each of the fastest kernels."""
    fastest: dict[Config, Config] = {}
    for config in sorted(times_us, key=times_us.__getitem__):
        fastest.setdefault(kernel_of(config), config)
    return [*fastest.values()][:_BEST]


def answers(estimates: Estimates, cells: Sequence[Cell], kernel_of: KernelOf) -> list[Config | None]:
    """Return which config answers each cell; None where nothing that was measured is valid."""
    times: list[dict[Config, float]] = []
    anywhere = dict.fromkeys(config for found in estimates.measured.values() for config in found)
    for cell in cells:
        near = _cautious(estimates, cell.size, rivals(estimates, cell.size, kernel_of))
        times.append(near or _cautious(estimates, cell.size, anywhere))
    served = [(cell, known) for cell, known in zip(cells, times, strict=True) if known]
    few = set(few_configs([known for _, known in served], [cell.weight for cell, _ in served]))
    kept = [{config: us for config, us in known.items() if config in few} or known for _, known in served]
    chosen = iter(settle(kept))
    return [next(chosen) if known else None for known in times]


def _cautious(estimates: Estimates, size: int, configs: Iterable[Config]) -> dict[Config, float]:
    found = ((config, estimates.estimate(size, config)) for config in configs)
    return {config: each.cautious_us for config, each in found if each is not None}


def pieces(
    cells: Sequence[Cell],
    chosen: Sequence[Config],
    key_of: Callable[[Config], str],
    ratio_at: Callable[[int, Config], float | None],
    *,
    allow_torch: bool,
) -> tuple[Piece, ...]:
    """Return the pieces of a range: runs of neighbouring cells with the same answer.

    Cells where the baseline is faster are pieces of their own, so that calls can be left to it.

    Args:
        cells: Of the range.
        chosen: Which config answers each.
        key_of: Names the compiled kernel of a config.
        ratio_at: The baseline's time over that of a config at a size, measured or interpolated.
        allow_torch: Whether the baseline may be the answer.
    """
    found: list[tuple[Cell, Cell, Config, bool, list[float]]] = []
    for cell, config in zip(cells, chosen, strict=True):
        ratio = ratio_at(cell.size, config)
        loses = ratio is not None and ratio < 1 - TIE_BAND
        ratios = [] if ratio is None else [ratio]
        if found and found[-1][2:4] == (config, loses):
            first, _, _, _, before = found[-1]
            found[-1] = (first, cell, config, loses, before + ratios)
        else:
            found.append((cell, cell, config, loses, ratios))
    return tuple(
        Piece(
            first.first,
            last.last,
            config,
            "torch" if loses and allow_torch else config.source,
            key_of(config),
            round(geometric_mean(ratios), 4) if ratios else None,
        )
        for first, last, config, loses, ratios in found
    )


def ratios(
    results: Results,
    estimates: Estimates,
    baseline: Baseline,
    compared: Callable[[int], float | None] = lambda size: None,
) -> Callable[[int, Config], float | None]:
    """Return the baseline's time over a config's: measured, or with both times estimated.

    Where a library's call changes between sizes it is what was timed under load at many. Leads may count for
    less than they say, as :data:`_SUSTAINED` says.

    Args:
        results: What was measured.
        estimates: What configs take there and elsewhere.
        baseline: What is known of the baseline.
        compared: The ratio of a size's answer by what was timed under load; None where nothing was.
    """
    # Beside estimates only times count that are as long as these: under load all are longer.
    times = {size: estimates.measured[size][config] * ratio for size, config, ratio in _fastest(results)}
    sizes = sorted(times)

    def ratio_at(size: int, config: Config) -> float | None:
        doubt = baseline.doubt(size)
        near = compared(size) if baseline.is_uneven(size) else None
        if near is not None:
            return near / doubt
        known = results.get(size, {}).get(config)
        if known is not None and known.timing.ratio is not None:
            return known.timing.ratio / doubt
        own, other = estimates.estimate(size, config), _baseline_us(size, sizes, times, baseline)
        return None if own is None or other is None else other / own.time_us / doubt

    return ratio_at


def best_ratios(results: Results, baseline: Baseline) -> dict[int, float]:
    """Return the baseline's time over that of the fastest config, by measured size, where both are known.

    As :func:`ratios` has it.
    """
    return {size: ratio / baseline.doubt(size) for size, _, ratio in _fastest(results)}


def _fastest(results: Results) -> Iterator[tuple[int, Config, float]]:
    """Yield each size where the baseline was timed, the fastest config, and the baseline's time over its."""
    for size, found in results.items():
        config = min(found, key=lambda config: found[config].timing.paired.mid)
        ratio = found[config].timing.ratio
        if ratio is not None:
            yield size, config, ratio


def _baseline_us(
    size: int, sizes: Sequence[int], times_us: Mapping[int, float], baseline: Baseline
) -> float | None:
    """Return how fast the baseline may be: the less of its neighbours' times and of what is expected of it.

    A library changes its kernel between two sizes, and its time then goes up or down by a tenth. What is
    expected knows of some of these steps, mended by how far it is off nearby.
    """
    between = interpolated(size, sizes, times_us)
    expected = baseline.expected_us(size)
    if between is None or expected is None:
        return between
    errors, weights = 0.0, 0.0
    for other in sizes:
        there = baseline.expected_us(other)
        if there is not None:
            weight = exp(-abs(log2(size / other)) / _BASELINE_REACH)
            errors += weight * log(times_us[other] / there)
            weights += weight
    return min(between, expected * exp(errors / weights)) if weights else between


def points(
    results: Results,
    answer_at: Callable[[int], Config],
    regrets: Mapping[int, float],
    ratio_at: Callable[[int, Config], float | None],
) -> Iterator[Point]:
    """Yield the sizes at which the config that answers was measured, with the evidence.

    Args:
        results: What was measured.
        answer_at: The config that answers a size.
        regrets: Of the sizes that had no part in the choice.
        ratio_at: As :func:`pieces` has it.
    """
    for size in sorted(results):
        config = answer_at(size)
        found = results[size].get(config)
        if found is not None:
            yield Point(size, found.timing.median_us, ratio_at(size, config), regrets.get(size), found.trial)


def regret_of(times_us: Mapping[Config, float], config: Config) -> float:
    """Return how far ``config`` is behind the fastest of ``times_us``, as a fraction; infinite without it."""
    return times_us.get(config, inf) / min(times_us.values()) - 1


def summary(regrets: Mapping[int, float]) -> Regret | None:
    """Return mean and worst of the regrets; None if there are none."""
    if not regrets:
        return None
    mean = geometric_mean(1 + regret for regret in regrets.values()) - 1
    return Regret(round(mean, 5), round(max(regrets.values()), 5), len(regrets))
