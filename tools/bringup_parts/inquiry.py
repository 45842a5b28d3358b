"""A broken tier in, findings out: what its failures have in common, one fault after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cutegen.digest import Json
from cutegen.space import Space
from tools.bringup_parts.lab import Lab, Record
from tools.bringup_parts.pin_down import Finding, explains, holds, pin_down
from tools.bringup_parts.points import Point, difference
from tools.bringup_parts.tiers import Tier

__all__ = ["Inquiry", "Verdict", "inquire"]

#: Runs after which a point that does not fail again is given up.
ATTEMPTS = 10
#: Further runs of the pair that a finding rests on.
AGAIN = 2


@dataclass(frozen=True)
class Verdict:
    """A finding and what the trials of its tier say about it.

    Attributes:
        finding: What was found.
        explained: Failing trials that have what it names.
        contradicted: Passing trials that have it too.
    """

    finding: Finding
    explained: int
    contradicted: int

    def __str__(self) -> str:
        fails, passes, runs = self.finding.again
        words = (
            f"{self.finding}; so {self.explained} failing and {self.contradicted} passing trials of the tier"
        )
        return f"{words}; tried again: failed {fails} and passed {passes} of {runs}" if runs else words

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            **self.finding.to_json(),
            "explained": self.explained,
            "contradicted": self.contradicted,
        }


class Inquiry:
    """Answers whether points fail, remembers the answers, and asks often enough where failures are rare.

    Args:
        lab: Tries points.
        tier: The broken tier, as whose trials all run.
        space: Says what is legal.
    """

    def __init__(self, lab: Lab, tier: Tier, space: Space) -> None:
        self._lab = lab
        self._tier = tier
        self._space = space
        self._tries = 1
        self._known: dict[Point, bool | None] = {}

    def fails(self, point: Point) -> bool | None:
        """Return whether a point fails in any of some runs; None if nobody can tell."""
        if point not in self._known:
            self._known[point] = self._run(point, self._tries)
        return self._known[point]

    def _run(self, point: Point, runs: int) -> bool | None:
        for _ in range(runs):
            record = self._attempt(point)
            if record is None or not (record.ok or record.failed):
                return None
            if record.failed:
                return True
        return False

    def _attempt(self, point: Point) -> Record | None:
        return self._lab.attempt(point, self._tier, f"bisection of {self._tier.name}")

    def investigate(self, point: Point, known: Sequence[Point]) -> Finding:
        """Return why a point fails that was seen to fail once; ``known`` were seen to pass."""
        needed = next((n for n in range(1, ATTEMPTS + 1) if self._run(point, 1)), None)
        if needed is None:
            return Finding(point)
        tries = 1 if needed == 1 else 2 * needed
        if tries > self._tries:
            self._known.clear()  # what passed may have passed by luck
        self._tries = max(tries, self._tries)
        self._known[point] = True
        finding = pin_down(point, self._space, known, self.fails)
        if finding.passing is None:
            return finding
        assert finding.failing is not None
        fails = sum(self._run(finding.failing, self._tries) is True for _ in range(AGAIN))
        passes = sum(self._run(finding.passing, self._tries) is False for _ in range(AGAIN))
        return replace(finding, again=(fails, passes, AGAIN))


def inquire(
    inquiry: Inquiry,
    records: Sequence[Record],
    known: Sequence[Point],
    most: int,
    note: Callable[[Verdict], None],
) -> list[Verdict]:
    """Return up to ``most`` findings that between them explain the failing trials of a tier.

    Each starts from the failing trial that is nearest to one that passes; quick failures go before hangs.

    Args:
        inquiry: Tries points.
        records: The trials of the tier.
        known: Points that passed, in this tier or an earlier one.
        most: Most findings.
        note: Is told of each.
    """
    left = [record for record in records if record.failed]
    verdicts: list[Verdict] = []
    while left and len(verdicts) < most:
        start = min(left, key=lambda record: (record.outcome == "timeout", _distance(record.point, known)))
        finding = inquiry.investigate(start.point, known)
        explained = [record for record in left if explains(finding, record.point)]
        passing = [record for record in records if record.ok and holds(finding, record.point)]
        verdicts.append(Verdict(finding, len(explained), len(passing)))
        note(verdicts[-1])
        left = [record for record in left if record not in explained and record is not start]
    return verdicts


def _distance(point: Point, known: Sequence[Point]) -> int:
    return min(
        (len(difference(point, other)) for other in known if other.problem == point.problem), default=99
    )
