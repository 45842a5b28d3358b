"""The summary of one entry's samples, and the comparison of two entries by cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cutegen.digest import Json
from cutegen.errors import MeasureError
from cutegen.measure.policy import require_known_fields
from cutegen.measure.statistics import Interval, median, median_interval, ratio_interval, steady_interval

__all__ = ["Timing", "against", "cost_ratio"]

#: How far an entry may be behind the reference in bursts and still keep up with it, as a fraction. Source:
#: the requirement that no winner be 2 % behind in bursts, less the uncertainty of a few burst rounds.
_KEEPING_UP = 0.015


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
        rounds_power_w: Mean power of the GPU over the rounds of all entries. It says nothing of this entry
            alone: entries alternate faster than power can be read.
        power_w: Mean power of the GPU while only this entry ran; None if its energy was not measured.
        energy_mj: Millijoules per launch meanwhile; None if it was not measured.
        energy_low_mj: Lower bound: the lower of two measurements, less what the counter's edges leave open.
        energy_high_mj: Upper bound.
        reference: What the reference is, such as ``torch.mm``.
        steady_us: Median after each round's drift, which all entries share, was divided out; for comparing
            entries of one run. None if nothing ran beside it.
        steady_low_us: Lower end of that median's 95 % interval.
        steady_high_us: Upper end.
        contended_by: Other processes that were seen to use the GPU meanwhile, in words; empty if none was.
        predecessor_us: Median time of what ran before each launch, which is subtracted from the times above;
            None for launches back to back.
        burst_us: Median in bursts, without the shared drift; None without bursts.
        burst_low_us: Lower end of that median's 95 % interval.
        burst_high_us: Upper end.
        burst_ratio: Median of the paired ratios reference / own in bursts.
        burst_clock_mhz: Median SM clock in bursts.
        back_to_back_us: Median of launches back to back, without the shared drift, where they were timed
            beside those of another context; else None.
        back_to_back_low_us: Lower end of that median's 95 % interval.
        back_to_back_high_us: Upper end.
        back_to_back_ratio: Median of the paired ratios reference / own of launches back to back.
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
    back_to_back_us: float | None = None
    back_to_back_low_us: float | None = None
    back_to_back_high_us: float | None = None
    back_to_back_ratio: float | None = None

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
        """Return this timing with the times of the same entry in rounds of bursts."""
        time = bursts.paired
        return replace(
            self,
            burst_us=time.mid,
            burst_low_us=time.low,
            burst_high_us=time.high,
            burst_ratio=bursts.ratio,
            burst_clock_mhz=bursts.sm_clock_mhz,
        )

    def with_back_to_back(self, launches: Timing) -> Timing:
        """Return this timing with the times of the same entry in launches back to back."""
        time = launches.paired
        return replace(
            self,
            back_to_back_us=time.mid,
            back_to_back_low_us=time.low,
            back_to_back_high_us=time.high,
            back_to_back_ratio=launches.ratio,
        )

    @property
    def keeps_up(self) -> bool:
        """Whether it is not slower than the reference when settled, and not by much in bursts."""
        return (self.ratio or 0.0) >= 1 and (self.burst_ratio or 0.0) >= 1 - _KEEPING_UP

    @property
    def bursts(self) -> Interval | None:
        """Microseconds in bursts, for comparing entries of one run; None if there were none."""
        return _interval(self.burst_low_us, self.burst_us, self.burst_high_us)

    @property
    def back_to_back(self) -> Interval | None:
        """Microseconds back to back, for comparing entries of one run; None if they were not timed so."""
        return _interval(self.back_to_back_low_us, self.back_to_back_us, self.back_to_back_high_us)

    @property
    def energy(self) -> Interval | None:
        """Millijoules per launch with their spread; None if they were not measured."""
        return _interval(self.energy_low_mj, self.energy_mj, self.energy_high_mj)

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
        steady = _interval(self.steady_low_us, self.steady_us, self.steady_high_us)
        if steady is not None:
            return steady
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

        Old records, from before isolated measurements, hold the mean power over all rounds as the entry's
        own, and its product with the time as energy. The power is moved to ``rounds_power_w``, the energy
        dropped.

        Raises:
            UsageError: A field is unknown.
        """
        require_known_fields(cls, data)
        values = dict(data)
        if "rounds_power_w" not in values:
            values |= {"rounds_power_w": values.get("power_w"), "power_w": None, "energy_mj": None}
        return cls(**values)


def _interval(low: float | None, mid: float | None, high: float | None) -> Interval | None:
    if low is None or mid is None or high is None:
        return None
    return Interval(low, mid, high)


def cost_ratio(reference: Timing, own: Timing, objective: str) -> Interval | None:
    """Return the cost of ``reference`` over that of ``own``: above 1 means that ``own`` is better.

    The interval combines the extremes of both. None if one of the costs was not measured.
    """
    a, b = reference.cost(objective), own.cost(objective)
    if a is None or b is None:
        return None
    return Interval(a.low / b.high, a.mid / b.mid, a.high / b.low)


def against(reference: Timing | None, own: Timing, objective: str) -> Interval | None:
    """Return the cost of the baseline over that of ``own``; None if it was not measured.

    Times are paired round by round.
    """
    if objective != "time":
        return None if reference is None else cost_ratio(reference, own, objective)
    if own.ratio is None or own.ratio_low is None or own.ratio_high is None:
        return None
    return Interval(own.ratio_low, own.ratio, own.ratio_high)
