"""Untrusted text in messages: shortened, and without characters that control a terminal."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable

__all__ = ["did_you_mean", "how_many", "printable", "shown"]

#: Most characters of a value in a message.
_LENGTH = 160
#: Integers of more bits are described, not printed: Python refuses to print very long ones.
_LONG_BITS = 128


class _Short(reprlib.Repr):
    """The ``repr`` of values of any size and depth, in about a line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = _LENGTH

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits of ``x``, or how large it is."""
        return repr(x) if x.bit_length() <= _LONG_BITS else f"an integer of {x.bit_length()} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return ``repr(value)`` for an error message, shortened if it is long or deeply nested."""
    text = _SHORT.repr(value)
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean X?)`` for the known word that is most like ``word``; empty if none is."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def how_many(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends with an s: ``1 kernel``, ``2 kernels``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str, *, keep: str = "") -> str:
    r"""Return ``text`` with every character that does not print as its escape, such as ``\x1b``.

    These are control characters, the bidirectional controls and other format characters of Unicode, line
    separators, and surrogates, which cannot be encoded.

    Args:
        text: Any text.
        keep: Characters that stay as they are, such as ``"\n"``.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
