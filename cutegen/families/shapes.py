"""Problems as users write them: TOML shapes files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from cutegen.errors import ProblemError, UsageError
from cutegen.families.ranges import Range, is_range, overlapping, range_of
from cutegen.families.registry import find_family
from cutegen.family import Family, Option, Problem
from cutegen.system.documents import read_toml
from cutegen.text import did_you_mean, printable, shown

__all__ = ["NamedProblem", "NamedRange", "Shape", "read_shapes", "read_shapes_and_ranges"]

#: Keys that describe a shape to people only.
_NOTES = ("id", "note")
#: The only key of a file, under which its shapes are.
_TABLES = "shape"


@dataclass(frozen=True)
class NamedProblem:
    """A problem and what the user calls it: the ``id`` of a shapes file, or its sizes."""

    name: str
    problem: Problem


@dataclass(frozen=True)
class NamedRange:
    """A range of problems and what the user calls it."""

    name: str
    range: Range


Shape: TypeAlias = "NamedProblem | NamedRange"


def read_shapes(path: Path, family: str = "gemm") -> tuple[NamedProblem, ...]:
    """Return the problems of a TOML file of ``[[shape]]`` tables, in its order.

    Every table holds the sizes of the family, such as m, n and k. It may hold the family's options, an ``id``
    and a ``note``.

    Raises:
        UsageError: The file is missing or malformed, or has a range; the message names the shape and the key.
        ResourceError: There is no such family.
    """
    found = read_shapes_and_ranges(path, family)
    for shape in found:
        if isinstance(shape, NamedRange):
            raise UsageError(f"{path}: {shape.range} is a range of sizes; valid here: single sizes")
    return tuple(shape for shape in found if isinstance(shape, NamedProblem))


def read_shapes_and_ranges(path: Path, family: str = "gemm") -> tuple[Shape, ...]:
    """Return the problems of a TOML file as :func:`read_shapes`; a size may be a range, ``m = "1..8192"``.

    Raises:
        UsageError: As there, or no kernel serves a range of that size, or two ranges overlap.
        ResourceError: There is no such family.
    """
    declared = find_family(family)
    document = read_toml(path, "shapes file", malformed=UsageError, unreadable=UsageError)
    unknown = next((key for key in document if key != _TABLES), None)
    if unknown is not None:
        raise UsageError(
            f"{path}: unknown key {shown(unknown)}{did_you_mean(unknown, [_TABLES])} beside the shapes; "
            f"known there: {_TABLES}. What a shape says stands in its own [[shape]] table"
        )
    tables = document.get(_TABLES)
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} holds no [[shape]] table; each needs at least {_needed(declared)}")
    shapes = tuple(_read_shape(path, i, table, declared) for i, table in enumerate(tables, 1))
    _require_unique(path, (shape.name for shape, table in zip(shapes, tables, strict=True) if "id" in table))
    twice = overlapping({shape.range for shape in shapes if isinstance(shape, NamedRange)})
    if twice is not None:
        raise UsageError(f"{path}: ranges {twice[0]} and {twice[1]} overlap; join them or set them apart")
    return shapes


def _read_shape(path: Path, index: int, table: object, family: Family) -> Shape:
    where = f"{path}: shape {index}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {shown(table)}; write it as a [[shape]] table")
    name = _name(where, table)
    if name:
        where += f" ({printable(name)})"
    named = {name: o for o in family.options for name in (o.name, *o.aliases)}
    known = (*_NOTES, *(size.name for size in family.sizes), *named)
    unknown = [key for key in table if key not in known]
    if unknown:
        meant = did_you_mean(str(unknown[0]), known)
        raise UsageError(f"{where}: unknown key {shown(unknown[0])}{meant}; known: {', '.join(known)}")
    missing = [size.name for size in family.sizes if size.default is None and size.name not in table]
    if missing:
        raise UsageError(f"{where} lacks {missing[0]}; each shape needs {_needed(family)}")
    given = {size.name: table[size.name] for size in family.sizes if size.name in table}
    ends = {name: value for name, value in given.items() if is_range(value)}
    sizes = {name: _typed(where, table, name, int) for name in given if name not in ends}
    options: dict[str, Any] = {}
    for key in table:
        if (option := named.get(key)) is not None:
            if option.name in options:
                spellings = " or ".join((option.name, *option.aliases))
                raise UsageError(f"{where}: give only one of {spellings}")
            options[option.name] = _typed(where, table, key, _kind(option))
    try:
        if ends:
            whole = range_of({**sizes, **ends}, lambda found: family.problem(found, options))
            return NamedRange(name or _sizes_name(whole), whole)
        problem = family.problem(sizes, options)
    except ProblemError as error:
        raise UsageError(f"{where}: {error}") from error
    return NamedProblem(name or _sizes_name(problem), problem)


def _name(where: str, table: Mapping[str, Any]) -> str:
    """Return the ``id`` of a shape as text; empty if it has none."""
    value = table.get("id", "")
    if type(value) not in (str, int):
        raise UsageError(f"{where}: id is {shown(value)}; it must be a string")
    return value if isinstance(value, str) else shown(value)


def _needed(family: Family) -> str:
    names = [size.name for size in family.sizes if size.default is None]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _kind(option: Option) -> type:
    return bool if option.is_flag else str


def _typed(where: str, table: Mapping[str, Any], key: str, kind: type) -> Any:
    value = table[key]
    if type(value) is not kind:
        names = {int: "an integer", str: "a string", bool: "true or false"}
        raise UsageError(f"{where}: {key} is {shown(value)}; it must be {names[kind]}")
    return value


def _sizes_name(problem: Problem | Range) -> str:
    """Return the sizes as the line of a problem or a range has them."""
    return str(problem).split()[1]


def _require_unique(path: Path, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{path}: two shapes are called {shown(name)}; give each its own id")
        seen.add(name)
