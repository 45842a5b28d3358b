"""From a point that fails to what makes it fail: the fewest features that tell it from one that passes.

Delta debugging over knobs and over what is computed: the failing point is moved towards the nearest passing
one while it is valid and still fails, the passing one towards it while it passes. Then every feature of the
failing point is changed alone; those of which some other value passes are needed for the failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from cutegen.digest import Json
from cutegen.space import Space, Value, format_value
from tools.bringup_parts.points import (
    Point,
    changed,
    difference,
    features,
    groups,
    near,
    nearest,
    other_values,
    show,
    with_values,
)

__all__ = ["Cause", "Finding", "Oracle", "explains", "holds", "pin_down"]

#: Whether a point fails; None where nobody can tell, because its kernel is not at hand.
Oracle = Callable[[Point], "bool | None"]
#: Other values of a knob to try: of one that tells the two points apart, and of one that does not.
LOOK, GLANCE = 3, 2
#: Other values to try of a knob that is known to be needed.
SCAN = 8
#: Choices of knobs that follow one, where it cannot change alone.
WAYS = 3


@dataclass(frozen=True)
class Cause:
    """A feature that must have its value for the failure to occur.

    Attributes:
        name: A knob, or a property of the problem such as ``k``.
        value: With it the point fails.
        passes_with: Values with which, all else equal, it passes.
        breaks_with: Values with which it fails as well, and ``value``.
    """

    name: str
    value: Value
    passes_with: tuple[Value, ...]
    breaks_with: tuple[Value, ...]

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data, values as users write them."""
        return {
            "name": self.name,
            "value": format_value(self.value),
            "passes_with": [format_value(value) for value in self.passes_with],
            "breaks_with": [format_value(value) for value in self.breaks_with],
        }


@dataclass(frozen=True)
class Finding:
    """What was found out about one failing point.

    Attributes:
        first_seen: The point that failed in its tier.
        failing: The simplest failing point that was reached from it; None if it never failed again.
        passing: The passing point nearest to that one; None if none was found.
        causes: The features that are needed for the failure; empty if none could be changed alone.
        differing: The features in which ``failing`` and ``passing`` differ.
        again: How often, of how many runs, the failing point failed and the passing one passed.
    """

    first_seen: Point
    failing: Point | None = None
    passing: Point | None = None
    causes: tuple[Cause, ...] = ()
    differing: tuple[str, ...] = ()
    again: tuple[int, int, int] = (0, 0, 0)

    @property
    def pinned(self) -> bool:
        """Whether the fault has a name: some features, each needed, or some that cannot be told apart."""
        return bool(self.causes or self.differing)

    def __str__(self) -> str:
        seen = f"first seen on problem {self.first_seen.problem}"
        if self.failing is None:
            return f"failed once and never again; {seen} with {self.first_seen.config}"
        if not self.pinned:
            return f"nothing near it passes, so no knob is to blame alone; {seen} with {self.failing.config}"
        named = self.causes or ()
        if not named:
            assert self.passing is not None
            bad, good = (
                show({name: features(point)[name] for name in self.differing})
                for point in (self.failing, self.passing)
            )
            return f"{bad} breaks; with {good} it passes (no part of it can be had alone); {seen}"
        what = " together with ".join(f"{cause.name}={format_value(cause.value)}" for cause in named)
        ways = " or ".join(f"{c.name}={_listed(c.passes_with)}" for c in named)
        more = [f"{c.name}={_listed(c.breaks_with[1:])}" for c in named if c.breaks_with[1:]]
        also = f" (so does {' and '.join(more)})" if more else ""
        return f"{what} breaks{also}; with {ways} it passes; {seen}"

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        fails, passes, runs = self.again
        return {
            "sentence": str(self),
            "first_seen": _point_json(self.first_seen),
            "failing": _point_json(self.failing),
            "passing": _point_json(self.passing),
            "causes": [cause.to_json() for cause in self.causes],
            "differing": list(self.differing),
            "again": {"failed": fails, "passed": passes, "runs": runs},
        }


def _listed(values: Sequence[Value]) -> str:
    return ",".join(map(format_value, values))


def _point_json(point: Point | None) -> Json:
    return None if point is None else {"problem": str(point.problem), "config": str(point.config)}


def explains(finding: Finding, point: Point) -> bool:
    """Return whether a point has everything that a finding names, or values of it that were not tried."""
    if finding.failing is None or not finding.pinned:
        return point == finding.first_seen
    if not finding.causes:
        assert finding.passing is not None
        bad = features(finding.failing)
        return all(features(point)[name] == bad[name] for name in finding.differing)
    found = features(point)
    return all(found[cause.name] not in cause.passes_with for cause in finding.causes)


def holds(finding: Finding, point: Point) -> bool:
    """Return whether a point has what was seen to break: values that were tried, and every one of them."""
    if not finding.causes:
        return finding.pinned and explains(finding, point)
    found = features(point)
    return all(found[cause.name] in cause.breaks_with for cause in finding.causes)


def pin_down(point: Point, space: Space, known: Sequence[Point], fails: Oracle) -> Finding:
    """Return why ``point``, which fails, does.

    Args:
        point: Fails.
        space: Says what is valid.
        known: Points that pass.
        fails: Tries a point; it is asked about the same one more than once.
    """
    start = _passing(point, space, known, fails)
    if start is None:
        return Finding(point, point)
    failing = _shrink(point, start, space, lambda other: fails(other) is True)
    passing = _shrink(start, failing, space, lambda other: fails(other) is False)
    causes, pair = _causes(failing, passing, space, fails)
    if causes and pair[0] != failing:  # what needs others to follow is told from a point where they have
        failing = pair[0]
        causes, pair = _causes(failing, pair[1], space, fails)
    return Finding(point, *pair, tuple(causes), tuple(difference(*pair)))


def _causes(
    failing: Point, passing: Point, space: Space, fails: Oracle
) -> tuple[list[Cause], tuple[Point, Point]]:
    """Return what a failure needs, and the failing and the passing point that are closest to each other.

    The failing one of them is ``failing`` itself if any knob can be changed alone.
    """
    causes, pairs = [], [(failing, passing)]
    for name in features(failing):
        found = _cause(failing, name, passing, space, fails)
        if found is not None:
            causes.append(found[0])
            pairs.append(found[1])
    return causes, min(pairs, key=lambda pair: (len(difference(*pair)), pair[0] != failing))


def _passing(point: Point, space: Space, known: Sequence[Point], fails: Oracle) -> Point | None:
    """Return a passing point near ``point``: of its problem if there is one, else of any."""
    by_distance = sorted(known, key=lambda other: len(difference(point, other)))
    same = [other for other in by_distance if other.problem == point.problem][:LOOK]
    elsewhere = [other for other in by_distance if other.problem != point.problem][:LOOK]
    candidates = chain(same, _near(point, space), elsewhere)
    return next((other for other in candidates if fails(other) is False), None)


def _near(point: Point, space: Space) -> Iterator[Point]:
    """Yield points of the same problem: its default, then with every knob at its simplest value, one at a
    time, then with every knob at the value nearest to its own."""
    default = Point(point.problem, space.default(point.problem))
    if default != point:
        yield default
    for pick in (_simplest, other_values):
        for knob in space.domains:
            values = pick(space, knob, point.config[knob])
            configs = (nearest(space, point.problem, point.config, knob, value) for value in values)
            config = next((config for config in configs if config is not None), None)
            if config is not None:
                yield Point(point.problem, config)


def _simplest(space: Space, knob: str, value: Value) -> tuple[Value, ...]:
    return tuple(other for other in space.domains[knob][:1] if other != value)


def _shrink(moving: Point, target: Point, space: Space, keeps: Callable[[Point], bool]) -> Point:
    """Return ``moving`` brought as near to ``target`` as ``keeps`` allows."""
    while True:
        apart = difference(moving, target)
        steps = (changed(moving, part, target, space) for part in groups(apart) if len(part) < len(apart))
        better = (s for s in steps if s is not None and len(difference(s, target)) < len(apart) and keeps(s))
        step = next(better, None)
        if step is None:
            return moving
        moving = step


def _cause(
    failing: Point, name: str, passing: Point, space: Space, fails: Oracle
) -> tuple[Cause, tuple[Point, Point]] | None:
    """Return the cause that a feature is and two points that it alone tells apart; None if it is none."""
    own, other = features(failing)[name], features(passing)[name]
    most = LOOK if own != other else GLANCE
    values = [other] if own != other else []
    if name in space.domains and most:
        values += [value for value in _spread(space, name, own) if value != other]
    found: dict[Value, tuple[Point, Point] | None] = {}
    tried = _outcomes(failing, name, values, space, fails)
    for value, pair in tried:
        found[value] = pair
        if pair is not None or len(found) >= most:
            break
    if not any(found.values()):
        return None
    for value, pair in islice(tried, SCAN - len(found)):
        found[value] = pair
    good = [value for value, pair in found.items() if pair is not None]
    bad = [value for value, pair in found.items() if pair is None]
    closest = min((pair for pair in found.values() if pair), key=lambda pair: pair[0] != failing)
    return Cause(name, own, tuple(good), (own, *bad)), closest


def _spread(space: Space, knob: str, value: Value) -> list[Value]:
    """Return other values of a knob: the simplest, the nearest, and of long lists every few of the rest."""
    values = other_values(space, knob, value)
    return list(
        dict.fromkeys([*_simplest(space, knob, value), *values[: 2 * SCAN], *values[2 * SCAN :: SCAN]])
    )


def _outcomes(
    failing: Point, name: str, values: Iterable[Value], space: Space, fails: Oracle
) -> Iterator[tuple[Value, tuple[Point, Point] | None]]:
    """Yield, value by value, a failing and a passing point that it alone tells apart, None if it fails too.

    Where a value is not valid alone, other knobs change as well, provided that these alone mend nothing.
    """
    for value in values:
        for base, other in islice(_changes(failing, name, value, space), WAYS):
            outcome = fails(other)
            if outcome is None or fails(base) is not True:
                continue
            yield value, None if outcome else (base, other)
            break


def _changes(failing: Point, name: str, value: Value, space: Space) -> Iterator[tuple[Point, Point]]:
    """Yield points that differ in one feature alone: at ``failing``, or near it if that is not valid."""
    alone = with_values(failing, {name: value}, space)
    if alone is not None:
        if difference(alone, failing) == [name]:
            yield failing, alone
        return
    if name not in space.domains:
        return
    for config in near(space, failing.problem, failing.config, name, value):
        other = Point(failing.problem, config)
        base = with_values(other, {name: features(failing)[name]}, space)
        if base is not None:
            yield base, other
