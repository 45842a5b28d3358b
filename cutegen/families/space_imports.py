"""The files behind a space: its own, and those of other spaces that it imports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["with_imports"]

#: What a space imports: files of another folder, something of such a file, or something of one beside it.
_OTHER_FILES = re.compile(r"^from \.\.(\w+) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)$", re.MULTILINE)
_OTHER_SPACE = re.compile(r"^from \.\.(\w+)\.(\w+) import", re.MULTILINE)
_BESIDE = re.compile(r"^from \.(\w+) import", re.MULTILINE)


def with_imports(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return ``files`` of spaces, and those that they import, directly or not; sorted."""
    waiting = list(files)
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imported(file, file.parent.parent)
    return tuple(sorted(found))


def _imported(file: Path, spaces: Path) -> Iterator[Path]:
    """Yield the files of spaces that a file of one imports."""
    text = file.read_text(encoding="utf-8")
    names = [*_OTHER_SPACE.findall(text), *((file.parent.name, stem) for stem in _BESIDE.findall(text))]
    for folder, listed in _OTHER_FILES.findall(text):
        names += [(folder, name.split()[0]) for name in listed.split(", ")]
    yield from (spaces / folder / f"{stem}.py" for folder, stem in names)
