"""Foreign text in messages: shortened, and without characters that control a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.text import how_many, printable, shown


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("up_proj Größe 中", "up_proj Größe 中"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b2J\x07\x7f", r"\x9b2J\x07\x7f"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\ud800", r"\ud800"),
        (r"C:\x1b", r"C:\x1b"),
    ],
)
def test_what_does_not_print_is_escaped(text: str, visible: str) -> None:
    """Controls, direction marks and surrogates show as escapes; letters of any script stay."""
    assert printable(text) == visible


def test_some_characters_may_stay() -> None:
    """A message of several lines keeps its line ends when it is asked to."""
    assert printable("a\n\x1bb", keep="\n") == "a\n\\x1bb"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_any_text_can_be_printed_and_escaping_twice_changes_nothing(text: str) -> None:
    """The result has printing characters only, which every encoding of Unicode can carry."""
    once = printable(text)
    assert once.isprintable() and printable(once) == once
    once.encode()


@pytest.mark.parametrize("value", [-1, "x", None, 1.5, True, [1, "a"], {"a": [1]}, (2, 1), 2**100])
def test_a_short_value_is_shown_as_its_repr(value: Any) -> None:
    """What fits in a message is its ``repr``."""
    assert shown(value) == repr(value)


def test_values_of_any_size_and_depth_are_shown_in_a_line() -> None:
    """Long text is cut, long integers are described, deep lists end in dots."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[[[[...]]]]" or shown(deep) == "[[[...]]]"
    assert shown(10**5000) == "an integer of 16610 bits"
    for value in ("x" * 10**6, {str(i): ["y" * 1000] * 1000 for i in range(1000)}):
        assert "..." in shown(value) and len(shown(value)) == 160
    assert shown("\x1b") == r"'\x1b'"


def test_one_has_no_plural() -> None:
    """None and several have."""
    assert [how_many(n, "kernel") for n in (0, 1, 2)] == ["0 kernels", "1 kernel", "2 kernels"]
