"""What a run of the GPU tests came to: by file, what failed, and why others were skipped."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tools.gpu_test_parts.outcomes import OUTCOMES, Ended, file_of

__all__ = ["GPU_TESTS", "counts", "seconds_of_tests", "summary", "without_places"]

#: What such a results file says that it is.
GPU_TESTS = "gpu tests"


def counts(ended: Iterable[Ended]) -> str:
    """Return how many ended how, in words."""
    found = Counter(each.outcome for each in ended)
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in reversed(OUTCOMES) if found[outcome])


def summary(ended: Iterable[Ended]) -> dict[str, Any]:
    """Return what a results file says of tests: counts in all and by file, what failed, what was skipped."""
    results = sorted(ended, key=lambda each: each.test)
    files: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for each in results:
        files.setdefault(file_of(each.test), Counter())[each.outcome] += 1
        seconds[file_of(each.test)] += each.seconds  # type: ignore[assignment]
    reasons = Counter(without_places(each.message) for each in results if each.outcome == "skipped")
    bad = [
        {"test": each.test, "outcome": each.outcome, "message": without_places(each.message)}
        for each in results
        if each.is_bad
    ]
    return {
        "outcomes": dict(Counter(each.outcome for each in results)),
        "bad": bad,
        "skipped": dict(reasons.most_common()),
        "files": {
            name: {**found, "process_seconds": round(float(seconds[name]), 1)}
            for name, found in files.items()
        },
    }


def without_places(message: str) -> str:
    """Return an error with files as they are imported, without the folders of the machine that it is of."""
    folders = {path.rstrip("/") for path in sys.path if path.startswith("/")} - {""}
    for folder in sorted(folders, key=len, reverse=True):
        message = message.replace(folder + "/", "")
    return message


def seconds_of_tests(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return how long a test took, by its file, in the run of a results file."""
    found = {}
    for name, file in facts["files"].items():
        ran = sum(file.get(outcome, 0) for outcome in OUTCOMES)
        found[name] = file["process_seconds"] / max(1, ran)
    return found
