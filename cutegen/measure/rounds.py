"""Times entries in interleaved rounds: burn-in, random order, a reference sample each, bursts, energy."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from cutegen.errors import LaunchError, MeasureError
from cutegen.measure.candidate import REFERENCE, Candidate, CheckResult
from cutegen.measure.context import BACK_TO_BACK, PREDECESSOR
from cutegen.measure.energy import IsolatedEnergy, isolated_energy, join
from cutegen.measure.engine import Engine, Prepared
from cutegen.measure.policy import Policy
from cutegen.measure.series import COMMON, Series
from cutegen.measure.sizing import plan_replays
from cutegen.measure.statistics import BURST_REACH, Interval, choose, choose_in_all, within
from cutegen.measure.stopping import Race, Settling
from cutegen.measure.timing import Timing
from cutegen.measure.timing_run import TimingRun

__all__ = ["BrokenDeviceError", "time_in_rounds"]

#: Burn-in measures about this long between two readings of the clock, in microseconds.
_BURN_US = 10_000.0
#: Seconds of load before a burst. Source: an idle H200 runs at 345 MHz instead of 1980.
_WARM_S = 0.05
#: Seconds of idling before each burst, and before the first one, which follows a long load. Source:
#: judgement. An H200 at its power limit slows down after 0.15 s of load; here it idles half of the time.
_IDLE_S, _FIRST_IDLE_S = 0.05, 0.2
#: GPU time of one entry in one burst, in microseconds, and most entries that are timed in bursts.
_BURST_US, _MOST_IN_BURSTS = 1500.0, 12
#: GPU time of one entry in one round of launches back to back, in microseconds.
_BACK_TO_BACK_US = 1500.0
#: Most GPU time of all entries in one burst, in microseconds, and fewest entries, however long they take.
#: Source: with 50 ms an H200 slowed down within the burst: torch.mm took 6.2 ms for 4096x128256x4096, and
#: 5.4 ms beside only one other entry.
_ALL_IN_BURST_US, _LEAST_IN_BURSTS = 30_000.0, 4
#: Longest launches that are timed back to back as well, in microseconds. Source: judgement. The end of one
#: launch overlaps with the start of the next for a few microseconds, so longer ones differ by less than 1 %.
_SHORT_US = 500.0
#: Under load the predecessor alone gets this share of an entry's turn: it draws less power, so the clock
#: rises meanwhile. Source: two GEMMs on an H200 ran at 1400 to 1500 MHz without it, and at 1740 to 1890 MHz
#: where it had as much time as each of them.
_BEFORE_SHARE = 0.25


class BrokenDeviceError(MeasureError):
    """A launch failed in a way that this process cannot recover from; the culprit was announced before."""


class _Rounds:
    """The state of one call of :func:`time_in_rounds`: what is prepared, what failed, the timings."""

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
            self._prepare(name, context)

    def _prepare(self, name: str, context: str) -> None:
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

    def warm(self) -> None:
        """Load the device for a moment, so that it leaves its idle clock before anything is timed."""
        start = self.engine.now()
        while (spent := self.engine.now() - start) < min(_WARM_S, self.policy.settle_s):
            self._measure(REFERENCE, self._replays(REFERENCE, _BURN_US))
        self.settle_s = spent

    def settle(self) -> None:
        """Load the device with every entry in turn until its clock is stable."""
        names, settling, turn = list(self.prepared), Settling(self.policy.settle_s), 0
        while not settling.done:
            name = names[turn % len(names)]
            turn += 1
            if name not in self.prepared:
                continue
            self._measure(name, self._replays(name, _BURN_US))
            reading = self.engine.read_clocks()
            settling.observe(self.engine.now(), reading.sm_mhz, reading.power_limited)
        self.settle_s, self.settled = settling.elapsed_s, settling.settled
        self.power_limited = settling.power_limited

    def _measure(self, name: str, replays: int) -> float | None:
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

    def run_bursts(self, keep: Collection[str]) -> None:
        """Add times in bursts to the timings of entries that may win, of ``keep`` and of the reference.

        If no power limit held the clock down, bursts would show nothing new, and there are none.
        """
        settled = self._settled()
        names = self._names(settled, keep)
        if not self.power_limited or not names:
            return
        count = self.policy.burst_rounds
        series = Series(Race(names, min_rounds=count, max_rounds=count, precision=0.0, prune=0.0), _BURST_US)
        self.engine.idle(_FIRST_IDLE_S - _IDLE_S)
        self.run(series, self._wake)
        timings = self.timings
        for name, bursts in series.timings("", without=self.failures).items():
            timings[name] = timings[name].with_bursts(bursts)
        for name in self.failures:
            timings.pop(name, None)

    def run_back_to_back(self, keep: Collection[str]) -> None:
        """Add times of launches back to back to the timings of the entries that bursts would have.

        Nothing is timed where these are what decides, one entry is alone, or launches are long.
        """
        settled, usual = self._settled(), self.prepared
        names = self._names(settled, keep)
        if self.policy.context == BACK_TO_BACK or len(names) < 2 or settled[names[0]].mid > _SHORT_US:
            return
        self.prepared = {}
        for name in (REFERENCE, *names):
            self._prepare(name, BACK_TO_BACK)
        count = self.policy.back_to_back_rounds
        race = Race(self.names, min_rounds=count, max_rounds=count, precision=0.0, prune=0.0)
        series = Series(race, _BACK_TO_BACK_US)
        self.run(series)
        for name, launches in series.timings("", without=self.failures).items():
            self.timings[name] = self.timings[name].with_back_to_back(launches)
        for name in self.failures:
            self.timings.pop(name, None)
            usual.pop(name, None)
        self.prepared = usual

    def _names(self, settled: Mapping[str, Interval], keep: Collection[str]) -> list[str]:
        """Return the entries to time in another regime as well, the settled winner first."""
        return list(dict.fromkeys([*self._rivals(settled), *(name for name in keep if name in settled)]))

    def _rivals(self, settled: Mapping[str, Interval]) -> list[str]:
        """Return the entries to time in bursts: the fastest of each kernel, then other run-time arguments.

        The settled winner is among them. If they are too many for a burst, half of them are the fastest, and
        the others are taken at even distances from the rest: similar kernels have similar times, and the one
        that is fast in bursts may be of another kind.
        """
        if not settled:
            return []
        near = within(settled, BURST_REACH)
        best: dict[tuple[Path, str], str] = {}
        for name in near:
            if (candidate := self.candidates[name]) is not None:
                best.setdefault((candidate.shared_object, candidate.symbol), name)
        turn_us = max([_BURST_US, *(self.prepared[name].replay_us for name in near)])
        most = max(_LEAST_IN_BURSTS, min(_MOST_IN_BURSTS, int(_ALL_IN_BURST_US / turn_us)))
        winner, _ = choose(settled, self.names)
        return list(dict.fromkeys([winner, *_thinned(list(best.values()), most), *near]))[:most]

    def _wake(self) -> None:
        """Let the device idle, then load it just long enough to leave its idle clock."""
        self.engine.idle(_IDLE_S)
        self._measure(REFERENCE, self._replays(REFERENCE, _BURN_US))

    def _settled(self) -> dict[str, Interval]:
        """Return the settled times of the candidates that still run, in their order."""
        timings = self.timings
        return {name: timings[name].paired for name in self.names if name in timings}

    def measure_energy(self, keep: Collection[str]) -> None:
        """Add the isolated energy of the entries that the policy asks for to their timings.

        A second pass in the opposite order centres all measurements on the same moment, so that a steady
        drift of the GPU's power favours none; where only time decides, one pass is enough. An entry that
        fails here counts as failed.
        """
        names = self._energy_names(keep)
        turns = names if self.policy.objective == "time" else [*names, *reversed(names)]
        found: dict[str, list[IsolatedEnergy]] = {name: [] for name in names}
        for name in turns:
            if name not in self.prepared:
                continue
            one = self._energy_once(name)
            if one is not None:
                found[name].append(one)
            elif name == names[0]:
                break  # the counter does not work, so no other entry has to be tried
        for name, passes in found.items():
            if len(passes) * len(names) == len(turns) and name in self.timings:
                both = join(passes)
                timing = self.timings[name]
                self.timings[name] = timing.with_energy(both.energy_mj, both.power_w)

    def _energy_names(self, keep: Collection[str]) -> list[str]:
        """Return the entries whose energy is measured: the reference first, then others in their order.

        Where only time decides, these are the winner and those of ``keep``.
        """
        alive, settled = self.names, self._settled()
        if self.policy.objective == "time" and settled:
            bursts = {name: t.bursts for name, t in self.timings.items() if t.bursts is not None}
            others = {name: t.back_to_back for name, t in self.timings.items() if t.back_to_back is not None}
            level = [name for name, timing in self.timings.items() if timing.keeps_up]
            winner, _ = choose_in_all(settled, bursts, others, alive, level)
            wanted = {winner, *keep}
            alive = [name for name in alive if name in wanted]
        return [REFERENCE, *alive]

    def _energy_once(self, name: str) -> IsolatedEnergy | None:
        """Return the energy of launches back to back: that of a predecessor would be included."""
        self.announce(name)
        try:
            prepared = self.engine.prepare(self.candidates[name])
            if not prepared.back_to_back:
                return None  # the counter would include the copies that restore tensors
            return isolated_energy(self.engine, prepared, self.policy.energy_s)
        except LaunchError as error:
            if name == REFERENCE:
                raise
            self.fail(name, error)
            del self.timings[name]
            return None


def _thinned(names: Sequence[str], most: int) -> list[str]:
    """Return at most ``most`` names: the first half as they come, the others at even distances."""
    if len(names) <= most:
        return list(names)
    first = -(-most // 2)
    rest, left = names[first:], most - first
    return [*names[:first], *(rest[(at + 1) * len(rest) // left - 1] for at in range(left))]


def time_in_rounds(
    engine: Engine,
    candidates: Sequence[Candidate],
    policy: Policy,
    reference: str,
    announce: Callable[[str], None],
    keep: Collection[str] = (),
) -> TimingRun:
    """Time every candidate and the reference under ``policy``.

    Args:
        engine: Where they run; their problem is open.
        candidates: What to time, those that would win a tie first.
        policy: How to time it.
        reference: What the reference is called in the record.
        announce: Told the name of each entry before it runs, so that a hang can be blamed on it.
        keep: Entries that take part in bursts, launches back to back and energy measurements, if there are
            any, however slow they are.

    Raises:
        BrokenDeviceError: A launch broke the device; the entry announced last is to blame.
        LaunchError: The reference failed, or the kernel before each launch.
        MeasureError: A launch took no time once that of the kernel before it is subtracted.
    """
    rounds = _Rounds(engine, policy, announce)
    rounds.prepare(candidates)
    if policy.clock == "burst":
        rounds.warm()
    elif policy.settle_s > 0:
        rounds.settle()
    race = Race(
        rounds.names,
        min_rounds=policy.min_rounds,
        max_rounds=policy.rounds,
        precision=policy.precision,
        prune=policy.prune,
        extra_rounds=policy.extra_rounds,
    )
    series = Series(race, policy.round_us)
    power_w = rounds.run(series)
    rounds.timings = series.timings(reference, power_w=power_w, without=rounds.failures)
    if policy.burst_rounds > 0:
        rounds.run_bursts(keep)
    if policy.back_to_back_rounds > 0:
        rounds.run_back_to_back(keep)
    if policy.energy_s > 0:
        rounds.measure_energy(keep)
    return TimingRun(
        timings=rounds.timings,
        reference=rounds.timings.pop(REFERENCE),
        failures=rounds.failures,
        rounds=race.rounds,
        settle_s=rounds.settle_s,
        settled=rounds.settled,
    )
