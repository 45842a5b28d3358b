"""The samples of some interleaved rounds, and the timings that follow from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cutegen.errors import MeasureError
from cutegen.measure.candidate import REFERENCE
from cutegen.measure.context import BACK_TO_BACK, PREDECESSOR
from cutegen.measure.statistics import common_drift
from cutegen.measure.stopping import Race
from cutegen.measure.timing import Timing

__all__ = ["COMMON", "Series"]

#: Entries that are no candidates: if one of them fails, nothing can be timed.
COMMON = (REFERENCE, PREDECESSOR)


class Series:
    """Rounds of one kind: their samples, clocks, and times of the kernel before each launch.

    Args:
        race: Decides which entries run again, and when to stop.
        round_us: GPU time that one entry takes in one round, in microseconds.

    Attributes:
        clocks: The SM clock after each sample of an entry, in MHz.
        before_us: The time of the kernel before each launch, microseconds per launch, by round.
    """

    def __init__(self, race: Race, round_us: float) -> None:
        self.race = race
        self.round_us = round_us
        self.clocks: dict[str, list[float]] = {name: [] for name in (*COMMON, *race.names)}
        self.before_us: list[float] = []

    def observe(self, samples: Mapping[str, float]) -> None:
        """Add one round.

        Raises:
            MeasureError: A launch took no time once that of the kernel before it is subtracted.
        """
        before = samples.get(PREDECESSOR, 0.0)
        if PREDECESSOR in samples:
            self.before_us.append(before)
        own = {name: us - before for name, us in samples.items() if name != PREDECESSOR}
        if lost := [name for name, us in own.items() if us <= 0]:
            raise MeasureError(
                f"{lost[0]} and the kernel before it took {samples[lost[0]]:.2f} us, no longer than the "
                f"{before:.2f} us of that kernel alone; measure launches {BACK_TO_BACK} instead"
            )
        self.race.observe(own.pop(REFERENCE), own)

    def timings(
        self, reference: str, *, power_w: float | None = None, without: Collection[str] = ()
    ) -> dict[str, Timing]:
        """Return the timing of each entry, the reference's first."""
        race, base = self.race, self.race.reference_samples
        entries = {
            REFERENCE: base,
            **{name: race.samples(name) for name in race.names if name not in without},
        }
        drift = common_drift(entries)
        return {
            name: Timing.of(
                samples,
                base[: len(samples)],
                clocks_mhz=self.clocks[name],
                rounds_power_w=power_w,
                reference=reference,
                drift=drift[: len(samples)],
                predecessor_us=self.before_us[: len(samples)],
            )
            for name, samples in entries.items()
        }
