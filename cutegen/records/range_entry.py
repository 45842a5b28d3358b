"""The entry of a range of sizes in a dispatch table: the config for each size, and the evidence."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from cutegen.digest import Json
from cutegen.errors import TableError
from cutegen.families.ranges import Range
from cutegen.family import Problem
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS
from cutegen.measure.policy import OBJECTIVES
from cutegen.records.entry import Entry, read_config, require_number, require_text
from cutegen.space import Config
from cutegen.text import shown

__all__ = ["Piece", "Point", "RangeEntry", "Regret"]


@dataclass(frozen=True)
class Piece:
    """Neighbouring sizes that one config answers.

    Attributes:
        first: The smallest of them.
        last: The largest.
        config: The config; None where ``source`` is ``torch``.
        source: As of an :class:`~cutegen.records.entry.Entry`.
        artifact_key: Its compiled kernel, as there.
        ratio_to_baseline: The baseline's time over that of the config: measured at sizes of the piece, else
            interpolated; None if unknown.
    """

    first: int
    last: int
    config: Config | None
    source: str = "cutegen"
    artifact_key: str = ""
    ratio_to_baseline: float | None = None


@dataclass(frozen=True)
class Point:
    """One size at which candidates were measured beside each other.

    Attributes:
        size: The size.
        time_us: Microseconds of the config that answers there.
        ratio_to_baseline: The baseline's time over it, paired; None if there is no baseline.
        regret: How far the config that answered before this measurement is behind the fastest here, as a
            fraction; None if the measurement was used to choose the answer.
        trial: The record of the measurement.
    """

    size: int
    time_us: float
    ratio_to_baseline: float | None = None
    regret: float | None = None
    trial: str = ""


@dataclass(frozen=True)
class Regret:
    """By how much the answers of a range were behind the best candidate, at sizes not used to choose them.

    Attributes:
        mean: In the geometric mean, as a fraction.
        worst: At worst.
        sizes: Number of these sizes, which are drawn at random.
    """

    mean: float
    worst: float
    sizes: int


@dataclass(frozen=True)
class RangeEntry:
    """The answers for a range of sizes and the evidence for them.

    Attributes:
        range: Which problems it answers.
        pieces: In order, without gap or overlap, from the range's first size to its last.
        regret: Measured at random sizes; None if none were left to measure.
        points: Where it was measured, by increasing size.
        objective: What the configs were chosen by.
        context: What ran before each launch that was timed, as of an entry.
        baseline: What ratios compare with, such as ``torch.mm``; empty if nothing.
        contended_by: Other processes that used the GPU meanwhile, in words; empty if none was seen.
        run: Name of the tuning run.

    Raises:
        TableError: The pieces do not cover the range exactly, or one names an unknown source, no config, or a
            malformed key.
    """

    range: Range
    pieces: tuple[Piece, ...]
    regret: Regret | None = None
    points: tuple[Point, ...] = ()
    objective: str = "time"
    context: str = BACK_TO_BACK
    baseline: str = ""
    contended_by: str = ""
    run: str = ""

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise TableError(f"context is {shown(self.context)}; valid: {', '.join(CONTEXTS)}")
        if self.objective not in OBJECTIVES:
            raise TableError(f"objective is {shown(self.objective)}; valid: {', '.join(OBJECTIVES)}")
        expected = self.range.first
        for piece in self.pieces:
            if piece.first != expected or piece.last < piece.first:
                raise TableError(
                    f"piece {piece.first}..{piece.last} should begin at {expected}; pieces must be in order "
                    f"and cover {self.range.first}..{self.range.last} without gap or overlap"
                )
            expected = piece.last + 1
        if expected != self.range.last + 1:
            raise TableError(f"the pieces end at {expected - 1}, but the range at {self.range.last}")
        for piece in self.pieces:
            Entry(self.range.low, piece.config, piece.source, piece.artifact_key)  # validates the three

    @cached_property
    def _ends(self) -> list[int]:
        return [piece.last for piece in self.pieces]

    def piece(self, problem: Problem) -> Piece:
        """Return the piece that answers ``problem``, which must be in the range."""
        return self.pieces[bisect_left(self._ends, problem.sizes[self.range.size])]

    def entry(self, problem: Problem) -> Entry:
        """Return the entry of ``problem`` alone, without times if it was not measured itself."""
        piece, size = self.piece(problem), problem.sizes[self.range.size]
        point = next((point for point in self.points if point.size == size), None)
        ratios = [piece.ratio_to_baseline, point.ratio_to_baseline if point else None]
        return Entry(
            problem,
            piece.config,
            piece.source,
            piece.artifact_key,
            time_us=point.time_us if point else None,
            ratio_to_baseline=min((ratio for ratio in ratios if ratio is not None), default=None),
            objective=self.objective,
            context=self.context,
            baseline=self.baseline,
            contended_by=self.contended_by,
            trial_ids=(point.trial,) if point and point.trial else (),
        )

    def without(self, other: Range) -> tuple[RangeEntry, ...]:
        """Return what remains of this range if ``other`` takes precedence: all of it if they do not overlap.

        Else these are up to two ranges, below and above the other; one of a single size is dropped.
        """
        own = self.range
        if not own.overlaps(other):
            return (self,)
        below = (own.low, own.at_most(other.first - 1))
        above = (own.at_least(other.last + 1), own.high)
        return tuple(self._cut(low, high) for low, high in (below, above) if low and high and low != high)

    def _cut(self, low: Problem, high: Problem) -> RangeEntry:
        kept = Range(low, high)
        pieces = (
            replace(piece, first=max(piece.first, kept.first), last=min(piece.last, kept.last))
            for piece in self.pieces
            if piece.first <= kept.last and kept.first <= piece.last
        )
        points = (point for point in self.points if kept.first <= point.size <= kept.last)
        return replace(self, range=kept, pieces=tuple(pieces), points=tuple(points))

    # -- files

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data, without the range."""
        choices = list(dict.fromkeys((p.config, p.source, p.artifact_key) for p in self.pieces))
        listed: list[Json] = [
            {"config": None if config is None else config.to_json(), "source": source, "artifact_key": key}
            for config, source, key in choices
        ]
        pieces: dict[str, Json] = {
            f"{p.first}..{p.last}": {
                "choice": choices.index((p.config, p.source, p.artifact_key)),
                "ratio_to_baseline": p.ratio_to_baseline,
            }
            for p in self.pieces
        }
        data: dict[str, Json] = {
            "objective": self.objective,
            "context": self.context,
            "baseline": self.baseline,
            "contended_by": self.contended_by,
            "run": self.run,
            "regret": None if self.regret is None else asdict(self.regret),
            "choices": listed,
            "pieces": pieces,
            "points": {str(p.size): {f.name: getattr(p, f.name) for f in fields(p)[1:]} for p in self.points},
        }
        return {name: value for name, value in data.items() if value != "" or name == "objective"}

    @classmethod
    def from_json(cls, of: Range, data: Json) -> RangeEntry:
        """Return the entry of the range ``of`` that :meth:`to_json` described.

        Raises:
            TableError: A field is unknown, missing or of the wrong type, or pieces leave a gap or overlap.
        """
        values = _fields("a range", data, ["choices", *(f.name for f in fields(cls)[1:])])
        for name in ("objective", "context", "baseline", "contended_by", "run"):
            require_text(name, values.get(name, ""))
        choices = [_choice(value) for value in _list("choices", values.pop("choices", None))]
        named = _object("pieces", values.pop("pieces", None)).items()
        pieces = sorted((_piece(name, value, choices) for name, value in named), key=lambda p: p.first)
        points = [_point(name, value) for name, value in _object("points", values.pop("points", {})).items()]
        regret = values.pop("regret", None)
        return cls(
            of,
            tuple(pieces),
            None if regret is None else _regret(regret),
            tuple(sorted(points, key=lambda point: point.size)),
            **values,
        )


_Choice = tuple[Config | None, str, str]


def _choice(data: Json) -> _Choice:
    values = _fields("a choice", data, ("config", "source", "artifact_key"))
    source, key = values.get("source", "cutegen"), values.get("artifact_key", "")
    require_text("source", source)
    require_text("artifact_key", key)
    return read_config(values.get("config")), source, key


def _piece(name: str, data: Json, choices: Sequence[_Choice]) -> Piece:
    ends = re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})", name)
    if ends is None:
        raise TableError(f"piece {shown(name)} is not of the form 17..64")
    values = _fields(f"piece {name}", data, ("choice", "ratio_to_baseline"))
    at, ratio = values.get("choice"), values.get("ratio_to_baseline")
    if type(at) is not int or not 0 <= at < len(choices):
        raise TableError(
            f"piece {name}: choice is {shown(at)}; valid: a place in choices, which has {len(choices)}"
        )
    require_number("ratio_to_baseline", ratio)
    config, source, key = choices[at]
    return Piece(int(ends[1]), int(ends[2]), config, source, key, ratio)


def _point(name: str, data: Json) -> Point:
    if not re.fullmatch(r"[0-9]{1,18}", name):
        raise TableError(f"point {shown(name)} is no size")
    values = _fields(f"point {name}", data, [f.name for f in fields(Point)[1:]])
    require_number("time_us", values.get("time_us"), optional=False)
    require_number("ratio_to_baseline", values.get("ratio_to_baseline"))
    _require_fraction("regret", values.get("regret"))
    require_text("trial", values.get("trial", ""))
    return Point(int(name), **values)


def _regret(data: Json) -> Regret:
    values = _fields("regret", data, [f.name for f in fields(Regret)])
    for name in ("mean", "worst"):
        _require_fraction(name, values.get(name), optional=False)
    sizes = values.get("sizes")
    if type(sizes) is not int or sizes < 1:
        raise TableError(f"regret was measured at {shown(sizes)} sizes; valid: 1 and more")
    return Regret(**values)


def _fields(what: str, data: Json, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TableError(f"{what} must be an object")
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise TableError(f"{what}: unknown field {shown(unknown[0])}; valid: {', '.join(known)}")
    return dict(data)


def _object(name: str, data: Json) -> Mapping[str, Json]:
    if not isinstance(data, dict):
        raise TableError(f"{name} must be an object")
    return data


def _list(name: str, data: Json) -> Sequence[Json]:
    if not isinstance(data, list):
        raise TableError(f"{name} must be a list")
    return data


def _require_fraction(name: str, value: object, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise TableError(f"{name} is {shown(value)}, not a fraction of at least 0")
