"""When to stop measuring: who runs in the next round, whether the clock has settled. Pure state machines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from cutegen.measure.statistics import Interval, choose, common_drift, ratio_interval, steady_interval

__all__ = ["Race", "Settling"]

#: From this many rounds on, and half of ``min_rounds``, an entry is dropped by half of ``prune``. Source:
#: judgement; under load on an H200 single samples of equally fast kernels may be 15 % apart, medians less.
_ENOUGH_TO_DROP = 3


class Race:
    """Decides round by round which entries run again and when to stop; it reads no clock itself.

    Each round gives one sample of the reference and of each entry still running. When all times are precise
    enough, or the rounds for all are over, extra rounds may follow for the few entries that are statistically
    tied for fastest.

    Attributes:
        names: The entries, in order.
        alive: The entries of the next round.
        rounds: Rounds so far.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        min_rounds: int,
        max_rounds: int,
        precision: float,
        prune: float,
        extra_rounds: int = 0,
    ) -> None:
        self.names = tuple(names)
        self.alive = tuple(names)
        self.rounds = 0
        self._min_rounds = min_rounds
        self._max_rounds = max_rounds
        self._precision = precision
        self._prune = prune
        self._extra_rounds = extra_rounds
        self._last: int | None = None
        self._own: dict[str, list[float]] = {name: [] for name in names}
        self._reference: list[float] = []

    def observe(self, reference_us: float, own_us: Mapping[str, float]) -> None:
        """Add one round: microseconds of the reference and of each entry."""
        self.rounds += 1
        self._reference.append(reference_us)
        for name in self.alive:
            if name in own_us:
                self._own[name].append(own_us[name])
        self._drop_hopeless()
        if self._last is None and self._all_have_run():
            self._last = self.rounds + self._extra_rounds
        if self._last is not None:
            self._drop_beaten()

    def withdraw(self, name: str) -> None:
        """Take ``name`` out of the race, for instance because it failed."""
        self.alive = tuple(other for other in self.alive if other != name)

    def _drop_hopeless(self) -> None:
        if self._prune <= 0 or not self.alive:
            return
        known = self.rounds >= max(_ENOUGH_TO_DROP, self._min_rounds // 2 + 1)
        prune = self._prune / 2 if known else self._prune
        speeds = {name: self.ratio(name).mid for name in self.alive if self._own[name]}
        best = max(speeds.values(), default=0.0)
        self.alive = tuple(n for n in self.alive if n not in speeds or speeds[n] * (1 + prune) >= best)

    def _drop_beaten(self) -> None:
        """Keep the entries that are statistically tied for fastest so far."""
        if len(self.alive) < 2 or not self._extra_rounds:
            return
        drift = common_drift({"": self._reference, **self._own})
        _, self.alive = choose(
            {name: steady_interval(self._own[name], drift) for name in self.alive}, self.alive
        )

    def samples(self, name: str) -> tuple[float, ...]:
        """Return the microseconds of ``name``, one per round that it ran in."""
        return tuple(self._own[name])

    @property
    def reference_samples(self) -> tuple[float, ...]:
        """The microseconds of the reference, one per round."""
        return tuple(self._reference)

    def ratio(self, name: str) -> Interval:
        """Return the paired ratio to the reference; one that stopped early pairs with its own rounds."""
        own = self._own[name]
        return ratio_interval(self._reference[: len(own)], own)

    @property
    def finished(self) -> bool:
        """Whether another round would change nothing, or none is allowed."""
        if self._last is None:
            return False
        return self.rounds >= self._last or len(self.alive) < 2 or self._precise()

    def _all_have_run(self) -> bool:
        """Whether the rounds for all entries are over."""
        enough = self.rounds >= self._min_rounds and self._precise()
        return enough or self.rounds >= self._max_rounds

    def _precise(self) -> bool:
        return all(self.ratio(name).half_width <= self._precision for name in self.alive)


class Settling:
    """Decides from clock readings when a GPU under load has reached a stable clock.

    It is settled when two successive windows have the same mean clock. Readings from before a power limit was
    reported do not count. A GPU that reports no power limit gets ``short_limit_s``, one that does the whole
    ``limit_s``. Source: clocks of a power-limited H200 fall within 0.15 s of load and may oscillate for about
    3 s; another drew 850 to 900 W at 1900 MHz for more than half a second before its clock fell.

    Attributes:
        settled: Whether the clock was seen to be stable.
        elapsed_s: Time of the last reading, in seconds since the first.
        power_limited: Whether a power limit was reported.
    """

    def __init__(
        self, limit_s: float, *, window_s: float = 0.2, tolerance: float = 0.01, short_limit_s: float = 1.0
    ) -> None:
        self.settled = False
        self.elapsed_s = 0.0
        self._limit_s = limit_s
        self._short_limit_s = min(short_limit_s, limit_s)
        self._window_s = window_s
        self._tolerance = tolerance
        self.power_limited = False
        self._readings: deque[tuple[float, float]] = deque()
        self._start: float | None = None
        self._since = 0.0

    def observe(self, at_s: float, clock_mhz: float | None, power_limited: bool) -> None:
        """Add one reading; ``clock_mhz`` is None where the clock cannot be read."""
        if self._start is None:
            self._start = self._since = at_s
        self.elapsed_s = at_s - self._start
        if power_limited and not self.power_limited:
            self.power_limited, self._since = True, at_s
            self._readings.clear()
        if clock_mhz is not None:
            self._readings.append((at_s, clock_mhz))
        while self._readings and self._readings[0][0] < at_s - 2 * self._window_s:
            self._readings.popleft()
        self.settled = self.settled or self._holds(at_s)

    def _holds(self, at_s: float) -> bool:
        if at_s - self._since < 2 * self._window_s:
            return False
        middle = at_s - self._window_s
        before = [clock for at, clock in self._readings if at <= middle]
        after = [clock for at, clock in self._readings if at > middle]
        if not before or not after:
            return False
        first, second = math.fsum(before) / len(before), math.fsum(after) / len(after)
        return abs(first - second) <= self._tolerance * first

    @property
    def done(self) -> bool:
        """Whether to go on to the measurement: the clock is stable, or the time is up."""
        limit = self._limit_s if self.power_limited else self._short_limit_s
        return self.settled or self.elapsed_s >= limit
