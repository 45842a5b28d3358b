"""The result of timing one set of candidates, which travels from the measuring child to the caller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cutegen.digest import Json
from cutegen.measure.candidate import CheckResult
from cutegen.measure.timing import Timing

__all__ = ["TimingRun"]


@dataclass(frozen=True)
class TimingRun(Mapping[str, Timing]):
    """The timings of one call, by candidate name, with what belongs to all of them.

    Attributes:
        timings: Of the candidates that ran.
        reference: Of the baseline, from the same rounds.
        failures: Candidates that could not be timed, with the reason.
        rounds: Rounds run.
        settle_s: Seconds of burn-in.
        settled: Whether the clock was seen to be stable; None without burn-in.
    """

    timings: Mapping[str, Timing]
    reference: Timing
    failures: Mapping[str, CheckResult] = field(default_factory=dict)
    rounds: int = 0
    settle_s: float = 0.0
    settled: bool | None = None

    def contended(self, who: str) -> TimingRun:
        """Return this run with every timing marked as made while ``who`` used the GPU."""
        timings = {name: replace(timing, contended_by=who) for name, timing in self.timings.items()}
        return replace(self, timings=timings, reference=replace(self.reference, contended_by=who))

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "timings": {name: timing.to_json() for name, timing in self.timings.items()},
            "reference": self.reference.to_json(),
            "failures": {name: failure.to_json() for name, failure in self.failures.items()},
            "rounds": self.rounds,
            "settle_s": self.settle_s,
            "settled": self.settled,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], failures: Mapping[str, CheckResult]) -> TimingRun:
        """Return the run that :meth:`to_json` described, with ``failures`` from before it."""
        failed = {name: CheckResult.from_json(failure) for name, failure in data["failures"].items()}
        return cls(
            timings={name: Timing.from_json(timing) for name, timing in data["timings"].items()},
            reference=Timing.from_json(data["reference"]),
            failures={**failures, **failed},
            rounds=data["rounds"],
            settle_s=data["settle_s"],
            settled=data["settled"],
        )

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.timings)

    def __len__(self) -> int:
        return len(self.timings)
