"""Times entries in interleaved rounds: burn-in, random order, a reference sample each, early stop, energy."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutegen.errors import LaunchError, MeasureError
from cutegen.measure.candidate import REFERENCE, Candidate
from cutegen.measure.context import BACK_TO_BACK, PREDECESSOR
from cutegen.measure.energy import IsolatedEnergy, isolated_energy, join
from cutegen.measure.engine import Engine, Prepared
from cutegen.measure.policy import Policy, Timing
from cutegen.measure.sizing import plan_replays
from cutegen.measure.statistics import Race, Settling, choose, common_drift

__all__ = ["BrokenDeviceError", "RoundsResult", "time_in_rounds"]

#: Burn-in measures about this long between two readings of the clock, in microseconds.
_BURN_US = 10_000.0
#: A burst starts after so many seconds of load. Source: an idle H200 clocks at 345 MHz instead of 1980.
_WARM_S = 0.05
#: Entries that belong to nobody: if one of them fails, nobody can be timed.
_COMMON = (REFERENCE, PREDECESSOR)


class BrokenDeviceError(MeasureError):
    """A launch failed in a way that this process cannot recover from; the culprit was announced before."""


@dataclass
class RoundsResult:
    """What came of timing one set of candidates.

    Attributes:
        timings: By name; the reference is among them as ``torch``.
        failures: Why a candidate could not be timed, by name.
        rounds: Rounds run.
        settle_s: Seconds of burn-in.
        settled: Whether the clock was seen to hold; None if nobody looked.
    """

    timings: dict[str, Timing] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    settle_s: float = 0.0
    settled: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "timings": {name: timing.to_json() for name, timing in self.timings.items()},
            "failures": self.failures,
            "rounds": self.rounds,
            "settle_s": self.settle_s,
            "settled": self.settled,
        }


class _Rounds:
    """The state of one call: what is prepared, who still runs, what the clock said."""

    def __init__(self, engine: Engine, policy: Policy, announce: Callable[[str], None]) -> None:
        self.engine = engine
        self.policy = policy
        self.announce = announce
        self.result = RoundsResult()
        self.candidates: dict[str, Candidate | None] = {REFERENCE: None}
        self.prepared: dict[str, Prepared] = {}
        self.clocks: dict[str, list[float]] = {}
        self.before_us: list[float] = []

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Make every entry ready; one that fails becomes a failure."""
        context = self.policy.context
        self.candidates |= {candidate.name: candidate for candidate in candidates}
        if context != BACK_TO_BACK:
            self.announce(PREDECESSOR)
            self.prepared[PREDECESSOR] = self.engine.prepare_predecessor(context)
        for name, candidate in self.candidates.items():
            self.announce(name)
            try:
                self.prepared[name] = self.engine.prepare(candidate, context)
            except LaunchError as error:
                if candidate is None:
                    raise
                self.fail(name, error)
        self.clocks = {name: [] for name in self.prepared}

    @property
    def names(self) -> list[str]:
        """The candidates that are ready, in order."""
        return [name for name in self.prepared if name not in _COMMON]

    def fail(self, name: str, error: LaunchError) -> None:
        """Note a failed launch.

        Raises:
            BrokenDeviceError: The device does not answer any more.
        """
        if not self.engine.healthy():
            raise BrokenDeviceError(str(error)) from error
        self.result.failures[name] = str(error)
        self.prepared.pop(name, None)

    def warm(self) -> None:
        """Load the device for a moment, so that it leaves its idle clock before anyone is timed."""
        start = self.engine.now()
        while (spent := self.engine.now() - start) < min(_WARM_S, self.policy.settle_s):
            self._measure(REFERENCE, plan_replays(_BURN_US, self.prepared[REFERENCE].replay_us))
        self.result.settle_s = spent

    def settle(self) -> None:
        """Load the device with everyone in turn until its clock holds."""
        names, settling, turn = list(self.prepared), Settling(self.policy.settle_s), 0
        while not settling.done:
            name = names[turn % len(names)]
            turn += 1
            if name not in self.prepared:
                continue
            self._measure(name, plan_replays(_BURN_US, self.prepared[name].replay_us))
            reading = self.engine.read_clocks()
            settling.observe(self.engine.now(), reading.sm_mhz, reading.power_limited)
        self.result.settle_s, self.result.settled = settling.elapsed_s, settling.settled

    def _measure(self, name: str, replays: int) -> float | None:
        self.announce(name)
        try:
            return self.engine.measure(self.prepared[name], replays)
        except LaunchError as error:
            if name in _COMMON:
                raise
            self.fail(name, error)
            return None

    def run(self, race: Race) -> float | None:
        """Run rounds until the race is decided; return the mean power in watts, None where it is unknown."""
        rng = random.Random(self.policy.seed)
        start, energy = self.engine.now(), self.engine.read_clocks().energy_mj
        while not race.finished:
            order = [name for name in _COMMON if name in self.prepared] + list(race.alive)
            rng.shuffle(order)
            samples = {name: us for name in order if (us := self._sample(name)) is not None}
            for name in set(order) - set(samples):
                race.withdraw(name)
            samples = self._without_predecessor(samples)
            race.observe(samples.pop(REFERENCE), samples)
        return self._mean_power(start, energy)

    def _without_predecessor(self, samples: dict[str, float]) -> dict[str, float]:
        """Return the samples of a round less what ran before each launch.

        Raises:
            MeasureError: Nothing is left of one.
        """
        if PREDECESSOR not in samples:
            return samples
        before = samples.pop(PREDECESSOR)
        self.before_us.append(before)
        if lost := [name for name, us in samples.items() if us <= before]:
            raise MeasureError(
                f"{lost[0]} and the kernel before it took {samples[lost[0]]:.2f} us, no longer than the "
                f"{before:.2f} us of that kernel alone; measure launches {BACK_TO_BACK} instead"
            )
        return {name: us - before for name, us in samples.items()}

    def _sample(self, name: str) -> float | None:
        if name not in self.prepared:
            return None
        took = self._measure(name, plan_replays(self.policy.round_us, self.prepared[name].replay_us))
        clock = self.engine.sm_clock()
        if took is not None and clock is not None:
            self.clocks[name].append(clock)
        return took

    def _mean_power(self, start: float, energy_before: float | None) -> float | None:
        after = self.engine.read_clocks()
        seconds = self.engine.now() - start
        if after.energy_mj is None or energy_before is None or seconds < 0.1:
            return after.power_w  # the counter is too coarse for so short a time
        return (after.energy_mj - energy_before) / 1000 / seconds

    def summarise(self, race: Race, power_w: float | None, reference: str) -> None:
        """Turn samples into timings."""
        base = race.reference_samples
        self.result.rounds = race.rounds
        entries: Mapping[str, tuple[float, ...]] = {
            REFERENCE: base,
            **{name: race.samples(name) for name in race.names if name not in self.result.failures},
        }
        drift = common_drift(entries)
        for name, samples in entries.items():
            self.result.timings[name] = Timing.of(
                samples,
                base[: len(samples)],
                clocks_mhz=self.clocks[name],
                rounds_power_w=power_w,
                reference=reference,
                drift=drift[: len(samples)],
                predecessor_us=self.before_us[: len(samples)],
            )

    def measure_energy(self, race: Race, keep: Collection[str]) -> None:
        """Add the isolated energy of those whom the policy asks for to their timings.

        A second pass in the opposite order puts everyone's mean at the same time, so that a steady drift of
        the GPU's power favours nobody; where only time decides, one pass tells enough. An entry that fails
        here has failed.
        """
        names = self._energy_names(race, keep)
        turns = names if self.policy.objective == "time" else [*names, *reversed(names)]
        found: dict[str, list[IsolatedEnergy]] = {name: [] for name in names}
        for name in turns:
            if name not in self.prepared:
                continue
            one = self._energy_once(name)
            if one is not None:
                found[name].append(one)
            elif name == names[0]:
                break  # a counter that does not move for the first moves for nobody
        for name, passes in found.items():
            if len(passes) * len(names) == len(turns) and name in self.result.timings:
                both = join(passes)
                timing = self.result.timings[name]
                self.result.timings[name] = timing.with_energy(both.energy_mj, both.power_w)

    def _energy_names(self, race: Race, keep: Collection[str]) -> list[str]:
        """Return whose energy is measured: the reference first, then entries in their own order.

        Where only time decides, the winner, and whom the caller keeps.
        """
        alive = [name for name in race.names if name in self.prepared]
        if self.policy.objective == "time" and alive:
            times = {name: self.result.timings[name].paired for name in alive}
            winner, _ = choose(times, alive)
            wanted = {winner, *keep}
            alive = [name for name in alive if name in wanted]
        return [REFERENCE, *alive]

    def _energy_once(self, name: str) -> IsolatedEnergy | None:
        """Return the energy of launches back to back: what runs before them has an energy of its own."""
        self.announce(name)
        try:
            prepared = self.engine.prepare(self.candidates[name])
            return isolated_energy(self.engine, prepared, self.policy.energy_s)
        except LaunchError as error:
            if name == REFERENCE:
                raise
            self.fail(name, error)
            del self.result.timings[name]
            return None


def time_in_rounds(
    engine: Engine,
    candidates: Sequence[Candidate],
    policy: Policy,
    reference: str,
    announce: Callable[[str], None],
    keep: Collection[str] = (),
) -> RoundsResult:
    """Time every candidate and the reference under ``policy``.

    Args:
        engine: Where they run; their problem is open.
        candidates: Who is timed, those that would win a tie first.
        policy: How.
        reference: What the reference is called in the record.
        announce: Told the name of each entry before it runs, so that a hang can be blamed on it.
        keep: Entries whose energy is measured if anyone's is, however slow they are.

    Raises:
        BrokenDeviceError: A launch broke the device; the entry announced last is to blame.
        LaunchError: The reference failed, or what runs before each launch.
        MeasureError: A launch cannot be told from what runs before it.
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
    power = rounds.run(race)
    rounds.summarise(race, power, reference)
    if policy.energy_s > 0:
        rounds.measure_energy(race, keep)
    return rounds.result
