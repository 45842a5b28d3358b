"""How a timing was made and what it says: the policy that keys every timing, and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from cutegen.digest import Json, digest
from cutegen.errors import MeasureError, UsageError
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.statistics import Interval, median, median_interval, ratio_interval, steady_interval

__all__ = ["ENERGY_S", "OBJECTIVES", "Policy", "Timing", "against", "cost_ratio", "require_objective"]

#: What a kernel may be chosen by: microseconds, millijoules per launch, or their product.
OBJECTIVES = ("time", "energy", "edp")
#: Seconds of an isolated energy measurement by objective, at least. An H200's counter steps every 0.1 s
#: (polled 200 times a second). Source of the numbers: judgement. One step, seen late by a few milliseconds,
#: tells what a winner takes within some percent; over five the same delay is under what is called a tie.
ENERGY_S = {"time": 0.05, "energy": 0.5, "edp": 0.5}
#: Who is not behind the reference when settled, and loses no more than this to it in bursts, keeps up with
#: it. Source: the requirement that no winner be 2 % behind in bursts, less what a few of these leave open.
_KEEPING_UP = 0.015

#: Fields under the names that they had in version 0.1: the digest of a stored policy keys timings.
_STORED_AS = {"extra_rounds": "playoff", "energy_s": "dwell_s"}
#: Fields that version 0.1 lacked, with what they were then; left out of the data where they are still that.
_ADDED: Mapping[str, Json] = {"context": BACK_TO_BACK, "burst_rounds": 0}
_CHOICES = {
    "objective": OBJECTIVES,
    "context": CONTEXTS,
    "launch": ("graph",),
    "l2": ("cold",),
    "clock": ("settled", "burst"),
    "distribution": ("uniform",),
}


def require_objective(name: str) -> str:
    """Return ``name`` if it is an objective.

    Raises:
        UsageError: It is none.
    """
    if name not in OBJECTIVES:
        raise UsageError(f"unknown objective {name!r}; valid: {', '.join(OBJECTIVES)}")
    return name


@dataclass(frozen=True)
class Policy:
    """Everything that decides what a timing means; two timings compare only under equal policies.

    Attributes:
        launch: ``graph``: launches are replayed from a CUDA graph, so the host does not limit them.
        l2: ``cold``: operands rotate through more than three times the L2 cache.
        clock: ``settled`` (the GPU is loaded until its clock holds) or ``burst`` (it only leaves idle).
        distribution: ``uniform``: operands are uniform in [-1, 1), those of 4 bits among all codes; data
            changes power and so clocks.
        rounds: Most rounds; each runs every entry and the reference once, in random order.
        min_rounds: Fewest rounds before ``precision`` may stop it.
        round_us: GPU time that one entry takes in one round, in microseconds (at least one graph).
        settle_s: Longest burn-in, in seconds; a burst takes 0.05 of them at most.
        precision: Stop when every interval's half width is under this fraction of its median; 0 never stops.
        prune: Drop entries that are slower than the best by more than this fraction, already after one round,
            and by half of it after half of the rounds for all; 0 drops nobody.
        extra_rounds: After these rounds, most further ones for the entries that are statistically tied for
            fastest, while they are several and ``precision`` does not stop it.
        seed: Of the order within rounds.
        objective: What the timings are to decide. It says whose energy is measured: for ``time`` once that
            of the winner, the reference and those that the caller names, for ``energy`` and ``edp`` twice
            everyone's.
        energy_s: After the rounds, seconds that an entry is replayed back to back while the GPU's energy
            counter is read; 0 reads no energy. It goes with settled clocks only.
        context: What runs before each launch: ``alone``, ``behind`` or ``back_to_back``, as in
            :data:`cutegen.measure.context.CONTEXTS`. The time of what runs before is measured in the same
            rounds and taken off. Energy is that of launches back to back in any case.
        burst_rounds: Where a limit of power holds the settled clock down: rounds of short bursts that follow
            for the reference and whoever may win, each after a moment of idling. Objective ``time`` only.
            They add to a timing and change nothing in it, so they are no part of what keys it.

    Raises:
        UsageError: A value is not one of those above.
    """

    launch: str = "graph"
    l2: str = "cold"
    clock: str = "settled"
    distribution: str = "uniform"
    rounds: int = 15
    min_rounds: int = 7
    round_us: float = 6000.0
    settle_s: float = 3.0
    precision: float = 0.002
    prune: float = 0.0
    extra_rounds: int = 0
    seed: int = 0
    objective: str = "time"
    energy_s: float = 0.0
    context: str = BACK_TO_BACK
    burst_rounds: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise UsageError(f"policy {name} is {getattr(self, name)!r}; valid: {', '.join(valid)}")
        if not 1 <= self.min_rounds <= self.rounds:
            raise UsageError(
                f"policy wants {self.min_rounds} to {self.rounds} rounds; valid: 1 or more, in order"
            )
        for name in (
            "round_us",
            "settle_s",
            "precision",
            "prune",
            "extra_rounds",
            "energy_s",
            "burst_rounds",
        ):
            if not getattr(self, name) >= 0:
                raise UsageError(f"policy {name} is {getattr(self, name)!r}; it must not be negative")
        if self.energy_s and self.clock != "settled":
            raise UsageError(f"policy measures energy for {self.energy_s:g} s after a {self.clock}; valid: 0")

    @classmethod
    def screen(cls, seed: int = 0, *, loaded: bool = False, context: str = DEFAULT_CONTEXT) -> Policy:
        """Return the policy that finds the promising few of many: three short rounds.

        They are chosen by time, whatever the objective, and read no energy: an entry's turn takes a few
        milliseconds, less than a step of the counter.

        Args:
            seed: Of the order within rounds.
            loaded: Whether to load the GPU first, up to a second, as work that meets its power limit would; 3
                rounds of bursts follow, since who is fast there may not be among the fastest here.
            context: What runs before each launch.
        """
        return cls(
            clock="settled" if loaded else "burst",
            rounds=3,
            min_rounds=3,
            round_us=4000.0 if loaded else 1500.0,
            settle_s=1.0 if loaded else 0.05,
            precision=0.0,
            prune=0.3,
            seed=seed,
            context=context,
            burst_rounds=3 if loaded else 0,
        )

    @classmethod
    def final(cls, seed: int = 0, objective: str = "time", *, context: str = DEFAULT_CONTEXT) -> Policy:
        """Return the policy that decides among the few: settled clocks, 7 to 15 rounds, energy.

        Where time decides, 30 more rounds may follow for those that may still win, then 7 of bursts. Source:
        medians of 15 rounds on an H200 at its power limit are known to 0.8 %; of 45, to 0.5 %. Their number
        counts more than their length; those back to back are as long as in version 0.1, whose timings go on
        answering.

        Raises:
            UsageError: There is no such objective or context.
        """
        extra_rounds = 30 if objective == "time" else 0
        return cls(
            round_us=6000.0 if context == BACK_TO_BACK else 4000.0,
            seed=seed,
            objective=objective,
            energy_s=ENERGY_S.get(objective, 0.0),
            extra_rounds=extra_rounds,
            context=context,
            burst_rounds=7 if objective == "time" else 0,
        )

    @classmethod
    def quick(cls, seed: int = 0, *, loaded: bool = False, context: str = DEFAULT_CONTEXT) -> Policy:
        """Return the policy that finds and decides at once: 5 to 9 short rounds, 8 or 14 more of those tied.

        Args:
            seed: Of the order within rounds.
            loaded: Whether to load the GPU first, up to 1.2 s, as work that meets its power limit would; 5
                rounds of bursts follow, which take half a second. Nobody is dropped for less than 30 %: while
                the clock swings, samples of two equals may be 15 % apart on an H200.
            context: What runs before each launch.

        Raises:
            UsageError: There is no such context.
        """
        return cls(
            clock="settled" if loaded else "burst",
            rounds=9 if loaded else 7,
            min_rounds=7 if loaded else 5,
            round_us=4000.0 if loaded else 2000.0,
            settle_s=1.2 if loaded else 0.05,
            precision=0.003,
            prune=0.3 if loaded else 0.15,
            extra_rounds=8 if loaded else 14,
            seed=seed,
            context=context,
            burst_rounds=5 if loaded else 0,
        )

    @property
    def digest(self) -> str:
        """A short stable name, the same in every process."""
        return digest(replace(self, burst_rounds=0).to_json(), length=12)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; a policy that version 0.1 had is described, and keyed, as it was then."""
        values = asdict(self)
        kept = {name: v for name, v in values.items() if name not in _ADDED or v != _ADDED[name]}
        return {_STORED_AS.get(name, name): value for name, value in kept.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Return the policy that :meth:`to_json` described.

        Raises:
            UsageError: A field is unknown or its value invalid.
        """
        named = {stored: name for name, stored in _STORED_AS.items()}
        return cls(**_known_fields(cls, {named.get(name, name): value for name, value in data.items()}))


@dataclass(frozen=True)
class Timing:
    """The summary of one entry's samples; times are microseconds per launch.

    Attributes:
        median_us: Median over the rounds.
        low_us: Lower end of the median's 95 % interval.
        high_us: Upper end.
        samples: Rounds that it ran in.
        reference_us: Median of the reference over the same rounds; None without a reference.
        ratio: Median of the paired ratios reference / own: above 1 is faster than the reference.
        ratio_low: Lower end of that median's 95 % interval.
        ratio_high: Upper end.
        sm_clock_mhz: Median SM clock, read right after its replays; None where it cannot be read.
        rounds_power_w: Mean power of the GPU over the rounds of all entries: a fact of the run, not of this
            entry, since entries alternate faster than power can be read.
        power_w: Mean power of the GPU while this entry alone ran; None if its energy was not measured.
        energy_mj: Millijoules per launch meanwhile; None likewise.
        energy_low_mj: The least that it may be: the lower of two measurements, less what the counter's edges
            leave open.
        energy_high_mj: The most.
        reference: What the reference is, such as ``torch.mm``.
        steady_us: Median after the drift that all entries share was divided out of each round; for comparing
            entries of one run. None if nothing ran beside it.
        steady_low_us: Lower end of that median's 95 % interval.
        steady_high_us: Upper end.
        contended_by: Other processes that were seen to use the GPU meanwhile, in words; empty if none was.
        predecessor_us: Median time of what ran before each launch, which is not in the times above; None
            where launches followed one another.
        burst_us: Median in bursts, without the drift that all entries share; None if there were none.
        burst_low_us: Lower end of that median's 95 % interval.
        burst_high_us: Upper end.
        burst_ratio: Median of the paired ratios reference / own in bursts.
        burst_clock_mhz: Median SM clock in bursts.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: int
    reference_us: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    sm_clock_mhz: float | None = None
    rounds_power_w: float | None = None
    power_w: float | None = None
    energy_mj: float | None = None
    energy_low_mj: float | None = None
    energy_high_mj: float | None = None
    reference: str = ""
    steady_us: float | None = None
    steady_low_us: float | None = None
    steady_high_us: float | None = None
    contended_by: str = ""
    predecessor_us: float | None = None
    burst_us: float | None = None
    burst_low_us: float | None = None
    burst_high_us: float | None = None
    burst_ratio: float | None = None
    burst_clock_mhz: float | None = None

    @classmethod
    def of(
        cls,
        own_us: Sequence[float],
        reference_us: Sequence[float] = (),
        *,
        clocks_mhz: Sequence[float] = (),
        rounds_power_w: float | None = None,
        reference: str = "",
        drift: Sequence[float] = (),
        predecessor_us: Sequence[float] = (),
    ) -> Timing:
        """Summarise samples; ``reference_us`` and ``drift`` are empty or hold the same rounds.

        Raises:
            MeasureError: There is no sample, or the two do not pair.
        """
        own = median_interval(own_us)
        if not own.low > 0:
            raise MeasureError(f"a launch took {own.low} us; times must be positive")
        ratio = ratio_interval(reference_us, own_us) if reference_us else None
        steady = steady_interval(own_us, drift) if drift else None
        return cls(
            median_us=own.mid,
            low_us=own.low,
            high_us=own.high,
            samples=len(own_us),
            reference_us=median(reference_us) if reference_us else None,
            ratio=ratio.mid if ratio else None,
            ratio_low=ratio.low if ratio else None,
            ratio_high=ratio.high if ratio else None,
            sm_clock_mhz=median(clocks_mhz) if clocks_mhz else None,
            rounds_power_w=rounds_power_w,
            reference=reference,
            steady_us=steady.mid if steady else None,
            steady_low_us=steady.low if steady else None,
            steady_high_us=steady.high if steady else None,
            predecessor_us=median(predecessor_us) if predecessor_us else None,
        )

    def with_energy(self, energy_mj: Interval, power_w: float) -> Timing:
        """Return this timing with its isolated energy: millijoules per launch, and watts meanwhile."""
        return replace(
            self,
            power_w=power_w,
            energy_mj=energy_mj.mid,
            energy_low_mj=energy_mj.low,
            energy_high_mj=energy_mj.high,
        )

    def with_bursts(self, bursts: Timing) -> Timing:
        """Return this timing with what rounds of bursts said of the same entry."""
        time = bursts.paired
        return replace(
            self,
            burst_us=time.mid,
            burst_low_us=time.low,
            burst_high_us=time.high,
            burst_ratio=bursts.ratio,
            burst_clock_mhz=bursts.sm_clock_mhz,
        )

    @property
    def keeps_up(self) -> bool:
        """Whether it is known to lose nothing to the reference when settled, and little in bursts."""
        return (self.ratio or 0.0) >= 1 and (self.burst_ratio or 0.0) >= 1 - _KEEPING_UP

    @property
    def bursts(self) -> Interval | None:
        """Microseconds in bursts, for comparing entries of one run; None if there were none."""
        if self.burst_us is None or self.burst_low_us is None or self.burst_high_us is None:
            return None
        return Interval(self.burst_low_us, self.burst_us, self.burst_high_us)

    @property
    def energy(self) -> Interval | None:
        """Millijoules per launch with their spread; None if they were not measured."""
        if self.energy_mj is None or self.energy_low_mj is None or self.energy_high_mj is None:
            return None
        return Interval(self.energy_low_mj, self.energy_mj, self.energy_high_mj)

    def cost(self, objective: str) -> Interval | None:
        """Return what ``objective`` makes smallest, for comparing entries of one run.

        Microseconds without the drift between rounds for ``time``, millijoules per launch for ``energy``,
        their product for ``edp``; None where it was not measured.
        """
        if objective == "time":
            return self.paired
        energy, time = self.energy, self.paired
        if energy is None or objective == "energy":
            return energy
        return Interval(energy.low * time.low, energy.mid * time.mid, energy.high * time.high)

    @property
    def interval(self) -> Interval:
        """The median and its interval, in microseconds."""
        return Interval(self.low_us, self.median_us, self.high_us)

    @property
    def paired(self) -> Interval:
        """Microseconds with the drift between rounds removed, for comparing entries of one run.

        It is the steady time where there is one, else the reference's median over the paired ratio; without
        a reference, the same as :attr:`interval`.
        """
        if self.steady_us is not None and self.steady_low_us is not None and self.steady_high_us is not None:
            return Interval(self.steady_low_us, self.steady_us, self.steady_high_us)
        if (
            self.reference_us is None
            or self.ratio is None
            or self.ratio_low is None
            or self.ratio_high is None
        ):
            return self.interval
        base = self.reference_us
        return Interval(base / self.ratio_high, base / self.ratio, base / self.ratio_low)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        """Return the timing that :meth:`to_json` described.

        Records from before isolated measurements called the mean over all rounds the entry's own power, and
        multiplied it with the time; the product is dropped.

        Raises:
            UsageError: A field is unknown.
        """
        values = _known_fields(cls, data)
        if "rounds_power_w" not in values:
            values |= {"rounds_power_w": values.get("power_w"), "power_w": None, "energy_mj": None}
        return cls(**values)


def cost_ratio(reference: Timing, own: Timing, objective: str) -> Interval | None:
    """Return cost of ``reference`` over that of ``own``, cautiously: above 1 means that ``own`` is better.

    None where one of them lacks it.
    """
    a, b = reference.cost(objective), own.cost(objective)
    if a is None or b is None:
        return None
    return Interval(a.low / b.high, a.mid / b.mid, a.high / b.low)


def against(reference: Timing | None, own: Timing, objective: str) -> Interval | None:
    """Return cost of the baseline over that of ``own``; times are paired round by round.

    None where it is not known.
    """
    if objective != "time":
        return None if reference is None else cost_ratio(reference, own, objective)
    if own.ratio is None or own.ratio_low is None or own.ratio_high is None:
        return None
    return Interval(own.ratio_low, own.ratio, own.ratio_high)


def _known_fields(cls: type[Policy] | type[Timing], data: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(data) - {f.name for f in fields(cls)})
    if unknown:
        raise UsageError(f"{cls.__name__.lower()} has no field {', '.join(unknown)}")
    return dict(data)
