"""Which tests one process runs after the other: files, and slices of those that would take too long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tools.gpu_test_parts.outcomes import file_of

__all__ = ["Part", "by_file", "slices"]

#: Seconds that a process takes before its first test: torch, the CUDA context, the measuring process.
START_S = 10.0
#: Seconds of a test of a file that was never timed.
UNKNOWN_S = 2.0


@dataclass(frozen=True)
class Part:
    """What one process runs.

    Attributes:
        name: Of the file, and which of its slices; of the first of several files.
        tests: Node ids, those of a file in its order.
        seconds: How long it may take, so that long ones begin first.
    """

    name: str
    tests: tuple[str, ...]
    seconds: float


def by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    """Return tests by their file."""
    found: dict[str, list[str]] = {}
    for test in tests:
        found.setdefault(file_of(test), []).append(test)
    return found


def slices(
    tests: Iterable[str], seconds: Mapping[str, float], processes: int, suffix: str = ""
) -> list[Part]:
    """Return parts for so many processes, the longest first; where one runs, each file is a part.

    A slice repeats the start of a process and what its file does once: files are cut only where one process
    would still run when the others have nothing left. Short files share a process, and its start.

    Args:
        tests: Node ids.
        seconds: Of one test, by file, where that is known.
        processes: That run side by side.
        suffix: Of the names of all parts.
    """
    files = by_file(tests)
    cost = {file: seconds.get(file, UNKNOWN_S) * len(listed) for file, listed in files.items()}
    share = max(2 * START_S, sum(cost.values()) / processes / 3)
    parts = []
    for file, listed in files.items():
        count = min(len(listed), math.ceil(cost[file] / share)) if processes > 1 else 1
        parts += _cut(Path(file).stem + suffix, listed, max(1, count), cost[file])
    parts.sort(key=lambda part: -part.seconds)
    return _together(parts, share) if processes > 1 else parts


def _together(parts: Sequence[Part], most: float) -> list[Part]:
    """Return parts, longest first, with those in one that take ``most`` seconds together, starts apart."""
    found: list[Part] = []
    for part in parts:
        took = part.seconds - START_S
        at = next((i for i, other in enumerate(found) if other.seconds + took <= START_S + most), None)
        if at is None:
            found.append(part)
        else:
            other = found[at]
            name = f"{other.name.partition('+')[0]}+{len(by_file((*other.tests, *part.tests))) - 1}"
            found[at] = Part(name, (*other.tests, *part.tests), other.seconds + took)
    return sorted(found, key=lambda part: -part.seconds)


def _cut(name: str, tests: Sequence[str], count: int, seconds: float) -> list[Part]:
    """Return ``count`` slices of a file, which differ by one test at most."""
    ends = [len(tests) * at // count for at in range(count + 1)]
    return [
        Part(
            f"{name}.{at}" if count > 1 else name,
            tuple(tests[begin:end]),
            START_S + seconds * (end - begin) / len(tests),
        )
        for at, (begin, end) in enumerate(pairwise(ends), start=1)
    ]
