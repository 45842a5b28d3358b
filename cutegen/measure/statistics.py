"""Statistics of timings: medians with intervals, paired ratios, ties, drift that entries share, choices."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from cutegen.errors import MeasureError

__all__ = [
    "BURST_BAND",
    "BURST_REACH",
    "CONTEXT_REACH",
    "LONG_US",
    "TIE_BAND",
    "Interval",
    "choose",
    "choose_in_all",
    "choose_in_both",
    "common_drift",
    "geometric_mean",
    "median",
    "median_interval",
    "ratio_interval",
    "steady_interval",
    "tied",
    "within",
]

#: Two medians this close, as a fraction, count as equal whatever their intervals are. Source: repeated tuning
#: of one shape on one GPU changed between configs that were up to 0.6 % apart.
TIE_BAND = 0.005
#: Where bursts decide as well, a settled time within this fraction of the smallest counts as no loss. Source:
#: the requirement that a winner lose in neither regime; bursts clock a third higher, and other tiles win.
BURST_BAND = 0.01
#: A config further behind than this when settled cannot win by its bursts. Source: 23 configs for each of six
#: GEMMs on an H200: the best when settled was 4 to 7 % behind in bursts on four, others 1 to 3 % in both.
BURST_REACH = 0.05
#: Where the fastest takes longer than this, in microseconds, when settled, losses in bursts count by so much
#: less: such launches are seldom alone, and two of them load the GPU for as long as a burst lasts. Source:
#: judgement; of a grouped GEMM of 4 ms on an H200 a config had won by its bursts that was 3.7 % behind the
#: default when settled (docs/results/grouped_gemm_standard.json).
LONG_US = 2000.0
#: A config further behind the winner than this, in the context that decides, cannot take its place for its
#: times back to back; one that is nearer must save more than half of it over both contexts. Source:
#: judgement; at 256x256x65536 on an H200 one 0.5 % behind the winner took 15 % less time back to back.
CONTEXT_REACH = 0.02


@dataclass(frozen=True)
class Interval:
    """A median and the confidence interval around it, in the unit of the samples."""

    low: float
    mid: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, as a fraction of the median."""
        return (self.high - self.low) / (2 * self.mid) if self.mid else math.inf

    def overlaps(self, other: Interval) -> bool:
        """Whether some value lies in both intervals."""
        return self.low <= other.high and other.low <= self.high


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive ``values``.

    Raises:
        MeasureError: There is no value, or one is not positive.
    """
    numbers = list(values)
    if not numbers or any(not x > 0 for x in numbers):
        raise MeasureError(f"geometric mean of {numbers!r} is undefined; it needs positive numbers")
    return math.exp(math.fsum(map(math.log, numbers)) / len(numbers))


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median of ``samples`` and its interval from order statistics.

    No shape of the distribution is assumed: the number of samples under the true median is binomial, which
    bounds it between two of the sorted samples. Under six samples 95 % cannot be had, and the whole range is
    returned instead.

    Raises:
        MeasureError: There is no sample.
    """
    if not samples:
        raise MeasureError("median of no samples is undefined")
    ordered = sorted(samples)
    rank = _lower_rank(len(ordered), confidence)
    return Interval(ordered[rank], median(ordered), ordered[-1 - rank])


def _lower_rank(count: int, confidence: float) -> int:
    """Return the largest index whose sample and its mirror enclose the median with ``confidence``."""
    tail, rank = 0.0, 0
    for index in range((count - 1) // 2 + 1):
        tail += math.comb(count, index) / 2**count
        if 1 - 2 * tail < confidence:
            break
        rank = index
    return rank


def ratio_interval(reference: Sequence[float], own: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median of ``reference[i] / own[i]`` with its interval: above 1 is faster than the reference.

    Pairs share a round, so clocks that drift from round to round cancel.

    Raises:
        MeasureError: The two differ in length, or are empty.
    """
    if len(reference) != len(own):
        raise MeasureError(f"{len(reference)} reference samples cannot pair with {len(own)}")
    return median_interval([ref / mine for ref, mine in zip(reference, own, strict=True)], confidence)


def tied(a: Interval, b: Interval, band: float = TIE_BAND) -> bool:
    """Return whether ``a`` and ``b`` cannot be told apart: intervals overlap, or medians within ``band``."""
    return a.overlaps(b) or abs(a.mid - b.mid) <= band * min(a.mid, b.mid)


def choose(
    times: Mapping[str, Interval],
    preference: Sequence[str],
    band: float = TIE_BAND,
    *,
    excuse: float = TIE_BAND,
) -> tuple[str, tuple[str, ...]]:
    """Return the winner and all that are statistically tied with it, both in the order of ``preference``.

    One time beats another if it is smaller and the two are not tied. The tied entries are those that no other
    beats; were it enough to be tied with the smallest median, one fast entry with a wide interval would admit
    slow ones. The winner is the first of the tied whose median is within ``excuse`` of the smallest among
    them. The result depends on the measurements and ``preference`` only, never on the order of ``times``.

    Args:
        times: What each costs.
        preference: All names, the one that wins ties first.
        band: Medians this close count as equal.
        excuse: The winner's median exceeds the smallest by no more than this fraction, however wide the
            intervals are: the median is still the best estimate. Source: finals of 30 shapes on an H200,
            where intervals alone had admitted winners up to 3 % slower.

    Raises:
        MeasureError: ``times`` is empty or ``preference`` lacks a name of it.
    """
    if not times:
        raise MeasureError("no timing to choose from")
    missing = sorted(set(times) - set(preference))
    if missing:
        raise MeasureError(f"preference does not rank {', '.join(missing)}")
    ranked = [name for name in preference if name in times]

    def beaten(own: Interval) -> bool:
        return any(other.mid < own.mid and not tied(other, own, band) for other in times.values())

    equals = tuple(name for name in ranked if not beaten(times[name]))
    enough = min(times[name].mid for name in equals) * (1 + excuse)
    return next(name for name in equals if times[name].mid <= enough), equals


def within(times: Mapping[str, Interval], band: float) -> tuple[str, ...]:
    """Return the names whose median is at most the fraction ``band`` above the smallest, fastest first."""
    ranked = sorted(times, key=lambda name: (times[name].mid, name))
    return tuple(name for name in ranked if times[name].mid <= times[ranked[0]].mid * (1 + band))


def choose_in_both(
    settled: Mapping[str, Interval],
    bursts: Mapping[str, Interval],
    preference: Sequence[str],
    keeping_up: Collection[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """Return the winner under settled clocks and in bursts, and all that are tied with it when settled.

    The loss of an entry is the larger of its two losses, each against the smallest time of the regime; within
    :data:`BURST_BAND` a settled time counts as no loss, and beyond :data:`LONG_US` one in bursts counts less.
    Entries within :data:`BURST_REACH` of the smallest settled time compete, and the one with the smallest
    loss wins. Of losses within :data:`TIE_BAND` the settled winner, as :func:`choose` finds it, comes first,
    then the smallest sum of both losses. If some entries keep up with the reference in both regimes, only
    these compete. An entry that was not timed in bursts wins only if none near it was.

    Args:
        settled: Times under settled clocks.
        bursts: Times in bursts, of the entries that were timed there.
        preference: All names, the one that wins ties first.
        keeping_up: Entries that lose little to the reference in both regimes.

    Raises:
        MeasureError: ``settled`` is empty or ``preference`` lacks a name of it.
    """
    name, equals = choose(settled, preference)
    rivals = [rival for rival in within(settled, BURST_REACH) if rival in bursts]
    if rivals:
        losses = _losses({rival: (settled[rival].mid, bursts[rival].mid) for rival in rivals})
        losses = {rival: losses[rival] for rival in rivals if rival in keeping_up} or losses
        enough = min(map(max, losses.values())) + TIE_BAND
        level = {rival: math.fsum(both) for rival, both in losses.items() if max(both) <= enough}
        if name not in level:
            least = min(level.values()) + TIE_BAND
            name = next(rival for rival in preference if level.get(rival, math.inf) <= least)
    return name, equals


def choose_in_all(
    settled: Mapping[str, Interval],
    bursts: Mapping[str, Interval],
    back_to_back: Mapping[str, Interval],
    preference: Sequence[str],
    keeping_up: Collection[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """Return the winner of :func:`choose_in_both`, or one near it that is faster back to back by more.

    An entry takes the winner's place if it is at most :data:`CONTEXT_REACH` behind it, settled and in bursts
    where there are any, keeps up with the reference if the winner does, and the fractions that it loses and
    saves come to a saving of more than half of that. Of such entries the one that saves most wins; of savings
    within :data:`TIE_BAND` the first in ``preference``.

    Args:
        settled: Times under settled clocks, in the context that decides.
        bursts: Times in bursts, of the entries that were timed there.
        back_to_back: Times of launches back to back, of the entries that were timed so.
        preference: All names, the one that wins ties first.
        keeping_up: Entries that lose little to the reference, settled and in bursts.

    Raises:
        MeasureError: ``settled`` is empty or ``preference`` lacks a name of it.
    """
    name, equals = choose_in_both(settled, bursts, preference, keeping_up)
    if name not in back_to_back:
        return name, equals
    regimes = [settled, bursts] if name in bursts else [settled]
    near = [
        {n for n, t in times.items() if t.mid <= times[name].mid * (1 + CONTEXT_REACH)} for times in regimes
    ]
    rivals = set(back_to_back).intersection(*near, *([keeping_up] if name in keeping_up else []))
    saved = {
        rival: math.fsum(1 - times[rival].mid / times[name].mid for times in (settled, back_to_back))
        for rival in rivals
    }
    most = max(saved.values())
    if most <= CONTEXT_REACH / 2:
        return name, equals
    return next(rival for rival in preference if saved.get(rival, -math.inf) >= most - TIE_BAND), equals


def _losses(times: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return how much the loss of each against the fastest counts, settled and in bursts."""
    best = [min(column) for column in zip(*times.values(), strict=True)]
    share = min(1.0, LONG_US / best[0])
    found = {}
    for name, both in times.items():
        first, second = (time / least - 1 for time, least in zip(both, best, strict=True))
        found[name] = (first if first > BURST_BAND else 0.0, share * second)
    return found


def common_drift(samples: Mapping[str, Sequence[float]]) -> list[float]:
    """Return by how much each round was slow or fast for all entries, as a factor around 1.

    It is the median, over the entries of the round, of the sample over the entry's centre. A GPU at its power
    limit slows down and recovers from round to round; many entries separate that from their own noise better
    than the reference alone.

    An entry that stopped early ran only in early rounds, which tend to be fast. Its centre is therefore its
    median after the drift of the entries that ran to the end was divided out, which puts all on one scale.

    Args:
        samples: One sample per round, from the first round on; some may have stopped early.
    """
    rounds = max((len(values) for values in samples.values()), default=0)
    ended = {name: median(values) for name, values in samples.items() if len(values) == rounds > 0}
    seen = _drift_around(ended, samples, rounds)
    centres = {
        name: median([sample / factor for sample, factor in zip(values, seen, strict=False)])
        for name, values in samples.items()
        if values
    }
    return _drift_around(centres, samples, rounds)


def _drift_around(
    centres: Mapping[str, float], samples: Mapping[str, Sequence[float]], rounds: int
) -> list[float]:
    """Return each round's median sample, as a multiple of the entry's centre, over those with a centre."""
    return [
        median([samples[name][at] / centre for name, centre in centres.items() if at < len(samples[name])])
        for at in range(rounds)
    ]


def steady_interval(samples: Sequence[float], drift: Sequence[float]) -> Interval:
    """Return the median of ``samples`` with its interval after each round's drift was divided out.

    Raises:
        MeasureError: There is no sample.
    """
    return median_interval([sample / factor for sample, factor in zip(samples, drift, strict=True)])
