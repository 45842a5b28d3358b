"""Problems that differ in one size: ``gemm 1..8192x7168x2048 bf16 kk`` holds every m from 1 to 8192."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from cutegen.errors import ProblemError
from cutegen.families.registry import find_family, parse_problem
from cutegen.family import Problem
from cutegen.text import shown

__all__ = [
    "MOST_STEP",
    "Range",
    "is_range",
    "kind_over",
    "overlapping",
    "parse_range",
    "range_ends",
    "range_of",
]

#: Between two numbers that are the ends of a range; both belong to it.
_DOTS = ".."
_DIGITS = "0123456789"
#: More digits than any size has.
_MOST_DIGITS = 18
#: So far from a size there is another that the layout allows. Source: the largest alignment of a size, of
#: operands with scale factors along k, is 128.
MOST_STEP = 128


@dataclass(frozen=True)
class Range:
    """Problems of one kind, from ``low`` to ``high``, that differ in one size only.

    It holds every problem between the two that there is: where a layout asks for multiples of 8, only those.
    Of n = 9 to 63 it holds those whose rows of D are as unaligned as at 9; a range that says ``unaligned``
    holds the multiples of 8 as well.

    Attributes:
        low: The problem of the smallest size.
        high: The problem of the largest.

    Raises:
        ProblemError: The two are no ends of a range; the message says why and what would be valid.
    """

    low: Problem
    high: Problem

    def __post_init__(self) -> None:
        low, high = self.low, self.high
        differing = [name for name, value in low.sizes.items() if high.sizes.get(name) != value]
        if low.family != high.family or len(differing) > 1:
            raise ProblemError(f"{low} and {high} are no ends of a range: they may differ in one size only")
        if not differing:
            raise ProblemError(f"a range from {low} to itself has one size; write the size alone")
        size = differing[0]
        first, last = low.sizes[size], high.sizes[size]
        if first > last:
            raise ProblemError(f"range {first}..{last} of {size} is reversed; write {last}..{first}")
        declared = {known.name: known for known in find_family(low.family).sizes}
        if not declared[size].free:
            free = ", ".join(name for name, known in declared.items() if known.free)
            raise ProblemError(
                f"range {first}{_DOTS}{last}: {size} of {low.family} is compiled in, so no kernel serves "
                f"several; valid: a range of {free}"
            )
        if (self.at(first), self.at(last)) != (low, high):
            raise ProblemError(
                f"range {first}{_DOTS}{last} of {size}: {low} and {high} need different kernels; give two "
                "ends of equal alignment and options"
            )

    @cached_property
    def size(self) -> str:
        """Name of the size that differs."""
        return next(name for name, value in self.low.sizes.items() if self.high.sizes[name] != value)

    @property
    def first(self) -> int:
        """The smallest value of the size."""
        return self.low.sizes[self.size]

    @property
    def last(self) -> int:
        """The largest value."""
        return self.high.sizes[self.size]

    def __contains__(self, problem: Problem) -> bool:
        if problem.signature != self.low.signature:
            return False
        return problem == self.at(problem.sizes.get(self.size, 0))

    @cached_property
    def _model(self) -> Problem:
        """The end that states all options: the other may have unaligned rows by its size alone."""
        follows = self.low.with_sizes(**{self.size: self.last}) == self.high
        return self.low if follows else self.high

    def at(self, value: int) -> Problem | None:
        """Return the problem of that size; None if it is outside or the layout does not allow it."""
        if not self.first <= value <= self.last:
            return None
        try:
            problem = self._model.with_sizes(**{self.size: value})
        except ProblemError:
            return None
        return problem if problem.signature == self.low.signature else None

    def at_least(self, value: int) -> Problem | None:
        """Return the problem of the smallest size from ``value`` on; None if there is none in the range."""
        value = max(value, self.first)
        return self._first(range(value, min(value + MOST_STEP, self.last + 1)))

    def at_most(self, value: int) -> Problem | None:
        """Return the problem of the largest size up to ``value``; None if there is none in the range."""
        value = min(value, self.last)
        return self._first(range(value, max(value - MOST_STEP, self.first - 1), -1))

    def _first(self, values: Iterable[int]) -> Problem | None:
        return next((found for value in values if (found := self.at(value)) is not None), None)

    @cached_property
    def kind(self) -> Hashable:
        """What :func:`kind_over` says of its problems: equal for ranges that overlap."""
        return kind_over(self.size, self.low)

    def overlaps(self, other: Range) -> bool:
        """Return whether both are over one size and hold the same problem."""
        if self.kind != other.kind:
            return False
        first, last = max(self.first, other.first), min(self.last, other.last)
        shared = (self.at(value) for value in range(first, min(first + MOST_STEP, last + 1)))
        return any(problem is not None and problem in other for problem in shared)

    @cached_property
    def pattern(self) -> str:
        """The line of its problems with ``*`` for the size."""
        return self._line("*")

    def __str__(self) -> str:
        return self._line(f"{self.first}{_DOTS}{self.last}")

    def _line(self, word: str) -> str:
        family, _, *rest = str(self._model).split(" ")
        low, high = (str(end).split(" ")[1].split("x") for end in (self.low, self.high))
        parts = zip(low, high, strict=True)
        return " ".join([family, "x".join(word if a != b else a for a, b in parts), *rest])


def kind_over(size: str, problem: Problem) -> Hashable:
    """Return what all problems of a range over ``size`` that holds ``problem`` have in common.

    Lines do not tell, which say ``unaligned`` only where the sizes do not.
    """
    others = tuple(item for item in problem.sizes.items() if item[0] != size)
    return problem.family, problem.signature, size, others


def overlapping(ranges: Iterable[Range]) -> tuple[Range, Range] | None:
    """Return two of ``ranges`` that hold the same problem, None if there are none."""
    by_kind: dict[Hashable, list[Range]] = {}
    for each in sorted(ranges, key=lambda each: each.first):
        by_kind.setdefault(each.kind, []).append(each)
    pairs = (pair for alike in by_kind.values() for pair in combinations(alike, 2))
    return next((pair for pair in pairs if pair[0].overlaps(pair[1])), None)


def is_range(text: object) -> bool:
    """Return whether ``text`` is meant to be a range, such as ``1..8192`` or a line with one."""
    return isinstance(text, str) and _DOTS in text


def range_ends(text: str) -> tuple[str, str]:
    """Return ``text`` with its one range replaced by the first end, then by the second.

    Raises:
        ProblemError: It holds no range, or several, or one without two ends.
    """
    before, _, after = text.partition(_DOTS)
    head, tail = before.rstrip(_DIGITS), after.lstrip(_DIGITS)
    low, high = before[len(head) :], after[: len(after) - len(tail)]
    if not low or not high or "." in head + tail:
        raise ProblemError(f"{shown(text)} is no range, or has several; write for example 1{_DOTS}8192")
    return f"{head}{low}{tail}", f"{head}{high}{tail}"


def range_of(sizes: Mapping[str, int | str], make: Callable[[Mapping[str, int]], Problem]) -> Range:
    """Return the range of sizes by name, one of which is text such as ``1..8192``.

    Args:
        sizes: By name.
        make: Returns the problem of such sizes.

    Raises:
        ProblemError: Not one of them is a range, or no kernel serves a range of it.
    """
    texts = {name: value for name, value in sizes.items() if isinstance(value, str)}
    numbers = {name: value for name, value in sizes.items() if isinstance(value, int)}
    if len(texts) != 1:
        raise ProblemError(f"{' and '.join(texts) or 'no size'} given as ranges; valid: a range of one size")
    [(name, text)] = texts.items()
    low, high = (_integer(end) for end in range_ends(text))
    return Range(make({**numbers, name: low}), make({**numbers, name: high}))


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS or digits.strip(_DIGITS):
        raise ProblemError(f"{shown(digits)} is no end of a range; write for example 1{_DOTS}8192")
    return int(digits)


def parse_range(line: str) -> Range:
    """Return the range that prints as ``line``.

    Raises:
        ProblemError: The line is no problem with a range for one size.
    """
    low, high = range_ends(line)
    return Range(parse_problem(low), parse_problem(high))
