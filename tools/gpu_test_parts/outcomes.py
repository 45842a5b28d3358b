"""What came of each test, from the lines that tools/gpu_test_parts/reporting.py wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BAD", "NOT_BEGUN", "OUTCOMES", "Ended", "file_of", "merge", "read_events"]

#: How a test may end, the worst first: what comes first here stands, whatever else is said of the test.
OUTCOMES = ("error", "failed", "xfailed", "skipped", "passed", "unfinished")
#: Those of which a good run has none.
BAD = ("error", "failed", "unfinished")

#: Why a test that no event tells about is unfinished.
NOT_BEGUN = "it did not begin"


@dataclass(frozen=True)
class Ended:
    """How one test ended.

    Attributes:
        test: Its node id.
        outcome: One of :data:`OUTCOMES`; ``unfinished`` where its process ended first, or it never began.
        seconds: With setup and teardown.
        message: The error, or the reason why it was skipped.
    """

    test: str
    outcome: str = "unfinished"
    seconds: float = 0.0
    message: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it failed, or nobody knows whether it would have passed."""
        return self.outcome in BAD

    def after(self, event: Mapping[str, Any]) -> Ended:
        """Return what the test came to once ``event`` is known as well."""
        outcome, message = self.outcome, self.message
        if event["outcome"] in OUTCOMES[: OUTCOMES.index(self.outcome)]:
            outcome, message = event["outcome"], event["message"]
        elif outcome == "unfinished":
            message = "it began"
        return Ended(self.test, outcome, self.seconds + event["seconds"], message)


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events that a process wrote; its last line may be cut off."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def merge(tests: Iterable[str], events: Iterable[Mapping[str, Any]]) -> list[Ended]:
    """Return what came of ``tests``, and of what else the events tell about, such as a file with an error."""
    found = {test: Ended(test, message=NOT_BEGUN) for test in tests}
    for event in events:
        name = event["test"]
        found[name] = found.get(name, Ended(name)).after(event)
    return list(found.values())
