"""JSON and TOML from outside: limits on what is read, and errors that name the file and the place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from cutegen.digest import Json
from cutegen.errors import CutegenError, StoreError
from cutegen.text import shown

__all__ = ["parse_json", "read_bytes", "read_json", "read_toml"]

#: Most bytes of a document. Source: judgement; an entry of a dispatch table has about 1 KB.
SIZE_LIMIT = 64 * 2**20
#: Most digits of an integer; every 64-bit integer fits. Beyond 4300 digits ``int`` itself raises ValueError.
DIGIT_LIMIT = 20

#: Makes the error of a message: one of the classes of :mod:`cutegen.errors`.
ErrorType: TypeAlias = Callable[[str], CutegenError]

#: Strings, comments, and (as group 1) the words and numbers outside of them, in JSON and in TOML.
_TOKENS = r"\"(?:[^\"\\]|\\.)*\"|'[^'\n]*'|#[^\n]*|([-+]?\w[-+.\w]*)"


class _Refused(ValueError):
    """A value that is valid JSON or TOML but beyond the limits here.

    Attributes:
        literal: The number as the document spells it; empty for what is not a number.
    """

    def __init__(self, reason: str, literal: str = "") -> None:
        super().__init__(reason)
        self.literal = literal


def read_json(path: Path, what: str, *, malformed: ErrorType, unreadable: ErrorType = StoreError) -> Json:
    """Return the JSON document in the file ``path``.

    Args:
        path: The file.
        what: What it should be, for messages: ``dispatch table``.
        malformed: The error to raise if it is not such a document; see :func:`parse_json`.
        unreadable: The error to raise if there is no such file or it cannot be read.
    """
    return parse_json(
        read_bytes(path, what, malformed=malformed, unreadable=unreadable),
        f"{what} {path}",
        malformed=malformed,
    )


def parse_json(data: bytes | str, where: str, *, malformed: ErrorType) -> Json:
    """Return the JSON document ``data``.

    These are refused: text that is not UTF-8 or not JSON, nesting that exhausts the stack, a duplicate key
    in an object, NaN and infinities (also numbers too large for a float), and integers of more than 20
    digits.

    Args:
        data: The text.
        where: Where it is from; the message of an error begins with it.
        malformed: The error to raise; its message says at which line and column, or for which key.
    """
    text = data if isinstance(data, str) else _decode(data, where, malformed)
    try:
        document: Json = json.loads(
            text, parse_int=_integer, parse_float=_number, parse_constant=_number, object_pairs_hook=_object
        )
        return document
    except _Refused as error:
        raise malformed(f"{where} is refused: {_place(text, error.literal)}{error}") from None
    except json.JSONDecodeError as error:
        raise malformed(
            f"{where} is not JSON: line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise malformed(f"{where} is nested too deeply") from None


def read_toml(
    path: Path, what: str, *, malformed: ErrorType, unreadable: ErrorType = StoreError
) -> dict[str, Any]:
    """Return the TOML document in the file ``path``, with the limits of :func:`parse_json`.

    One limit differs: integers may have more than 20 digits, so the caller must check their range before it
    prints them.

    Args:
        path: The file.
        what: What it should be, for messages: ``shapes file``.
        malformed: The error to raise if it is not such a document.
        unreadable: The error to raise if there is no such file or it cannot be read.
    """
    if sys.version_info >= (3, 11):  # imported here, since most processes read no TOML
        import tomllib
    else:
        import tomli as tomllib
    where = f"{what} {path}"
    text = _decode(read_bytes(path, what, malformed=malformed, unreadable=unreadable), where, malformed)
    try:
        document: dict[str, Any] = tomllib.loads(text, parse_float=_number)
        return document
    except tomllib.TOMLDecodeError as error:
        raise malformed(f"{where} is not TOML: {error}") from None
    except RecursionError:
        raise malformed(f"{where} is nested too deeply") from None
    except _Refused as error:
        raise malformed(f"{where} is refused: {_place(text, error.literal)}{error}") from None
    except ValueError:  # of int(); tomllib has no hook for integers
        literal = max(re.findall(r"[0-9_]+", text), key=len)
        raise malformed(f"{where} is refused: {_place(text, literal)}{_too_long(literal)}") from None


def read_bytes(path: Path, what: str, *, malformed: ErrorType, unreadable: ErrorType = StoreError) -> bytes:
    """Return what the file ``path`` holds, 64 MiB at most.

    Args:
        path: The file.
        what: What it should be, for messages.
        malformed: The error to raise if it is too large.
        unreadable: The error to raise if there is no such file or it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(SIZE_LIMIT + 1)
    except FileNotFoundError as error:
        raise unreadable(f"{what} {path} does not exist") from error
    except OSError as error:
        raise unreadable(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # no file can have such a name
        raise unreadable(f"{what} {shown(str(path))} cannot be read: {error}") from error
    if len(data) > SIZE_LIMIT:
        raise malformed(f"{what} {path} has more than {SIZE_LIMIT} bytes, the largest size that is read")
    return data


def _decode(data: bytes, where: str, malformed: ErrorType) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise malformed(f"{where} is not UTF-8 text: line {line} has the byte 0x{byte:02x}") from None


def _integer(literal: str) -> int:
    if len(literal) > DIGIT_LIMIT:
        raise _Refused(_too_long(literal), literal)
    return int(literal)


def _number(literal: str) -> float:
    value = float(literal)
    if not isfinite(value):
        raise _Refused(f"{_cut(literal)} is no finite number", literal)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise _Refused(f"an object has the key {shown(twice)} twice")
    return found


def _too_long(literal: str) -> str:
    return f"{_cut(literal)} has {len(literal)} digits; at most {DIGIT_LIMIT} are read"


def _cut(literal: str) -> str:
    return literal if len(literal) <= DIGIT_LIMIT else f"{literal[:10]}..."


def _place(text: str, literal: str) -> str:
    """Return the place of the first number ``literal`` outside of strings; empty if there is none."""
    tokens = re.finditer(_TOKENS, text, re.DOTALL) if literal else ()
    at = next((token.start() for token in tokens if token[1] == literal), None)
    if at is None:
        return ""
    return f"line {text.count(chr(10), 0, at) + 1} column {at - text.rfind(chr(10), 0, at)}: "
