"""Runs entries in interleaved rounds: burn-in, random order, a reference sample each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from cutegen.errors import LaunchError, MeasureError
from cutegen.measure.candidate import REFERENCE, Candidate, CheckResult
from cutegen.measure.context import BACK_TO_BACK, PREDECESSOR
from cutegen.measure.engine import Engine, Prepared
from cutegen.measure.policy import Policy
from cutegen.measure.series import COMMON, Series
from cutegen.measure.sizing import plan_replays
from cutegen.measure.statistics import Interval
from cutegen.measure.stopping import Settling
from cutegen.measure.timing import Timing

__all__ = ["BrokenDeviceError", "Rounds"]

#: Burn-in measures about this long between two readings of the clock, in microseconds.
_BURN_US = 10_000.0
#: Seconds of load before a burst. Source: an idle H200 runs at 345 MHz instead of 1980.
_WARM_S = 0.05
#: Under load the predecessor alone gets this share of an entry's turn: it draws less power, so the clock
#: rises meanwhile. Source: two GEMMs on an H200 ran at 1400 to 1500 MHz without it, and at 1740 to 1890 MHz
#: where it had as much time as each of them.
_BEFORE_SHARE = 0.25


class BrokenDeviceError(MeasureError):
    """A launch failed in a way that this process cannot recover from; the culprit was announced before."""


class Rounds:
    """What is prepared, what failed, and the timings that are known so far.

    Args:
        engine: Where entries run; their problem is open.
        policy: How they are timed.
        announce: Told the name of each entry before it runs, so that a hang can be blamed on it.

    Attributes:
        timings: Of candidates and the reference, once the rounds that decide are over.
        failures: Of candidates that failed, which have no timing then.
        settle_s: Seconds of load before the first round.
        settled: Whether the clock was stable then; None if the policy did not ask for that.
        candidates: All entries but the predecessor; the reference is None.
        prepared: The graphs of those that may run.
        power_limited: Whether a power limit held the clock down at the end of that load.
    """

    def __init__(self, engine: Engine, policy: Policy, announce: Callable[[str], None]) -> None:
        self.engine = engine
        self.policy = policy
        self.announce = announce
        self.timings: dict[str, Timing] = {}
        self.failures: dict[str, CheckResult] = {}
        self.settle_s = 0.0
        self.settled: bool | None = None
        self.candidates: dict[str, Candidate | None] = {REFERENCE: None}
        self.prepared: dict[str, Prepared] = {}
        self.power_limited = False

    def _replays(self, name: str, turn_us: float) -> int:
        """Return how many replays of an entry's graph fill its turn."""
        loaded = self.policy.clock == "settled" and name == PREDECESSOR
        share = _BEFORE_SHARE if loaded else 1.0
        return plan_replays(share * turn_us, self.prepared[name].replay_us)

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Make every entry ready; one that fails becomes a failure."""
        context = self.policy.context
        self.candidates |= {candidate.name: candidate for candidate in candidates}
        if context != BACK_TO_BACK:
            self.announce(PREDECESSOR)
            self.prepared[PREDECESSOR] = self.engine.prepare_predecessor(context)
        for name in self.candidates:
            self.prepare_one(name, context)

    def prepare_one(self, name: str, context: str) -> None:
        """Make one entry ready; a candidate that fails becomes a failure."""
        self.announce(name)
        try:
            self.prepared[name] = self.engine.prepare(self.candidates[name], context)
        except LaunchError as error:
            if name in COMMON:
                raise
            self.fail(name, error)

    @property
    def names(self) -> list[str]:
        """The candidates that are ready, in order."""
        return [name for name in self.prepared if name not in COMMON]

    def fail(self, name: str, error: LaunchError) -> None:
        """Note a failed launch.

        Raises:
            BrokenDeviceError: The device does not answer any more.
        """
        if not self.engine.healthy():
            raise BrokenDeviceError(str(error)) from error
        self.failures[name] = CheckResult("launch_failed", str(error))
        self.prepared.pop(name, None)

    def load(self, name: str) -> None:
        """Run one entry for about 10 ms, untimed."""
        self._measure(name, self._replays(name, _BURN_US))

    def warm(self) -> None:
        """Load the device for a moment, so that it leaves its idle clock before anything is timed."""
        start = self.engine.now()
        while (spent := self.engine.now() - start) < min(_WARM_S, self.policy.settle_s):
            self.load(REFERENCE)
        self.settle_s = spent

    def settle(self) -> None:
        """Load the device with every entry in turn until its clock is stable."""
        names, settling, turn = list(self.prepared), Settling(self.policy.settle_s), 0
        while not settling.done:
            name = names[turn % len(names)]
            turn += 1
            if name not in self.prepared:
                continue
            self.load(name)
            reading = self.engine.read_clocks()
            settling.observe(self.engine.now(), reading.sm_mhz, reading.power_limited)
        self.settle_s, self.settled = settling.elapsed_s, settling.settled
        self.power_limited = settling.power_limited

    def _measure(self, name: str, replays: int) -> float | None:
        """Replay the graph of one entry; return microseconds per launch, None if it failed."""
        self.announce(name)
        try:
            return self.engine.measure(self.prepared[name], replays)
        except LaunchError as error:
            if name in COMMON:
                raise
            self.fail(name, error)
            return None

    def run(self, series: Series, before_round: Callable[[], None] = lambda: None) -> float | None:
        """Run rounds until the race is decided; return the mean power in watts, None where it is unknown."""
        race, rng = series.race, random.Random(self.policy.seed)
        start, energy = self.engine.now(), self.engine.read_clocks().energy_mj
        while not race.finished:
            before_round()
            order = [name for name in COMMON if name in self.prepared] + list(race.alive)
            rng.shuffle(order)
            samples = {name: us for name in order if (us := self._sample(name, series)) is not None}
            for name in set(order) - set(samples):
                race.withdraw(name)
            series.observe(samples)
        return self._mean_power(start, energy)

    def _sample(self, name: str, series: Series) -> float | None:
        if name not in self.prepared:
            return None
        took = self._measure(name, self._replays(name, series.round_us))
        clock = self.engine.sm_clock()
        if took is not None and clock is not None:
            series.clocks[name].append(clock)
        return took

    def _mean_power(self, start: float, energy_before: float | None) -> float | None:
        after = self.engine.read_clocks()
        seconds = self.engine.now() - start
        if after.energy_mj is None or energy_before is None or seconds < 0.1:
            return after.power_w  # the counter is too coarse for so short a time
        return (after.energy_mj - energy_before) / 1000 / seconds

    def settled_times(self) -> dict[str, Interval]:
        """Return the settled times of the candidates that still run, in their order."""
        timings = self.timings
        return {name: timings[name].paired for name in self.names if name in timings}

    def add(self, series: Series, join: Callable[[Timing, Timing], Timing]) -> None:
        """Join what further rounds found to the timings; who failed there has none."""
        for name, found in series.timings("", without=self.failures).items():
            self.timings[name] = join(self.timings[name], found)
        for name in self.failures:
            self.timings.pop(name, None)
