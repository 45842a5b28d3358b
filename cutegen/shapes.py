"""Problems as users write them: ``MxNxK`` words and TOML shapes files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen.documents import read_toml
from cutegen.errors import ProblemError, UsageError
from cutegen.problem import Epilogue, Problem, default_dtype, parse_extents
from cutegen.text import printable, shown

__all__ = ["NamedProblem", "parse_shape", "read_shapes"]

_EXTENTS = ("m", "n", "k")
_TEXTS = {"dtype": "", "layout": "tn", "out": "", "bias": "", "act": ""}
_FLAGS = ("alpha", "beta", "scale", "unaligned", "promote", "any_order")
#: Keys that describe a shape to people only.
_NOTES = ("id", "note")
_KNOWN = (*_NOTES, *_EXTENTS, "batch", *_TEXTS, *_FLAGS)


@dataclass(frozen=True)
class NamedProblem:
    """A problem and what the user calls it: the ``id`` of a shapes file, or its extents."""

    name: str
    problem: Problem


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """Return ``(m, n, k, batch)`` of a word like ``4096x4096x4096`` or ``8x512x512x64`` (batch first).

    Raises:
        UsageError: The word is not of that form.
    """
    try:
        return parse_extents(text.strip().lower())
    except ProblemError as error:
        raise UsageError(f"shape {shown(text)}: {error}; write for example 4096x4096x4096") from error


def read_shapes(path: Path, family: str = "gemm") -> tuple[NamedProblem, ...]:
    """Return the problems of a TOML file of ``[[shape]]`` tables, in its order.

    Every table holds m, n, k and may hold id, batch, dtype, out, layout, bias, act, note and, as true or
    false, alpha, beta, scale, unaligned, promote, any_order.

    Raises:
        UsageError: The file is missing or malformed; the message names the shape and the key.
    """
    tables = read_toml(path, "shapes file", malformed=UsageError, unreadable=UsageError).get("shape")
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} holds no [[shape]] table; each needs at least m, n and k")
    shapes = tuple(_read_shape(path, i, table, family) for i, table in enumerate(tables, 1))
    _require_unique(path, (shape.name for shape, table in zip(shapes, tables, strict=True) if "id" in table))
    return shapes


def _read_shape(path: Path, index: int, table: object, family: str) -> NamedProblem:
    where = f"{path}: shape {index}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {shown(table)}; write it as a [[shape]] table")
    name = _name(where, table)
    if name:
        where += f" ({printable(name)})"
    unknown = [key for key in table if key not in _KNOWN]
    if unknown:
        raise UsageError(f"{where}: unknown key {shown(unknown[0])}; known: {', '.join(_KNOWN)}")
    try:
        problem = _problem(where, table, family)
    except ProblemError as error:
        raise UsageError(f"{where}: {error}") from error
    return NamedProblem(name or _extents_name(problem), problem)


def _problem(where: str, table: Mapping[str, Any], family: str) -> Problem:
    extents = {key: _number(where, table, key) for key in _EXTENTS}
    texts = {key: _typed(where, table, key, str, default) for key, default in _TEXTS.items()}
    flags = {key: _typed(where, table, key, bool, False) for key in _FLAGS}
    return Problem(
        **extents,
        batch=_typed(where, table, "batch", int, 1),
        ab_dtype=texts["dtype"] or default_dtype(family),
        out_dtype=texts["out"],
        layout=texts["layout"],
        unaligned_out=flags["unaligned"],
        epilogue=Epilogue(flags["alpha"], flags["beta"], texts["bias"], texts["act"], flags["scale"]),
        promote=flags["promote"],
        any_order=flags["any_order"],
        family=family,
    )


def _name(where: str, table: Mapping[str, Any]) -> str:
    """Return the ``id`` of a shape as text; empty if it has none."""
    value = table.get("id", "")
    if type(value) not in (str, int):
        raise UsageError(f"{where}: id is {shown(value)}; it must be a string")
    return value if isinstance(value, str) else shown(value)


def _number(where: str, table: Mapping[str, Any], key: str) -> int:
    if key not in table:
        raise UsageError(f"{where} lacks {key}; each shape needs m, n and k")
    number: int = _typed(where, table, key, int, 0)
    return number


def _typed(where: str, table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = table.get(key, default)
    if type(value) is not kind:
        names = {int: "an integer", str: "a string", bool: "true or false"}
        raise UsageError(f"{where}: {key} is {shown(value)}; it must be {names[kind]}")
    return value


def _extents_name(problem: Problem) -> str:
    extents = f"{problem.m}x{problem.n}x{problem.k}"
    return extents if problem.batch == 1 else f"{problem.batch}x{extents}"


def _require_unique(path: Path, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{path}: two shapes are called {shown(name)}; give each its own id")
        seen.add(name)
