"""The one place where commands print: text that comes from files or children cannot control the terminal."""

from __future__ import annotations

import json
import sys

from cutegen.digest import Json
from cutegen.text import printable

__all__ = ["say", "say_json"]


def say(text: str = "", *, error: bool = False, flush: bool = False) -> None:
    r"""Print ``text``; characters that do not print are shown as escapes, such as ``\x1b``.

    Args:
        text: One line or several.
        error: Whether it goes to standard error instead of standard output.
        flush: Whether it is written at once.
    """
    stream = sys.stderr if error else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    visible = printable(text, keep="\n").encode(encoding, "backslashreplace").decode(encoding)
    print(visible, file=stream, flush=flush)


def say_json(document: Json) -> None:
    """Print ``document`` on standard output; JSON has its own escapes for what does not print."""
    print(json.dumps(document, indent=1).replace("\x7f", "\\u007f"))
