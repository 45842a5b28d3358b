"""Which configs become finalists, and which of them wins: the cheapest, ties by a fixed preference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from cutegen.errors import MeasureError
from cutegen.families.registry import SOURCES, space_of
from cutegen.measure.context import DEFAULT_CONTEXT, OVERLAPPING
from cutegen.measure.policy import Policy
from cutegen.measure.statistics import Interval, choose, tied
from cutegen.measure.timing import Timing, against
from cutegen.measure.winner import choose_fastest
from cutegen.search.twins import overlaps_unlike
from cutegen.space import Config, Space

__all__ = ["Choice", "choose_winner", "comparable_us", "pick_finalists", "preference"]


@dataclass(frozen=True)
class Choice:
    """The decision between finalists.

    Attributes:
        config: The config to use.
        baseline_wins: Whether the baseline costs less than it, outside the margin.
        equals: Every config that is statistically tied for fastest, in order of preference.
    """

    config: Config
    baseline_wins: bool
    equals: tuple[Config, ...]


def preference(
    space: Space, default: Config, incumbent: Config | None
) -> Callable[[Config], tuple[bool, bool, int, tuple[int, ...]]]:
    """Return the sort key for ties: the default, the incumbent, cutegen's own kernels, the simpler config."""

    def key(config: Config) -> tuple[bool, bool, int, tuple[int, ...]]:
        own = space_of(config, space.family, space.arch)
        return config != default, config != incumbent, SOURCES.index(config.source), own.simplicity(config)

    return key


def choose_winner(
    space: Space,
    timings: Mapping[Config, Timing],
    *,
    default: Config,
    incumbent: Config | None = None,
    objective: str = "time",
    context: str = DEFAULT_CONTEXT,
    torch: Timing | None = None,
) -> Choice:
    """Return the choice among ``timings``, which were measured together.

    The one that costs least wins unless others are tied with it. Among those the default comes first, since
    an entry must beat it to be worth having; then the config that the table already names, so that tuning
    again does not flip between equals; then cutegen's own kernels, and of one source the simpler one. Where
    several were timed in bursts or back to back as well, one that loses less there may win although it is
    slower when settled: see :func:`~cutegen.measure.statistics.choose_in_all`. What overlap saves back to
    back counts only where the default overlaps, or launches around do: else it is another kernel that comes
    before. On an H200, three of four norms that had won by it were slower than the default behind another
    kernel, by 0.7 to 6.3 % (docs/results/rmsnorm.json, rmsnorm_quantized.json).

    Args:
        space: Of the family's general algorithm.
        timings: Settled timings, at least one.
        default: What is used without a table.
        incumbent: What the table names now.
        objective: What counts as cost: one of :data:`~cutegen.measure.policy.OBJECTIVES`. Configs whose
            energy could not be read do not compete for objectives that need it.
        context: What ran before each launch.
        torch: The baseline's timing in the same run.

    Raises:
        MeasureError: ``timings`` is empty, or the energy of none of them is known.
    """

    ordered = sorted(timings, key=preference(space, default, incumbent))
    by_name = {config.digest: config for config in ordered}
    known = {name: timings[config].cost(objective) for name, config in by_name.items()}
    costs = {name: cost for name, cost in known.items() if cost is not None}
    if timings and not costs:
        raise MeasureError(
            f"objective {objective} needs energy, but this GPU's energy counter cannot be read or does not "
            "change; valid here: time"
        )
    if objective == "time":
        overlapping = [n for n, config in by_name.items() if overlaps_unlike(config, default)]
        apart = overlapping if context != OVERLAPPING else []
        name, names = choose_fastest({n: timings[c] for n, c in by_name.items()}, list(by_name), apart)
    else:
        # Two measurements of energy do not say how well their mean is known: if unsure, the default is safe.
        name, names = choose(costs, list(by_name), excuse=math.inf)
    winner = by_name[name]
    ratio = against(torch, timings[winner], objective)
    return Choice(winner, _baseline_wins(ratio), tuple(by_name[n] for n in names))


def _baseline_wins(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.mid < 1 and not tied(ratio, Interval(1.0, 1.0, 1.0))


def pick_finalists(
    times_us: Mapping[Config, float],
    limit: int,
    band: float,
    always: Sequence[Config],
    *,
    kernel_of: Callable[[Config], Hashable] = lambda config: config,
    alike: int = 1,
) -> tuple[Config, ...]:
    """Return the configs to measure in the finals: ``always``, then the fastest within ``band`` of the best.

    Args:
        times_us: Screened microseconds, drift removed.
        limit: Most configs beside ``always``.
        band: Fraction above the best that may still turn out to win.
        always: Configs that compete whatever their time, if they have one.
        kernel_of: Names the compiled kernel of a config.
        alike: Most configs of one kernel, so that its variants do not crowd out other kernels.
    """
    if not times_us:
        return ()
    worst = min(times_us.values()) * (1 + band)
    fast = sorted((time, config.digest, config) for config, time in times_us.items() if time <= worst)
    chosen = [config for config in always if config in times_us]
    seen = Counter(kernel_of(config) for config in chosen)
    for _, _, config in fast:
        kernel = kernel_of(config)
        if len(chosen) < limit + len(always) and config not in chosen and seen[kernel] < alike:
            seen[kernel] += 1
            chosen.append(config)
    return tuple(dict.fromkeys(chosen))


def comparable_us(timing: Timing | None, policy: Policy) -> float:
    """Return a time that can be compared between groups of candidates that were screened one after another.

    Bursts run at the highest clock, so their microseconds compare as they are. Under load the clock differs
    between groups, so the result is the ratio to the baseline of the same group, in parts per million. In
    bursts the baseline is the worse yardstick: on an H200 it took 56.3 us in one group and 60.9 us in another
    for the same 16x28672x4096, while the times of candidates agreed.
    """
    assert timing is not None
    if policy.clock == "burst" or not timing.ratio:
        return timing.paired.mid
    return 1e6 / timing.ratio
