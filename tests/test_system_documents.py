"""JSON and TOML from outside: what is refused, and that the message names the file and the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.errors import StoreError, TableError, UsageError
from cutegen.system import documents
from cutegen.system.documents import parse_json, read_json, read_toml


def refusal(data: bytes | str) -> str:
    with pytest.raises(TableError) as caught:
        parse_json(data, "table t.json", malformed=TableError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "table t.json is not JSON: line 1 column 1: Expecting value"),
        (b'{"a": 1,\n "b" 2}', "table t.json is not JSON: line 2 column 6: Expecting ':' delimiter"),
        (b'{"a":\n "\xff"}', "table t.json is not UTF-8 text: line 2 has the byte 0xff"),
        ('{"a": 1}'.encode("utf-16"), "table t.json is not UTF-8 text: line 1 has the byte 0xff"),
        (b"[" * 100_000, "table t.json is nested too deeply"),
        (b'{"a":' * 100_000, "table t.json is nested too deeply"),
        (
            b'{"99": "' + b"9" * 21 + b'",\n "a": ' + b"9" * 5000 + b"}",
            "table t.json is refused: line 2 column 7: 9999999999... has 5000 digits; at most 20 are read",
        ),
        (b"[-123456789012345678901]", "line 1 column 2: -123456789... has 22 digits"),
        (b'["1e999", 1e999]', "table t.json is refused: line 1 column 11: 1e999 is no finite number"),
        (b'["NaN",\nNaN]', "table t.json is refused: line 2 column 1: NaN is no finite number"),
        (b"[-Infinity]", "table t.json is refused: line 1 column 2: -Infinity is no finite number"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "table t.json is refused: an object has the key 'b' twice"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_a_refusal_names_the_place_and_the_reason(data: bytes, message: str) -> None:
    """Each refused document raises the error of the caller, with line and column where they are known."""
    assert message in refusal(data)


@pytest.mark.parametrize(
    "value", [2**63, -(2**63), 2**64 - 1, 1e308, 5e-324, "\ud800", "NaN", [[[{"a": None}]]], {"1": "1"}]
)
def test_what_others_may_write_is_read(value: Any) -> None:
    """Every 64-bit integer, every finite float and any text comes back, with or without a byte-order mark."""
    text = json.dumps(value)
    for data in (text, text.encode(), b"\xef\xbb\xbf" + text.encode()):
        assert parse_json(data, "it", malformed=TableError) == value


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """No such file, a folder, a name with NUL, a name that cannot be encoded: one error, not a traceback."""
    for name, why in (
        ("none", "does not exist"),
        ("", "cannot be read: Is a directory"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", r"a\\x00b' cannot be read: .*null"),
        ("\ud800", r"\\ud800' cannot be read"),
    ):
        for read in (read_json, read_toml):
            with pytest.raises(StoreError, match=f"^shapes file .*{why}"):
                read(tmp_path / name, "shapes file", malformed=UsageError)
    with pytest.raises(UsageError, match="none does not exist"):
        read_json(tmp_path / "none", "it", malformed=TableError, unreadable=UsageError)


def test_a_document_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that never ends is not read to its end; one of the largest size is."""
    monkeypatch.setattr(documents, "SIZE_LIMIT", 4)
    with pytest.raises(TableError, match="table /dev/zero has more than 4 bytes"):
        read_json(Path("/dev/zero"), "table", malformed=TableError)
    (tmp_path / "four.json").write_bytes(b"[12]")
    assert read_json(tmp_path / "four.json", "table", malformed=TableError) == [12]


def toml(folder: Path, data: bytes) -> dict[str, Any]:
    (folder / "s.toml").write_bytes(data)
    return read_toml(folder / "s.toml", "shapes file", malformed=UsageError)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a = 1\n= 2", r"s\.toml is not TOML: .*line 2, column 1"),
        (b"a = 1\na = 2", r"s\.toml is not TOML: Cannot overwrite a value"),
        (b"a = " + b"[" * 100_000, r"s\.toml is nested too deeply"),
        (b"a = " + b"{a=" * 100_000, r"s\.toml is nested too deeply"),
        (
            b"a = 1\nb = " + b"9" * 5000,
            r"s\.toml is refused: line 2 column 5: 9999999999\.\.\. has 5000 digits",
        ),
        (
            b"'1e999' = 0 # 1e999\na = 1e999",
            r"s\.toml is refused: line 2 column 5: 1e999 is no finite number",
        ),
        (b"a = +inf", r"s\.toml is refused: line 1 column 5: \+inf is no finite number"),
        (b"a = 1\nb = '\xfe'", r"s\.toml is not UTF-8 text: line 2 has the byte 0xfe"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_toml_is_refused_alike(tmp_path: Path, data: bytes, message: str) -> None:
    """The same limits hold for TOML."""
    with pytest.raises(UsageError, match=message):
        toml(tmp_path, data)
    assert toml(tmp_path, b"\xef\xbb\xbfa = 1\r\nb = 0.5") == {"a": 1, "b": 0.5}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=40) | st.text('[]{}",:0123456789eE+-.NaInfity\\ \n', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Nothing but the caller's error comes out, and what is read can be written again."""
    try:
        document = parse_json(data, "it", malformed=TableError)
    except TableError:
        return
    json.dumps(document, allow_nan=False)
