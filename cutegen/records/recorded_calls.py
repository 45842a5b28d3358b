"""Recordings: files of JSON lines with the problems that a program calls, how often, and what answered them.

Files are only appended to. Each section begins with a header; a row holds a number of calls. Rows of several
sections, files and ranks are added up.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cutegen.digest import Json
from cutegen.errors import CutegenError, ProblemError, StoreError, UsageError
from cutegen.families.registry import SOURCES, parse_problem
from cutegen.family import Problem
from cutegen.system.documents import parse_json, read_bytes
from cutegen.system.publish import real_path, require_file_name, why_no_folder
from cutegen.text import how_many, printable, shown

__all__ = [
    "ALIGNMENTS",
    "UNKNOWN",
    "Call",
    "Recorded",
    "append_calls",
    "files_of",
    "problems_of",
    "rank_path",
    "read_recordings",
    "require_writable",
    "table_of",
]

_SCHEMA = 1
_MARK = "cutegen_recording"
#: ``how`` of calls that were recorded without a GPU.
UNKNOWN = "unknown"
#: What a row may say in words.
_WORDS: Mapping[str, Sequence[str]] = {
    "phase": ("forward", "backward"),
    "how": ("exact", "range", "bucket", "nearest", "default", "given", UNKNOWN),
    "source": (*SOURCES, "torch", ""),
}
#: Alignments that are distinguished, in bytes; a larger one counts as the largest.
ALIGNMENTS = tuple(2**power for power in range(9))
#: Most calls of a row; a larger number is malformed.
_MOST = 2**53
#: Most malformed lines of a file that are reported one by one.
_NAMED_LINES = 8


@dataclass(frozen=True)
class Call:
    """A kind of call, of which a recording counts how often it was made.

    Attributes:
        problem: What is computed.
        phase: ``forward`` or ``backward``, which includes recomputation for it.
        how: The rule of lookup that answered: ``exact``, ``range``, ``bucket``, ``nearest``, ``default``;
            ``given`` for a config of the caller's, or ``unknown`` without a GPU.
        source: Whose kernel was chosen: ``cutegen``, ``operators`` or ``torch``; empty if unknown.
        module: The layer whose weight is an operand, numbers in its name as ``*``; empty if not known.
    """

    problem: Problem
    phase: str
    how: str
    source: str = ""
    module: str = ""


@dataclass(frozen=True)
class Recorded:
    """The sum of recordings.

    Attributes:
        calls: How often each kind of call was made.
        notes: What could not be read, and what was recorded on another GPU, in words.
        alignments: Bytes to which all operands of all calls of a kind were aligned, where that was recorded.
    """

    calls: Mapping[Call, int]
    notes: tuple[str, ...] = ()
    alignments: Mapping[Call, int] = field(default_factory=dict)

    @property
    def problems(self) -> dict[Problem, int]:
        """How often each problem was called, the most frequent first."""
        return problems_of(self.calls)


def problems_of(calls: Mapping[Call, int]) -> dict[Problem, int]:
    """Return how often each problem was called, the most frequent first."""
    counts: Counter[Problem] = Counter()
    for call, count in calls.items():
        counts[call.problem] += count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


# --- writing ---


def rank_path(path: Path, rank: int | None) -> Path:
    """Return the file of a rank, ``model.rank3.jsonl`` for ``model.jsonl``; ``path`` itself without ranks."""
    return path if rank is None else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def require_writable(path: Path) -> None:
    """Check that a recording can be written to the file ``path``, before a run that would be lost.

    Raises:
        StoreError: It cannot, as far as is known now.
    """
    require_file_name(path)
    try:
        why = _why_not_writable(path)
    except (OSError, ValueError) as error:
        why = str(error)
    if why:
        raise StoreError(f"recording {shown(str(path))} cannot be written: {why}")


def _why_not_writable(path: Path) -> str:
    if path.is_dir():
        return "it is a folder; name a file, such as model.jsonl"
    if not path.exists():
        return why_no_folder(path.parent)
    return "" if os.access(path, os.W_OK) else f"{path} is not writable; name a file in a folder that is"


def append_calls(
    path: Path,
    about: Mapping[str, Json],
    calls: Mapping[Call, int],
    alignments: Mapping[Call, int] | None = None,
) -> None:
    """Append a section to the file ``path``, which is made if it is not there.

    Args:
        path: The file.
        about: Fields of the header besides the version.
        calls: Calls to add.
        alignments: Bytes to which operands were aligned.

    Raises:
        StoreError: It cannot be written.
    """
    lines: list[dict[str, Json]] = [{_MARK: _SCHEMA, **about}]
    for call, count in calls.items():
        row: dict[str, Json] = {"problem": str(call.problem), "phase": call.phase, "count": count}
        row |= {"how": call.how, "source": call.source}
        row |= {"module": call.module} if call.module else {}
        row |= {"aligned": alignments[call]} if alignments and call in alignments else {}
        lines.append(row)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":  # an earlier writer was killed within a line
                    data = b"\n" + data
            file.write(data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"recording {shown(str(path))} cannot be written: {reason}") from error


# --- reading ---


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a recording: ``path`` if there is one, and those of its ranks.

    Raises:
        UsageError: There is none.
    """
    name = f"{path.stem}.rank"
    try:
        beside = sorted(path.parent.iterdir())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"recording {shown(str(path))} cannot be read: {reason}") from error
    ranks = [
        each
        for each in beside
        if each.suffix == path.suffix and each.name.startswith(name) and each.stem[len(name) :].isdecimal()
    ]
    found = ([path] if path.exists() else []) + ranks
    if not found:
        raise UsageError(f"recording {path} does not exist; cutegen.record({str(path)!r}) writes one")
    return tuple(found)


def read_recordings(paths: Iterable[Path], gpu: str = "") -> Recorded:
    """Return the sum of the recordings ``paths``, each with the files of its ranks.

    A line that cannot be read is left out and noted; so are a section of another version, and rows before
    any header. A file counts once, under however many names it is given.

    Args:
        paths: The files.
        gpu: The GPU at hand; sections of other GPUs count, and are noted.

    Raises:
        UsageError: A file is missing or cannot be read.
    """
    calls: Counter[Call] = Counter()
    alignments: dict[Call, int] = {}
    notes: list[str] = []
    files: dict[Path, Path] = {}
    for each in (each for path in paths for each in files_of(path)):
        files.setdefault(real_path(each), each)
    for file in files.values():
        reader = _Reader(file, gpu)
        reader.read()
        calls.update(reader.calls)
        notes += reader.notes
        for call, aligned in reader.alignments.items():
            alignments[call] = min(aligned, alignments.get(call, aligned))
    return Recorded(calls, tuple(notes), alignments)


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path, gpu: str) -> None:
        self.calls: Counter[Call] = Counter()
        self.alignments: dict[Call, int] = {}
        self.notes: list[str] = []
        self._path = path
        self._gpu = gpu
        self._headed = self._readable = False
        self._unread = self._before_header = 0

    def read(self) -> None:
        data = read_bytes(self._path, "recording", malformed=UsageError, unreadable=UsageError)
        for number, line in enumerate(data.split(b"\n"), 1):
            if not line.strip():
                continue
            where = f"recording {self._path} line {number}"
            try:
                self._take(parse_json(line, where, malformed=UsageError), where)
            except CutegenError as error:
                self._unread += 1
                if self._unread <= _NAMED_LINES:
                    self._note(f"{printable(str(error))}: left out")
        if self._unread > _NAMED_LINES:
            self._note(f"recording {self._path}: {self._unread - _NAMED_LINES} more lines left out")
        if self._before_header:
            rows = how_many(self._before_header, "row")
            self._note(f"recording {self._path}: {rows} before any header: left out")

    def _take(self, document: Json, where: str) -> None:
        if not isinstance(document, dict):
            raise UsageError(f"{where} is {shown(document)}, not an object")
        if _MARK in document:
            self._begin(document, where)
        elif self._readable:
            call, count, aligned = _read_row(document, where)
            self.calls[call] += count
            if aligned:
                self.alignments[call] = min(aligned, self.alignments.get(call, aligned))
        elif not self._headed:
            self._before_header += 1

    def _begin(self, header: Mapping[str, Json], where: str) -> None:
        version, gpu = header[_MARK], header.get("gpu")
        self._headed, self._readable = True, version == _SCHEMA
        if not self._readable:
            self._note(
                f"{where} begins a section of version {shown(version)}, but this cutegen reads {_SCHEMA}: "
                "left out"
            )
        elif self._gpu and isinstance(gpu, str) and gpu != self._gpu:
            self._note(
                f"recording {self._path} was made on {shown(gpu)}, not on {self._gpu}: its counts hold, its "
                "answers do not"
            )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _read_row(row: Mapping[str, Json], where: str) -> tuple[Call, int, int]:
    """Return a kind of call, how often it was made, and its alignment; 0 if the row has none."""
    texts = {name: row.get(name) for name in ("problem", *_WORDS)}
    if not all(isinstance(text, str) for text in texts.values()):
        raise UsageError(f"{where} lacks a text for problem, phase, how or source")
    line, phase, how, source = map(str, texts.values())
    count = row.get("count")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST:
        raise UsageError(f"{where}: count is {shown(count)}, not a number of calls")
    module, aligned = row.get("module", ""), row.get("aligned", 0)
    if not isinstance(module, str) or not isinstance(aligned, int) or aligned not in (0, *ALIGNMENTS):
        raise UsageError(f"{where}: module is {shown(module)}, aligned {shown(aligned)}; none writes that")
    for name, valid in _WORDS.items():
        if texts[name] not in valid:
            words = ", ".join(word or "''" for word in valid)
            raise UsageError(f"{where}: {name} is {shown(texts[name])}; valid: {words}")
    try:
        return Call(parse_problem(line), phase, how, source, module), count, aligned
    except ProblemError as error:
        raise UsageError(f"{where}: {error}") from error


def table_of(calls: Mapping[Call, int]) -> list[tuple[str, ...]]:
    """Return count, phase, answer and problem of every kind of call as words, the most frequent first."""
    ordered: Sequence[tuple[Call, int]] = sorted(calls.items(), key=lambda item: (-item[1], str(item[0])))
    return [
        (
            str(count),
            call.phase,
            f"{call.how} ({call.source})" if call.source else call.how,
            f"{call.problem} of {call.module}" if call.module else str(call.problem),
        )
        for call, count in ordered
    ]
