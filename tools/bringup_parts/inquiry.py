"""A broken tier in, findings out: what its failures have in common, one fault after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cutegen.digest import Json
from cutegen.space import Space
from tools.bringup_parts.lab import Lab, Record
from tools.bringup_parts.pin_down import Finding, explains, holds, pin_down
from tools.bringup_parts.points import Point, difference, with_values
from tools.bringup_parts.tiers import Tier

__all__ = ["Inquiry", "Verdict", "inquire"]

#: Runs after which a point that does not fail again is given up.
ATTEMPTS = 10
#: Runs of a failing point that tell how often it fails.
PROBES = 3
#: Runs for an answer, for each that it takes on average to see the failure: one pass in 50 would be luck.
#: Only points that pass take all of them, and those are quick.
CERTAIN = 4
#: Further answers about the pair that a finding rests on.
AGAIN = 2
#: How many times as often the causes of a finding are asked about in the end.
SURE = 3
#: Searches for one fault, each with three times as many runs for an answer, if that pair does not hold.
ROUNDS = 3


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
        space: Says what is valid.
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
        tries = self._tries_for(point)
        if tries is None:
            return Finding(point)
        finding = Finding(point)
        for _ in range(ROUNDS):
            self._trust(tries)
            self._known[point] = True
            finding = self._verified(pin_down(point, self._space, known, self.fails))
            if finding.passing is None or (finding.again == (AGAIN, AGAIN, AGAIN) and self._holds(finding)):
                break
            tries *= 3  # some answer was luck
        return finding

    def _tries_for(self, point: Point) -> int | None:
        """Return how many runs tell whether points like this fail; None if it does not fail again."""
        failed = [self._run(point, 1) is True for _ in range(PROBES)]
        while not any(failed) and len(failed) < ATTEMPTS:
            failed.append(self._run(point, 1) is True)
        return -(-CERTAIN * len(failed) // sum(failed)) if any(failed) else None

    def _trust(self, tries: int) -> None:
        """Ask that often from now on, and forget answers that took less."""
        if tries > self._tries:
            self._known.clear()
            self._tries = tries

    def _holds(self, finding: Finding) -> bool:
        """Return whether each cause still mends the failure when that is asked more often."""
        assert finding.failing is not None
        mended = (
            with_values(finding.failing, {cause.name: cause.passes_with[0]}, self._space)
            for cause in finding.causes
        )
        return not any(point and self._run(point, SURE * self._tries) for point in mended)

    def _verified(self, finding: Finding) -> Finding:
        """Return the finding with what further runs of its pair say."""
        if finding.failing is None or finding.passing is None:
            return finding
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
