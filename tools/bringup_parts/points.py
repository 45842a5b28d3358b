"""Points of a search: a problem with a config, seen as features that can be changed one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, islice
from typing import Any

from cutegen.errors import CutegenError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.space import Config, Space, Value, format_value

__all__ = [
    "Point",
    "changed",
    "difference",
    "features",
    "groups",
    "near",
    "nearest",
    "other_values",
    "show",
    "with_values",
]

_EPILOGUE = tuple(field.name for field in fields(Epilogue))
_PROBLEM = tuple(field.name for field in fields(Problem) if field.name not in ("epilogue", "family"))
#: Most knobs that follow a changed one before a value counts as out of reach.
FOLLOWERS = 2


@dataclass(frozen=True)
class Point:
    """A config and what it is to compute."""

    problem: Problem
    config: Config

    def __str__(self) -> str:
        return f"{self.problem} | {self.config}"


def features(point: Point) -> dict[str, Value]:
    """Return everything that was chosen: what is to be computed first, then the knobs."""
    problem, epilogue = point.problem, point.problem.epilogue
    found: dict[str, Value] = {name: getattr(problem, name) for name in _PROBLEM}
    return {**found, **{name: getattr(epilogue, name) for name in _EPILOGUE}, **point.config}


def difference(point: Point, other: Point) -> list[str]:
    """Return the names of the features in which two points of one space differ."""
    theirs = features(other)
    return [name for name, value in features(point).items() if value != theirs[name]]


def with_values(point: Point, values: Mapping[str, Value], space: Space) -> Point | None:
    """Return ``point`` with some features changed, None where that is not valid."""
    mixed: dict[str, Any] = {**features(point), **values}
    try:
        epilogue = Epilogue(**{name: mixed[name] for name in _EPILOGUE})
        own = {name: mixed[name] for name in _PROBLEM}
        problem = Problem(**own, epilogue=epilogue, family=point.problem.family)
        config = point.config.replace(**{knob: mixed[knob] for knob in point.config})
        return None if space.explain(problem, config) else Point(problem, config)
    except CutegenError:
        return None


def changed(point: Point, names: Sequence[str], target: Point, space: Space) -> Point | None:
    """Return ``point`` with the features ``names`` of ``target``, None where that is not valid."""
    wanted = features(target)
    return with_values(point, {name: wanted[name] for name in names}, space)


def nearest(space: Space, problem: Problem, base: Config, knob: str, value: Value) -> Config | None:
    """Return the valid config with ``knob=value`` that differs from ``base`` in the fewest other knobs.

    None if more than two others would have to follow. Of equally many, those by the smallest steps.
    """
    return next(near(space, problem, base, knob, value), None)


def near(space: Space, problem: Problem, base: Config, knob: str, value: Value) -> Iterator[Config]:
    """Yield valid configs with ``knob=value``, by the number of other knobs that differ from ``base``.

    For any choice of at most two others it is the one of the smallest steps.
    """
    others = [other for other in space.domains if other != knob]
    rest = {other: other_values(space, other, base[other]) for other in others}
    names = {broken.rule for broken in space.explain(problem, base.replace(**{knob: value}))}
    broken = [set(rule.knobs) for rule in space.rules if rule.name in names]
    for count in range(FOLLOWERS + 1):
        for freed in combinations(others, count):
            if any(knobs.isdisjoint(freed) for knobs in broken):
                continue  # that rule stays broken
            fixed: dict[str, Sequence[Value]] = {other: [base[other]] for other in others}
            fixed |= {other: rest[other] for other in freed}
            yield from islice(space.configs(problem, {**fixed, knob: [value]}), 1)


def other_values(space: Space, knob: str, value: Value) -> tuple[Value, ...]:
    """Return the other values of a knob, the nearest first."""
    domain = space.domains[knob]
    rest = [other for other in domain if other != value]
    return tuple(sorted(rest, key=lambda other: (_distance(other, value), domain.index(other))))


def _distance(value: Value, other: Value) -> int:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return sum(abs(a - b) for a, b in zip(value, other, strict=True))
    if isinstance(value, int) and isinstance(other, int):
        return abs(value - other)
    return 0


def show(values: Mapping[str, Value]) -> str:
    """Return features as users write knobs."""
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items())


def groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield parts of ``names``, halves first, then ever smaller ones down to one, then all pairs."""
    count = 2
    while count < 2 * len(names):
        size = -(-len(names) // min(count, len(names)))
        yield from (tuple(names[at : at + size]) for at in range(0, len(names), size))
        count *= 2
    if len(names) > 2:
        yield from combinations(names, 2)
