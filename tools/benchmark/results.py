"""A results file: conditions, sessions and one record per shape; resumed, never rewritten."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cutegen.digest import Json
from cutegen.errors import CutegenError, StoreError, UsageError
from cutegen.families.registry import parse_problem
from cutegen.family import Problem
from cutegen.measure.timing import Timing
from cutegen.system.publish import publish

__all__ = [
    "CONTEST",
    "COPY",
    "ENERGY",
    "FAMILY",
    "FOREIGN",
    "OWN",
    "TABLES",
    "Entry",
    "InContext",
    "Results",
    "ShapeResult",
    "differences",
    "kind_of",
    "write_json",
]

SCHEMA = 1
#: What a file may hold: implementations side by side, one with its knobs changed, or winners of tables.
CONTEST, ENERGY, TABLES = "gemm contest", "gemm energy", "gemm tables"
#: A family beside its baselines, written by tools/bench_family.py.
FAMILY = "family"
#: Kernels that others wrote, written by tools/bench_foreign.py.
FOREIGN = "foreign"
#: The contestant that the results are about.
OWN = "cutegen"
#: The one that computes no GEMM, and shows what memory gives.
COPY = "copy"


@dataclass(frozen=True)
class Entry:
    """How one implementation did on one shape.

    Attributes:
        outcome: ``ok``; or how it failed, as for trials, or ``unsupported``.
        error: Why not ok, in words.
        timing: Settled timing from the rounds that all implementations shared; None unless ok.
        config: What it ran, for people.
        choice: The same for programs: enough to run it again without tuning.
        tuning_s: Seconds that finding it took; None where that is not known.
        details: Everything else worth keeping.
    """

    outcome: str
    error: str = ""
    timing: Timing | None = None
    config: str = ""
    choice: Mapping[str, Json] = field(default_factory=dict)
    tuning_s: float | None = None
    details: Mapping[str, Json] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it computed the right thing and was timed."""
        return self.outcome == "ok" and self.timing is not None

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "outcome": self.outcome,
            "error": self.error,
            "timing": None if self.timing is None else self.timing.to_json(),
            "config": self.config,
            "choice": dict(self.choice),
            "tuning_s": self.tuning_s,
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Return the entry that :meth:`to_json` described."""
        timing = data["timing"]
        return cls(**{**data, "timing": None if timing is None else Timing.from_json(timing)})


@dataclass(frozen=True)
class InContext:
    """The timings of one shape in a further launch context.

    Attributes:
        reference: The vendor's call.
        timings: The implementations that ran there, by name; of each the kernel that its entry names.
    """

    reference: Timing
    timings: Mapping[str, Timing]

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        timings: dict[str, Json] = {name: timing.to_json() for name, timing in self.timings.items()}
        return {"reference": self.reference.to_json(), "timings": timings}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> InContext:
        """Return the timings that :meth:`to_json` described."""
        timings = {name: Timing.from_json(timing) for name, timing in data["timings"].items()}
        return cls(Timing.from_json(data["reference"]), timings)


@dataclass(frozen=True)
class ShapeResult:
    """Everything measured on one shape, in one set of interleaved rounds.

    Attributes:
        name: What the shapes file calls it.
        problem: What was computed.
        reference: The vendor's call, such as ``torch.mm``, timed in the same rounds.
        entries: The implementations, by name.
        rounds: Rounds that all of them ran in.
        settle_s: Seconds of burn-in before the rounds.
        settled: Whether the clock was seen to hold.
        seconds: Wall-clock time of everything on this shape, tuning of the peers included.
        finished_at: UTC, ISO 8601.
        session: Index into the file's sessions.
        contexts: What was measured in launch contexts other than the first, by context.
    """

    name: str
    problem: Problem
    reference: Timing
    entries: Mapping[str, Entry]
    rounds: int
    settle_s: float
    settled: bool | None
    seconds: float
    finished_at: str
    session: int = 0
    contexts: Mapping[str, InContext] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        """The sizes as tables show them: ``4096 x 2112 x 7168``."""
        return str(self.problem).split()[1].replace("x", " x ")

    def timing(self, name: str, context: str = "") -> Timing | None:
        """Return the timing of an implementation in a context (the first if empty), None if there is none."""
        if context:
            return self.contexts[context].timings.get(name) if context in self.contexts else None
        entry = self.entries.get(name)
        return entry.timing if entry is not None and entry.ok else None

    def ratio(self, peer: str = "", context: str = "") -> float | None:
        """Return time of ``peer`` (the reference if empty) over cutegen's, paired; None if one is missing."""
        own = self.timing(OWN, context)
        if own is None or own.ratio is None:
            return None
        if not peer:
            return own.ratio
        other = self.timing(peer, context)
        return None if other is None else other.paired.mid / own.paired.mid

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data; the sizes are there for readers and not read back."""
        p = self.problem
        contexts: dict[str, Json] = {name: found.to_json() for name, found in self.contexts.items()}
        return {
            "name": self.name,
            "problem": str(p),
            "sizes": dict(p.sizes),
            "reference": self.reference.to_json(),
            "entries": {name: entry.to_json() for name, entry in self.entries.items()},
            "rounds": self.rounds,
            "settle_s": self.settle_s,
            "settled": self.settled,
            "seconds": self.seconds,
            "finished_at": self.finished_at,
            "session": self.session,
            **({"contexts": contexts} if contexts else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShapeResult:
        """Return the result that :meth:`to_json` described."""
        fields = {
            key: value for key, value in data.items() if key not in ("sizes", "extents")
        }  # the older name
        fields["problem"] = parse_problem(data["problem"])
        fields["reference"] = Timing.from_json(data["reference"])
        fields["entries"] = {name: Entry.from_json(entry) for name, entry in data["entries"].items()}
        contexts = data.get("contexts", {})
        fields["contexts"] = {name: InContext.from_json(found) for name, found in contexts.items()}
        return cls(**fields)


@dataclass(frozen=True)
class Results:
    """A results file in memory. Immutable: :meth:`begin` and :meth:`with_shape` give changed copies.

    Attributes:
        conditions: What must agree for two rows to belong in one table.
        sessions: The runs that the rows come from: when, how started, on which machine.
        shapes: The rows, in the order in which they were first measured.
        kind: What the entries are: ``CONTEST``, ``ENERGY`` or ``TABLES``.
    """

    conditions: Mapping[str, Json]
    sessions: tuple[Mapping[str, Json], ...] = ()
    shapes: tuple[ShapeResult, ...] = ()
    kind: str = CONTEST

    def begin(self, session: Mapping[str, Json]) -> Results:
        """Return the results with one more session, the one that later rows belong to."""
        return replace(self, sessions=(*self.sessions, session))

    def with_shape(self, shape: ShapeResult) -> Results:
        """Return the results with ``shape`` added to the latest session, replacing a row of its name."""
        new = replace(shape, session=len(self.sessions) - 1)
        if any(old.name == new.name for old in self.shapes):
            return replace(self, shapes=tuple(new if s.name == new.name else s for s in self.shapes))
        return replace(self, shapes=(*self.shapes, new))

    def find(self, problem: Problem) -> ShapeResult | None:
        """Return the row of ``problem``, None if it was not measured."""
        return next((shape for shape in self.shapes if shape.problem == problem), None)

    def covers(self, name: str, problem: Problem, contestants: Sequence[str], *, retry: bool) -> bool:
        """Whether the row of a shape holds every one of ``contestants``.

        Args:
            name: The shape's name.
            problem: What it poses; a row of that name for another problem does not count.
            contestants: Who must be in it.
            retry: A contestant that failed does not count as there.
        """
        row = next((s for s in self.shapes if s.name == name and s.problem == problem), None)
        if row is None:
            return False
        return all(who in row.entries and (row.entries[who].ok or not retry) for who in contestants)

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return {
            "kind": self.kind,
            "schema": SCHEMA,
            "conditions": dict(self.conditions),
            "sessions": [dict(session) for session in self.sessions],
            "shapes": [shape.to_json() for shape in self.shapes],
        }

    @classmethod
    def load(cls, path: Path) -> Results:
        """Return the results stored at ``path``.

        Raises:
            StoreError: The file cannot be read.
            UsageError: It is no results file of a contest, or of a newer schema.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise StoreError(f"results file {path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise UsageError(f"results file {path} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("kind") not in (CONTEST, ENERGY, TABLES):
            raise UsageError(
                f"{path} is not a results file of tools/bench_gemm.py, bench_energy.py or compare_tables.py"
            )
        if data.get("schema") != SCHEMA:
            raise UsageError(f"{path} has schema {data.get('schema')!r}; this version reads {SCHEMA}")
        try:
            rows = tuple(ShapeResult.from_json(shape) for shape in data["shapes"])
            return cls(data["conditions"], tuple(data["sessions"]), rows, data["kind"])
        except (KeyError, TypeError, CutegenError) as error:
            raise UsageError(f"results file {path} is damaged: {error!r}") from error

    def save(self, path: Path) -> None:
        """Write the file in one step: readers see the old one or the new one.

        Raises:
            StoreError: The folder or the disk does not allow it; the old file is untouched.
        """
        write_json(path, self.to_json())


def kind_of(path: Path) -> str:
    """Return what a results file says that it is; one that cannot be read says nothing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("kind", "")) if isinstance(found, dict) else ""


def write_json(path: Path, document: Mapping[str, Json]) -> None:
    """Write a results file in one step: readers see the old one or the new one.

    Raises:
        StoreError: The file cannot be written; the old file is unchanged.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    publish(path, text.encode(), "results file")


def differences(there: Json, here: Json, where: str = "") -> Iterator[str]:
    """Yield a sentence for every value in which the conditions of a file differ from the present ones."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in sorted({*there, *here}):
            yield from differences(there.get(key), here.get(key), f"{where}.{key}" if where else key)
    elif there != here:
        yield f"{where} is {there!r} in the file but {here!r} here"
