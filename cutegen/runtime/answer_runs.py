"""What a table answers to every size of a range, as runs of sizes that one config serves by one rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from cutegen.arch import Arch
from cutegen.errors import UsageError
from cutegen.families.ranges import Range
from cutegen.families.registry import find_space
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import Answer, look_up

__all__ = ["AnswerRun", "answer_runs"]

#: Sizes that are looked up for one range. A lookup takes 0.4 ms, so these take a quarter of a minute.
MOST_SIZES = 32768


@dataclass(frozen=True)
class AnswerRun:
    """Sizes that follow one another and have the same answer.

    Attributes:
        first: The smallest of them.
        last: The largest.
        sizes: How many there are: a layout may ask for multiples of 8.
        answer: That of the smallest.
    """

    first: int
    last: int
    sizes: int
    answer: Answer


def answer_runs(
    asked: Range, table: Table | None, arch: Arch, sm_count: int, fallback: str = ""
) -> tuple[AnswerRun, ...]:
    """Return what ``table`` answers to each size of a range; every size is looked up, as a call would be.

    Args:
        asked: The sizes; those that the layout does not allow are left out.
        table: The table, if there is one that holds.
        arch: The target.
        sm_count: SMs of the GPU.
        fallback: Where PyTorch's own call answers, as :class:`~cutegen.runtime.dispatch.Dispatcher`.

    Raises:
        UsageError: There are too many sizes.
        ProblemError: No config computes one of them.
    """
    count = asked.last - asked.first + 1
    if count > MOST_SIZES:
        raise UsageError(
            f"{asked} spans {count} sizes; valid here: up to {MOST_SIZES}; ask for a part of it, such as "
            f"{asked.first}..{asked.first + MOST_SIZES - 1}"
        )
    space = find_space(asked.low.family, arch)
    problems = (asked.at(size) for size in range(asked.first, asked.last + 1))
    answers = (look_up(table, each, space, sm_count, fallback) for each in problems if each is not None)
    return tuple(_runs(asked.size, answers))


def _runs(size: str, answers: Iterator[Answer]) -> Iterator[AnswerRun]:
    for _, group in groupby(answers, key=lambda answer: (answer.how, answer.config)):
        alike = list(group)
        first, last = (answer.problem.sizes[size] for answer in (alike[0], alike[-1]))
        yield AnswerRun(first, last, len(alike), alike[0])
