"""Which entry of a dispatch table answers a problem: its own, a range, or a measured neighbour."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2
from typing import Any

from cutegen.errors import ConfigError
from cutegen.families.ranges import kind_over
from cutegen.families.registry import find_family
from cutegen.family import Problem
from cutegen.records.entry import Entry
from cutegen.records.range_entry import RangeEntry
from cutegen.space import Config

__all__ = ["Estimate", "Index", "Legal", "Lookup", "order_of"]

#: How far a neighbour's sizes may be, as a factor on each axis. Source: judgement; waves, and with them
#: the best tile, repeat within a few doublings but not beyond.
REACH = 4.0
#: Whether a config may be used for the problem that is looked up; it may raise ConfigError for "no".
Legal = Callable[[Config], bool]
#: Predicted microseconds of a config on that problem.
Estimate = Callable[[Config], float]


@dataclass(frozen=True)
class Lookup:
    """The answer of a table to a problem.

    Attributes:
        entry: The entry that answers; None means use the default config. Of a range, its entry for the
            problem.
        how: ``exact``; ``range``; ``bucket`` (same sizes rounded up to powers of two); ``nearest`` (a
            measured neighbour, perhaps with a plainer epilogue: see ``entry.problem``); or ``default``.
        skipped: Why closer entries could not answer, for people.
        within: The range that answers.
    """

    entry: Entry | None
    how: str
    skipped: tuple[str, ...] = ()
    within: RangeEntry | None = None


class Index:
    """The entries of one table, arranged for lookups; each arrangement is made when first needed.

    Args:
        entries: Winners by problem.
        ranges: Answers for many sizes at once.
    """

    def __init__(self, entries: Mapping[Problem, Entry], ranges: Sequence[RangeEntry]) -> None:
        self._entries = entries
        self._ranges = ranges

    def lookup(self, problem: Problem, legal: Legal, estimate: Estimate | None = None) -> Lookup:
        """Return the entry to use for ``problem``; see :meth:`~cutegen.records.table.Table.lookup`."""
        skipped: list[str] = []
        exact = self._entries.get(problem)
        if exact is not None and _usable(exact, problem, legal, skipped):
            return Lookup(exact, "exact", tuple(skipped))
        for within in self._holding(problem):
            if _usable(entry := within.entry(problem), problem, legal, skipped):
                return Lookup(entry, "range", tuple(skipped), within)
        bucket = self._buckets.get((problem.signature, _bucket(problem)), ())
        near = [e for e in bucket if e is not exact and _usable(e, problem, legal, skipped)]
        if near:
            return Lookup(_closest(near, problem, estimate), "bucket", tuple(skipped))
        family = find_family(problem.family)
        kin = self._kin.get((problem.family, family.kin(problem)), ())
        near = [e for e in kin if e not in bucket and _within_reach(e.problem, problem)]
        near = [e for e in near if _usable(e, problem, legal, skipped)]
        same = [e for e in near if e.problem.signature == problem.signature]
        plain = [e for e in near if family.is_plain(e.problem)]
        plain_here = [e for e in plain if _bucket(e.problem) == _bucket(problem)]
        for choice in (plain_here, same, plain, near):
            if choice:
                return Lookup(_closest(choice, problem, estimate), "nearest", tuple(skipped))
        return Lookup(None, "default", tuple(skipped))

    def _holding(self, problem: Problem) -> list[RangeEntry]:
        """Return the ranges that hold ``problem``, in the order of the table."""
        kinds = [kind_over(size, problem) for size in problem.sizes] if self._ranges else []
        places = (place for kind in kinds for place in self._places.get(kind, ()))
        return [self._ranges[place] for place in sorted(places) if problem in self._ranges[place].range]

    @cached_property
    def _places(self) -> dict[Hashable, list[int]]:
        """The places of ranges by kind."""
        found: dict[Hashable, list[int]] = {}
        for place, entry in enumerate(self._ranges):
            found.setdefault(entry.range.kind, []).append(place)
        return found

    @cached_property
    def _buckets(self) -> dict[tuple[Hashable, tuple[int, ...]], list[Entry]]:
        found: dict[tuple[Hashable, tuple[int, ...]], list[Entry]] = {}
        for problem, entry in self._entries.items():
            found.setdefault((problem.signature, _bucket(problem)), []).append(entry)
        return found

    @cached_property
    def _kin(self) -> dict[tuple[str, Hashable], list[Entry]]:
        found: dict[tuple[str, Hashable], list[Entry]] = {}
        for problem, entry in self._entries.items():
            kin = find_family(problem.family).kin(problem)
            found.setdefault((problem.family, kin), []).append(entry)
        return found


def order_of(problem: Problem) -> tuple[Any, ...]:
    """Return the sort key of problems in a table's file: by family, then by sizes."""
    return problem.family, tuple(problem.sizes.values()), str(problem)


def _bucket(problem: Problem) -> tuple[int, ...]:
    """The exponents of the powers of two that the sizes round up to."""
    return tuple((size - 1).bit_length() for size in problem.sizes.values())


def _usable(entry: Entry, problem: Problem, legal: Legal, skipped: list[str]) -> bool:
    if entry.source == "torch":
        # There is no config to check; the library call is known to compute this signature only.
        return entry.problem.signature == problem.signature
    assert entry.config is not None
    reason = "it breaks a rule of its space"
    try:
        if legal(entry.config):
            return True
    except ConfigError as error:
        reason = error.reason
    skipped.append(f"the config of {entry.problem} is not valid for {problem}: {reason}")
    return False


def _logs(a: Problem, b: Problem) -> tuple[float, ...]:
    return tuple(abs(log2(size / b.sizes[name])) for name, size in a.sizes.items())


def _within_reach(a: Problem, b: Problem) -> bool:
    return max(_logs(a, b)) < log2(REACH)


def _closest(entries: Sequence[Entry], problem: Problem, estimate: Estimate | None) -> Entry:
    """The entry nearest in sizes or, if predictions are to be had, the one with the fastest config."""

    def distance(entry: Entry) -> tuple[float, tuple[Any, ...]]:
        return sum(d * d for d in _logs(entry.problem, problem)), order_of(entry.problem)

    closest = min(entries, key=distance)
    if estimate is None or closest.source != "cutegen":
        return closest  # the model predicts cutegen's kernels only
    predicted = [
        (estimate(entry.config), distance(entry), entry)
        for entry in entries
        if entry.source == "cutegen" and entry.config is not None
    ]
    return min(predicted, key=lambda item: item[:2])[2]
