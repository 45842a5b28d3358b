"""The dispatch table: the winner of each problem and its evidence, as a JSON file that people can read."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cached_property
from itertools import chain, count
from pathlib import Path

from cutegen.digest import Json, digest
from cutegen.errors import CutegenError, StoreError, TableError, UsageError
from cutegen.families.ranges import Range, overlapping, parse_range
from cutegen.families.registry import parse_problem
from cutegen.family import Problem
from cutegen.records.entry import ANY, Entry, Fingerprint
from cutegen.records.lookup import Estimate, Index, Legal, Lookup, order_of
from cutegen.records.range_entry import RangeEntry
from cutegen.system.documents import read_json
from cutegen.system.publish import publish, real_path
from cutegen.text import shown

__all__ = [
    "ANY",
    "FALLBACKS",
    "Entry",
    "Fingerprint",
    "RangeEntry",
    "Table",
    "require_fallback",
]

_SCHEMA = 2
#: A table without ranges and fallback is written as early development versions
#: wrote it, and they can read it.
_SCHEMA_OF_ENTRIES = 1

#: Where PyTorch's own call answers instead of a kernel. ``torch``: wherever the kernel is not sure to be
#: faster. ``expected``: where PyTorch was measured to be faster or, if neither was measured, is predicted to
#: be. ``measured``: where it was measured to be faster. ``none``: nowhere.
FALLBACKS = ("torch", "expected", "measured", "none")


def require_fallback(name: str) -> str:
    """Return ``name`` if it is one of :data:`FALLBACKS`, or empty.

    Raises:
        UsageError: It is neither.
    """
    if name not in ("", *FALLBACKS):
        raise UsageError(f"fallback is {shown(name)}; valid: {', '.join(FALLBACKS)}")
    return name


class Table:
    """Winners by problem, for one fingerprint. Immutable; :meth:`with_entries` gives a changed copy.

    Args:
        fingerprint: What the entries were measured on.
        entries: At most one per problem; a later one replaces an earlier one.
        ranges: Answers for many sizes at once; where two overlap, the later one answers.
        fallback: Where PyTorch answers: one of :data:`FALLBACKS`; empty leaves that to the caller.

    Raises:
        UsageError: There is no such fallback.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        entries: Iterable[Entry] = (),
        ranges: Iterable[RangeEntry] = (),
        *,
        fallback: str = "",
    ) -> None:
        self.fingerprint = fingerprint
        self.fallback = require_fallback(fallback)
        by_problem = {entry.problem: entry for entry in entries}
        self._entries = {p: by_problem[p] for p in sorted(by_problem, key=order_of)}
        self._ranges = tuple(sorted(_latest(ranges), key=lambda each: order_of(each.range.low)))

    @property
    def entries(self) -> Mapping[Problem, Entry]:
        """The entries by problem, in the order of the file."""
        return self._entries

    @property
    def ranges(self) -> tuple[RangeEntry, ...]:
        """The ranges, in the order of the file."""
        return self._ranges

    def __len__(self) -> int:
        return len(self._entries) + len(self._ranges)

    def with_entries(
        self, entries: Iterable[Entry] = (), ranges: Iterable[RangeEntry] = (), *, fallback: str | None = None
    ) -> Table:
        """Return this table with ``entries`` and ``ranges`` added, replacing those of the same problems.

        Args:
            entries: Winners of single problems.
            ranges: Answers for many sizes.
            fallback: What the table's is from now on; None leaves it.
        """
        kept = self.fallback if fallback is None else fallback
        merged = [*self._entries.values(), *entries]
        return Table(self.fingerprint, merged, [*self._ranges, *ranges], fallback=kept)

    def mismatch(self, present: Fingerprint) -> tuple[str, ...]:
        """Return why this table does not hold for ``present``, field by field; empty means it does."""
        return self.fingerprint.mismatch(present)

    def require(self, present: Fingerprint) -> None:
        """Do nothing if the table holds for ``present``.

        Raises:
            TableError: It does not; the message names the fields.
        """
        reasons = self.mismatch(present)
        if reasons:
            raise TableError(f"dispatch table is for another machine: {'; '.join(reasons)}")

    def lookup(self, problem: Problem, legal: Legal, estimate: Estimate | None = None) -> Lookup:
        """Return the entry to use for ``problem`` and how it was found.

        Tried in turn: the problem itself; a range that holds it; an entry of the same signature in the same
        power-of-two bucket; the nearest entry of its kin (as the family says) whose sizes differ by less than
        a factor of four each. An entry whose config is not valid for ``problem`` is passed over.

        Args:
            problem: What is to be computed.
            legal: Whether a config is valid for ``problem``, by its space's rules.
            estimate: If given, the neighbour with the fastest predicted config answers, not the closest.
        """
        return self._index.lookup(problem, legal, estimate)

    @cached_property
    def _index(self) -> Index:
        return Index(self._entries, self._ranges)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that tables of other contents do not share."""
        return digest(self.to_json(), length=16)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        more: dict[str, Json] = {"fallback": self.fallback} if self.fallback else {}
        if self._ranges:
            more["ranges"] = {str(entry.range): entry.to_json() for entry in self._ranges}
        schema = _SCHEMA if more else _SCHEMA_OF_ENTRIES
        metadata: dict[str, Json] = {"schema": schema, **self.fingerprint.to_json()}
        entries: Json = {str(p): e.to_json() for p, e in self._entries.items()}
        return {"_metadata": metadata, "entries": entries, **more}

    @classmethod
    def from_json(cls, data: Json) -> Table:
        """Return the table that :meth:`to_json` described.

        Raises:
            TableError: Something is missing or malformed; the message says what and in which entry.
        """
        if not isinstance(data, dict) or not isinstance(data.get("_metadata"), dict):
            raise TableError("a dispatch table is an object with _metadata and entries")
        metadata = data["_metadata"]
        schema = metadata.get("schema")
        if type(schema) is not int or schema < 1:
            raise TableError(f"_metadata has schema {shown(schema)}; valid: 1 to {_SCHEMA}")
        if schema > _SCHEMA:
            raise TableError(f"schema {schema} is newer than {_SCHEMA}; upgrade cutegen or tune again")
        entries = data.get("entries")
        if not isinstance(entries, dict):
            raise TableError("entries must be an object from problems to winners")
        lines: dict[Problem, str] = {}
        found = [_entry(line, value, lines) for line, value in entries.items()]
        fallback = data.get("fallback", "")
        if fallback not in ("", *FALLBACKS):
            raise TableError(f"fallback is {shown(fallback)}; valid: {', '.join(FALLBACKS)}")
        return cls(Fingerprint.from_json(metadata), found, _ranges(data.get("ranges", {})), fallback=fallback)

    @classmethod
    def load(cls, path: Path | str) -> Table:
        """Return the table stored at ``path``.

        Raises:
            TableError: It is not a dispatch table; the message names the file, the place and the remedy.
            StoreError: The file does not exist or cannot be read.
        """
        document = read_json(Path(path), "dispatch table", malformed=_unreadable)
        try:
            return cls.from_json(document)
        except TableError as error:
            raise TableError(f"dispatch table {path}: {error}") from error

    @classmethod
    def find(cls, path: Path | str) -> Table | None:
        """Return the table stored at ``path``, or None if there is no such file; raises as :meth:`load`."""
        try:
            return cls.load(path)
        except StoreError as error:
            if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
                return None
            raise

    @classmethod
    def claim(cls, path: Path | str, fingerprint: Fingerprint) -> Table | None:
        """Return the table at ``path`` if it holds for ``fingerprint``, or None if there is no file.

        A table that does not hold, or is malformed, is renamed to a dated name beside it. Several processes
        may do so at once; none sets aside what another began anew.

        Raises:
            StoreError: The file cannot be read, locked or renamed.
        """
        path = real_path(Path(path))
        table, stale = cls._judge(path, fingerprint)
        if stale:
            with _locked(path):
                table = cls._claim(path, fingerprint)
        return table

    @classmethod
    def _claim(cls, path: Path, fingerprint: Fingerprint) -> Table | None:
        """As :meth:`claim`, with the lock held."""
        table, stale = cls._judge(path, fingerprint)
        if stale:
            _set_aside(path)
        return table

    @classmethod
    def _judge(cls, path: Path, fingerprint: Fingerprint) -> tuple[Table | None, bool]:
        """Return the table at ``path`` if it holds, and whether there is one that does not."""
        try:
            table = cls.find(path)
        except TableError:
            return None, True
        if table is None or not table.mismatch(fingerprint):
            return table, False
        return None, True

    def save(self, path: Path | str) -> None:
        """Write the table to ``path`` in one step: readers see the old file or the new one.

        If ``path`` is a symbolic link, its target is replaced; the mode of the old file is kept.

        Raises:
            StoreError: The file cannot be written; the old file is unchanged.
        """
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        publish(Path(path), text.encode(), "dispatch table")

    @classmethod
    def update(
        cls,
        path: Path | str,
        fingerprint: Fingerprint,
        entries: Iterable[Entry] = (),
        ranges: Iterable[RangeEntry] = (),
        *,
        fallback: str | None = None,
        anew: bool = False,
    ) -> Table:
        """Add ``entries`` and ``ranges`` to the table at ``path``, begun if missing, and return it.

        Several processes may do so at once; none loses what another added.

        Args:
            path: The file.
            fingerprint: What the entries were measured on.
            entries: Winners of single problems.
            ranges: Answers for many sizes.
            fallback: What the table's is from now on; None leaves it.
            anew: Whether a table that is malformed, or for another fingerprint, is set aside as by
                :meth:`claim`, and a new one begun.

        Raises:
            TableError: The file is malformed or for another fingerprint, and not ``anew``; it is left as it
                is.
            StoreError: It cannot be read or written.
        """
        path = real_path(Path(path))  # writers through a link and without it take the same lock
        with _locked(path):
            found = cls._claim(path, fingerprint) if anew else cls.find(path)
            table = cls(fingerprint) if found is None else found
            table.require(fingerprint)
            table = table.with_entries(entries, ranges, fallback=fallback)
            table.save(path)
            return table


def _entry(line: str, data: Json, lines: dict[Problem, str]) -> Entry:
    """Return the entry of the problem ``line``; ``lines`` notes which line described each problem."""
    try:
        entry = Entry.from_json(parse_problem(line), data)
    except CutegenError as error:
        raise TableError(f"entry {shown(line)}: {error}") from error
    other = lines.setdefault(entry.problem, line)
    if other != line:
        raise TableError(f"entries {shown(other)} and {shown(line)} are for the same problem")
    return entry


def _ranges(data: Json) -> list[RangeEntry]:
    if not isinstance(data, dict):
        raise TableError("ranges must be an object from problem lines with a range to answers")
    found = []
    for line, value in data.items():
        try:
            found.append(RangeEntry.from_json(parse_range(line), value))
        except CutegenError as error:
            raise TableError(f"range {shown(line)}: {error}") from error
    # Files may hold 64x9..65x64 beside 64x8..64x64 unaligned, which earlier versions did not see overlap: the
    # later one answers.
    written: dict[str, list[Range]] = {}
    for entry in found:
        written.setdefault(entry.range.pattern, []).append(entry.range)
    for twice in filter(None, map(overlapping, written.values())):
        raise TableError(f"ranges {twice[0]} and {twice[1]} overlap, so it is not clear which answers")
    return found


def _latest(ranges: Iterable[RangeEntry]) -> list[RangeEntry]:
    """Return ``ranges`` without what later ones answer."""
    by_kind: dict[Hashable, list[RangeEntry]] = {}
    for entry in ranges:
        earlier = by_kind.get(entry.range.kind, [])
        kept = [part for each in earlier for part in each.without(entry.range)]
        by_kind[entry.range.kind] = [*kept, entry]
    return [entry for entries in by_kind.values() for entry in entries]


def _unreadable(message: str) -> TableError:
    return TableError(f"{message}; repair it or tune again")


def _set_aside(path: Path) -> None:
    """Rename the file ``path`` to a dated name that no file has; its lock is held."""
    dated = f"{path.stem}.until-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}"
    names = (f"{dated}{number}{path.suffix}" for number in chain([""], (f"-{n}" for n in count(2))))
    try:
        path.rename(next(name for name in map(path.with_name, names) if not name.exists()))
    except FileNotFoundError:
        pass  # whoever removed it knows no lock
    except OSError as error:
        raise StoreError(f"cannot set aside {path}: {error.strerror or error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the table's lock, a file beside it; the lock ends with the process that holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(path.with_name(f".{path.name}.lock"), flags, 0o666)
    except OSError as error:
        raise StoreError(f"dispatch table {path} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
