"""How a timing was made and what it says: the policy that keys every timing, and the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from cutegen.digest import Json, digest
from cutegen.errors import MeasureError, UsageError
from cutegen.stats import Interval, median, median_interval, ratio_interval

__all__ = ["Policy", "Timing"]

_CHOICES = {
    "launch": ("graph",),
    "l2": ("cold",),
    "clock": ("settled", "burst"),
    "distribution": ("uniform",),
}


@dataclass(frozen=True)
class Policy:
    """Everything that decides what a timing means; two timings compare only under equal policies.

    Attributes:
        launch: ``graph``: launches are replayed from a CUDA graph, so the host does not limit them.
        l2: ``cold``: operands rotate through more than three times the L2 cache.
        clock: ``settled`` (the GPU is loaded until its clock holds) or ``burst`` (it only leaves idle).
        distribution: ``uniform``: operands are uniform in [-1, 1); data changes power and so clocks.
        rounds: Most rounds; each runs everyone and the reference once, in random order.
        min_rounds: Fewest rounds before ``precision`` may stop it.
        round_us: GPU time that one entry takes in one round, in microseconds (at least one graph).
        settle_s: Longest burn-in, in seconds; a burst takes 0.05 of them at most.
        precision: Stop when every interval's half width is under this fraction of its median; 0 never stops.
        prune: Drop whoever is slower than the best by more than this fraction, already after one round;
            0 drops nobody.
        seed: Of the order within rounds.

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
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise UsageError(f"policy {name} is {getattr(self, name)!r}; valid: {', '.join(valid)}")
        if not 1 <= self.min_rounds <= self.rounds:
            raise UsageError(
                f"policy wants {self.min_rounds} to {self.rounds} rounds; valid: 1 or more, in order"
            )
        for name in ("round_us", "settle_s", "precision", "prune"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"policy {name} is {getattr(self, name)!r}; it must not be negative")

    @classmethod
    def screen(cls, seed: int = 0, *, loaded: bool = False) -> Policy:
        """Return the policy that finds the promising few of many: three short rounds.

        Args:
            seed: Of the order within rounds.
            loaded: Whether to load the GPU first, up to a second, as work that meets its power limit would.
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
        )

    @classmethod
    def final(cls, seed: int = 0) -> Policy:
        """Return the policy that decides among the few: settled clocks, 7 to 15 longer rounds."""
        return cls(seed=seed)

    @property
    def digest(self) -> str:
        """A short stable name, the same in every process."""
        return digest(self.to_json(), length=12)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Return the policy that :meth:`to_json` described.

        Raises:
            UsageError: A field is unknown or its value invalid.
        """
        return cls(**_known_fields(cls, data))


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
        power_w: Mean power of the GPU over all rounds (entries alternate faster than power can be read).
        energy_mj: Millijoules per launch: ``power_w`` times ``median_us``.
        reference: What the reference is, such as ``torch.mm``.
        steady_us: Median after the drift that everyone shared was divided out of each round; for comparing
            entries of one run. None if nothing ran beside it.
        steady_low_us: Lower end of that median's 95 % interval.
        steady_high_us: Upper end.
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
    power_w: float | None = None
    energy_mj: float | None = None
    reference: str = ""
    steady_us: float | None = None
    steady_low_us: float | None = None
    steady_high_us: float | None = None

    @classmethod
    def of(
        cls,
        own_us: Sequence[float],
        reference_us: Sequence[float] = (),
        *,
        clocks_mhz: Sequence[float] = (),
        power_w: float | None = None,
        reference: str = "",
        drift: Sequence[float] = (),
    ) -> Timing:
        """Summarise samples; ``reference_us`` and ``drift`` are empty or hold the same rounds.

        Raises:
            MeasureError: There is no sample, or the two do not pair.
        """
        own = median_interval(own_us)
        if not own.low > 0:
            raise MeasureError(f"a launch took {own.low} us; times must be positive")
        ratio = ratio_interval(reference_us, own_us) if reference_us else None
        steady = (
            median_interval([us / factor for us, factor in zip(own_us, drift, strict=True)])
            if drift
            else None
        )
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
            power_w=power_w,
            energy_mj=power_w * own.mid / 1000 if power_w is not None else None,
            reference=reference,
            steady_us=steady.mid if steady else None,
            steady_low_us=steady.low if steady else None,
            steady_high_us=steady.high if steady else None,
        )

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

        Raises:
            UsageError: A field is unknown.
        """
        return cls(**_known_fields(cls, data))


def _known_fields(cls: type[Policy] | type[Timing], data: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(data) - {f.name for f in fields(cls)})
    if unknown:
        raise UsageError(f"{cls.__name__.lower()} has no field {', '.join(unknown)}")
    return dict(data)
