"""The one place where commands print: text that comes from files or children cannot control the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from cutegen.digest import Json
from cutegen.text import printable

__all__ = ["Column", "columns", "fold", "line_width", "say", "say_json"]

#: Columns where the width is not known: of a pipe, or of a file.
_USUAL_WIDTH = 80
#: Least width of a table's last column: most configs then take two lines in their short form.
_LAST_WIDTH = 30


def say(text: str = "", *, error: bool = False, flush: bool = False) -> None:
    r"""Print ``text``; characters that do not print are shown as escapes, such as ``\x1b``.

    Args:
        text: One line or several.
        error: Whether it goes to standard error instead of standard output.
        flush: Whether it is written at once.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:  # the shell can close it: 2>&-
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    visible = printable(text, keep="\n").encode(encoding, "backslashreplace").decode(encoding)
    if error and stream.isatty():
        visible = "\n".join(piece for line in visible.split("\n") for piece in fold(line, line_width()))
    print(visible, file=stream, flush=flush)


def say_json(document: Json) -> None:
    """Print ``document`` on standard output; JSON has its own escapes for what does not print."""
    print(json.dumps(document, indent=1).replace("\x7f", "\\u007f"))


def line_width() -> int:
    """Return the columns of the terminal, or of ``COLUMNS``; 80 where neither is known."""
    return max(40, shutil.get_terminal_size((_USUAL_WIDTH, 24)).columns)


def fold(text: str, width: int, indent: str = "    ") -> list[str]:
    """Return ``text`` as lines of at most ``width`` columns, broken between words only."""
    if len(text) <= width:
        return [text]
    start = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(),
        width,
        initial_indent=start,
        subsequent_indent=start + indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [text]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        cells: One for each row.
        left: Whether cells start at the left, as text does.
        drop: Order in which columns are left out where the table is too wide, the largest first; 0 is never.
    """

    title: str
    cells: Sequence[str]
    left: bool = False
    drop: int = 0

    @property
    def width(self) -> int:
        """Columns of the longest cell."""
        return max(map(len, (self.title, *self.cells)))


def columns(table: Sequence[Column], width: int | None) -> list[str]:
    """Return the lines of a table that fit ``width`` columns; None for any width.

    Empty columns are left out, then others by :attr:`Column.drop`. The last column takes what is left over
    and continues on further lines, broken between words.
    """
    shown = [column for column in table if any(column.cells) and column.cells]
    last = shown[-1]
    while width is not None and _taken(shown) + min(last.width, _LAST_WIDTH) > width:
        spare = max(shown, key=lambda column: column.drop)
        if not spare.drop:
            break
        shown.remove(spare)
    longest = max((len(word) for cell in last.cells for word in cell.split()), default=0)
    room = last.width if width is None else max(longest, width - _taken(shown))
    lines: list[str] = []
    for at in range(-1, len(last.cells)):
        *cells, final = (column.title if at < 0 else column.cells[at] for column in shown)
        pieces = [
            cell.ljust(column.width) if column.left else cell.rjust(column.width)
            for cell, column in zip(cells, shown, strict=False)
        ]
        head = "  " + "".join(f"{piece}  " for piece in pieces)
        for part in fold(final, room, "") if final else [""]:
            lines.append((head + part).rstrip())
            head = " " * len(head)
    return lines


def _taken(shown: Sequence[Column]) -> int:
    """Columns that all but the last of ``shown`` take, with the margin."""
    return 2 + sum(column.width + 2 for column in shown[:-1])
