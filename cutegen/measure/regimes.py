"""What entries that may win are timed in beside the rounds that decide: bursts, and launches back to back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from cutegen.measure.candidate import REFERENCE
from cutegen.measure.context import BACK_TO_BACK
from cutegen.measure.rounds import Rounds
from cutegen.measure.series import Series
from cutegen.measure.statistics import BURST_REACH, Interval, choose, within
from cutegen.measure.stopping import Race
from cutegen.measure.timing import Timing

__all__ = ["run_back_to_back", "run_bursts"]

#: Seconds of idling before each burst, and before the first one, which follows a long load. Source:
#: judgement. An H200 at its power limit slows down after 0.15 s of load; here it idles half of the time.
_IDLE_S, _FIRST_IDLE_S = 0.05, 0.2
#: GPU time of one entry in one burst, or in one round back to back, in microseconds, and most entries.
_TURN_US, _MOST = 1500.0, 12
#: Most GPU time of all entries in one burst, in microseconds, and fewest entries, however long they take.
#: Source: with 50 ms an H200 slowed down within the burst: torch.mm took 6.2 ms for 4096x128256x4096, and
#: 5.4 ms beside only one other entry.
_ALL_IN_BURST_US, _LEAST = 30_000.0, 4
#: Longest launches that are timed back to back as well, in microseconds. Source: judgement. The end of one
#: launch overlaps with the start of the next for a few microseconds, so longer ones differ by less than 1 %.
_SHORT_US = 500.0


def run_bursts(rounds: Rounds, keep: Collection[str]) -> None:
    """Add times in bursts to the timings of entries that may win, of ``keep`` and of the reference.

    If no power limit held the clock down, bursts would show nothing new, and there are none.
    """
    names = _names(rounds, rounds.settled_times(), keep)
    if not rounds.power_limited or not names:
        return

    def wake() -> None:
        """Let the device idle, then load it just long enough to leave its idle clock."""
        rounds.engine.idle(_IDLE_S)
        rounds.load(REFERENCE)

    series = _series(names, rounds.policy.burst_rounds)
    rounds.engine.idle(_FIRST_IDLE_S - _IDLE_S)
    rounds.run(series, wake)
    rounds.add(series, Timing.with_bursts)


def run_back_to_back(rounds: Rounds, keep: Collection[str]) -> None:
    """Add times of launches back to back to the timings of the entries that bursts would have.

    Nothing is timed where these are what decides, one entry is alone, or launches are long.
    """
    settled = rounds.settled_times()
    names = _names(rounds, settled, keep)
    if rounds.policy.context == BACK_TO_BACK or len(names) < 2 or settled[names[0]].mid > _SHORT_US:
        return
    usual, rounds.prepared = rounds.prepared, {}
    for name in (REFERENCE, *names):
        rounds.prepare_one(name, BACK_TO_BACK)
    series = _series(rounds.names, rounds.policy.back_to_back_rounds)
    rounds.run(series)
    rounds.add(series, Timing.with_back_to_back)
    rounds.prepared = {name: graph for name, graph in usual.items() if name not in rounds.failures}


def _series(names: Sequence[str], count: int) -> Series:
    race = Race(names, min_rounds=count, max_rounds=count, precision=0.0, prune=0.0)
    return Series(race, _TURN_US)


def _names(rounds: Rounds, settled: Mapping[str, Interval], keep: Collection[str]) -> list[str]:
    """Return the entries to time, the settled winner first."""
    return list(dict.fromkeys([*_rivals(rounds, settled), *(name for name in keep if name in settled)]))


def _rivals(rounds: Rounds, settled: Mapping[str, Interval]) -> list[str]:
    """Return the entries that may win: the fastest of each kernel, then other run-time arguments.

    The settled winner is among them. If they are too many for a burst, half of them are the fastest, and the
    others are taken at even distances from the rest: similar kernels have similar times, and the one that is
    fast in another regime may be of another kind.
    """
    if not settled:
        return []
    near = within(settled, BURST_REACH)
    best: dict[tuple[Path, str], str] = {}
    for name in near:
        if (candidate := rounds.candidates[name]) is not None:
            best.setdefault((candidate.shared_object, candidate.symbol), name)
    turn_us = max([_TURN_US, *(rounds.prepared[name].replay_us for name in near)])
    most = max(_LEAST, min(_MOST, int(_ALL_IN_BURST_US / turn_us)))
    winner, _ = choose(settled, rounds.names)
    return list(dict.fromkeys([winner, *_thinned(list(best.values()), most), *near]))[:most]


def _thinned(names: Sequence[str], most: int) -> list[str]:
    """Return at most ``most`` names: the first half as they come, the others at even distances."""
    if len(names) <= most:
        return list(names)
    first = -(-most // 2)
    rest, left = names[first:], most - first
    return [*names[:first], *(rest[(at + 1) * len(rest) // left - 1] for at in range(left))]
