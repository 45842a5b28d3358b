"""Energy of one entry at a time: replays back to back between two edges of the GPU's energy counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from cutegen.measure.engine import Engine, Prepared
from cutegen.measure.statistics import Interval

__all__ = ["IsolatedEnergy", "isolated_energy", "join"]

#: A counter that does not change for this many seconds under load is taken not to work. Source: judgement;
#: an H200's changes every 0.1 s.
_PATIENCE_S = 0.25
#: Seconds after a change of entries until an edge counts: before that, the counter may show energy of the
#: previous entry. Source: judgement.
_LEAD_S = 0.02


@dataclass(frozen=True)
class IsolatedEnergy:
    """Energy and power of one stretch of replays.

    Attributes:
        energy_mj: Millijoules per launch; the interval allows for edges that were noticed late.
        power_w: Mean watts between the edges.
    """

    energy_mj: Interval
    power_w: float


@dataclass(frozen=True)
class _Edge:
    """A change of the counter: when, give or take how many seconds, and its new value in millijoules."""

    at_s: float
    slack_s: float
    energy_mj: float


def isolated_energy(engine: Engine, prepared: Prepared, seconds: float) -> IsolatedEnergy | None:
    """Replay ``prepared`` for at least ``seconds`` between two edges of the counter and return its energy.

    The counter moves in steps (0.1 s on an H200), so its value says nothing about a moment between two
    steps. Time is therefore taken from edge to edge, with the GPU busy throughout; energy per launch is the
    power between the edges times the time of a launch in the same stretch.

    Returns:
        None where the counter cannot be read, does not change, runs backwards, or steps too coarsely.

    Raises:
        LaunchError: A launch failed.
    """
    feed = engine.feed(prepared)
    try:
        start = _edge(engine, feed.top_up, engine.now() + _LEAD_S)
        end = None if start is None else _edge(engine, feed.top_up, start.at_s + seconds)
    finally:
        launch_us = feed.finish()
    if start is None or end is None:
        return None
    took, slack, energy = end.at_s - start.at_s, start.slack_s + end.slack_s, end.energy_mj - start.energy_mj
    if energy <= 0 or took <= slack:
        return None
    power_mw = Interval(energy / (took + slack), energy / took, energy / (took - slack))
    per_launch = (x * launch_us * 1e-6 for x in (power_mw.low, power_mw.mid, power_mw.high))
    return IsolatedEnergy(Interval(*per_launch), power_mw.mid / 1000)


def _edge(engine: Engine, meanwhile: Callable[[], None], not_before_s: float) -> _Edge | None:
    """Return the first change of the counter at or after a time; None where it does not change."""
    before, value = engine.now(), engine.energy_mj()
    changed_s = before
    while value is not None and engine.now() - changed_s <= _PATIENCE_S:
        meanwhile()
        asked, previous = engine.now(), value
        value = engine.energy_mj()
        now = engine.now()
        if value is not None and value != previous:
            # It changed after the last reading was asked for and before this one came back.
            edge = _Edge((before + now) / 2, (now - before) / 2, value)
            changed_s = now
            if edge.at_s >= not_before_s:
                return edge
        before = asked
    return None


def join(passes: Sequence[IsolatedEnergy]) -> IsolatedEnergy:
    """Return several measurements of one entry as one: the mean, with an interval around all of them."""
    return IsolatedEnergy(
        Interval(
            min(one.energy_mj.low for one in passes),
            fmean(one.energy_mj.mid for one in passes),
            max(one.energy_mj.high for one in passes),
        ),
        fmean(one.power_w for one in passes),
    )
