"""Problems as users write them: ``MxNxK`` words and TOML shapes files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen.errors import ProblemError, UsageError
from cutegen.problem import Problem, default_dtype

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    numbers = re.fullmatch(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+)", text.strip().lower())
    if numbers is None:
        raise UsageError(f"shape {text!r} is not MxNxK or BATCHxMxNxK; write for example 4096x4096x4096")
    batch, m, n, k = (int(x) if x else 1 for x in numbers.groups())
    return m, n, k, batch


def read_shapes(path: Path, family: str = "gemm") -> tuple[NamedProblem, ...]:
    """Return the problems of a TOML file of ``[[shape]]`` tables, in its order.

    Every table holds m, n, k and may hold id, batch, dtype, out, layout, bias, act, note and, as true or
    false, alpha, beta, scale, unaligned, promote, any_order.

    Raises:
        UsageError: The file is missing or malformed; the message names the shape and the key.
    """
    tables = _load(path).get("shape")
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} holds no [[shape]] table; each needs at least m, n and k")
    shapes = tuple(_read_shape(path, i, table, family) for i, table in enumerate(tables, 1))
    _require_unique(path, (shape.name for shape, table in zip(shapes, tables, strict=True) if "id" in table))
    return shapes


def _load(path: Path) -> dict[str, Any]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"shapes file {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"shapes file {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"shapes file {path} is not TOML: {error}") from error
    return tables


def _read_shape(path: Path, index: int, table: object, family: str) -> NamedProblem:
    where = f"{path}: shape {index}"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is {table!r}; write it as a [[shape]] table")
    if "id" in table:
        where += f" ({table['id']})"
    unknown = [key for key in table if key not in _KNOWN]
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(_KNOWN)}")
    m, n, k = (_number(where, table, key) for key in _EXTENTS)
    batch = _number(where, table, "batch") if "batch" in table else 1
    texts = {key: _typed(where, table, key, str, default) for key, default in _TEXTS.items()}
    dtype = texts["dtype"] or default_dtype(family)
    words = [key for key in _FLAGS if _typed(where, table, key, bool, False)]
    words += [f"{key}={texts[key]}" for key in ("out", "bias", "act") if texts[key]]
    line = f"{family} {batch}x{m}x{n}x{k} {dtype} {texts['layout']} {' '.join(words)}"
    try:
        problem = Problem.parse(line)
    except ProblemError as error:
        raise UsageError(f"{where}: {error}") from error
    return NamedProblem(str(table.get("id", _extents_name(problem))), problem)


def _number(where: str, table: Mapping[str, Any], key: str) -> int:
    if key not in table:
        raise UsageError(f"{where} lacks {key}; each shape needs m, n and k")
    return int(_typed(where, table, key, int, 0))


def _typed(where: str, table: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = table.get(key, default)
    if type(value) is not kind:
        names = {int: "an integer", str: "a string", bool: "true or false"}
        raise UsageError(f"{where}: {key} is {value!r}; it must be {names[kind]}")
    return value


def _extents_name(problem: Problem) -> str:
    extents = f"{problem.m}x{problem.n}x{problem.k}"
    return extents if problem.batch == 1 else f"{problem.batch}x{extents}"


def _require_unique(path: Path, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f"{path}: two shapes are called {name!r}; give each its own id")
        seen.add(name)
