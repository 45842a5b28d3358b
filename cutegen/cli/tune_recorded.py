"""``python -m cutegen.tune --recorded``: problems by their weight, and how much of it has an answer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutegen.arch import find_arch
from cutegen.build.store import Store
from cutegen.cli.wrapped_text import Column, columns
from cutegen.digest import Json
from cutegen.errors import ProblemError, UsageError
from cutegen.families.ranges import Range
from cutegen.families.shapes import NamedProblem, NamedRange, Shape
from cutegen.family import Problem
from cutegen.measure.device import Device
from cutegen.records.calibrations import calibrated_arch
from cutegen.records.recorded_calls import Call, problems_of, read_recordings
from cutegen.tuning.coverage import TUNED, Weight, coverage, weigh
from cutegen.tuning.setting import Setting

__all__ = ["Recording", "varied"]

#: Problems that differ in one size are tuned as a range from so many on. Source: judgement; of standard
#: effort, a range takes about 30 s, a problem about 8 s.
_MANY = 4
#: Sizes that vary with the rows of a batch: m, and k of a weight's gradient, which has a layout of its own.
_ROWS, _OF_WEIGHT = ("m", "k"), "mn"


@dataclass(frozen=True)
class Recording:
    """Recordings as one tuning run sees them.

    Attributes:
        weights: The problems, in the order in which they are tuned.
        calls: How often each kind of call was seen.
        notes: What could not be read, in words.
    """

    weights: tuple[Weight, ...]
    calls: Mapping[Call, int]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, args: argparse.Namespace, device: Device | None) -> Recording:
        """Return what the files of ``--recorded`` say, of one family if that is named.

        Raises:
            UsageError: A file cannot be read, or there is nothing to tune.
        """
        found = read_recordings(args.recorded, device.name if device else "")
        calls = {
            call: count
            for call, count in found.calls.items()
            if call.how != "given" and args.family in (None, call.problem.family)
        }
        if not calls:
            names = ", ".join(map(str, args.recorded))
            because = "".join(f"; {note}" for note in found.notes)
            raise UsageError(f"no call to tune for in {names}{because}")
        store = Store.at(args.cache_dir)
        arch = calibrated_arch(store.root, device) if device else find_arch(args.arch)
        sm_count = device.sm_count if device else arch.nominal_sm_count
        return cls(weigh(problems_of(calls), arch, sm_count), calls, found.notes)

    def shapes(self, args: argparse.Namespace) -> tuple[Shape, ...]:
        """Return what is tuned, in that order: problems, and ranges of those whose rows vary, if measured."""
        measured = args.arch is None and args.export is None
        if measured and args.objective == "time" and tuple(args.sources) == ("cutegen",):
            return varied(self.weights)
        return tuple(NamedProblem(str(weight.problem), weight.problem) for weight in self.weights)

    def begin_lines(self, setting: Setting, width: int | None) -> list[str]:
        """Return what is to be tuned, and how much of it has an answer before."""
        total = sum(weight.us for weight in self.weights)
        shares = [f"{weight.us / total:.1%}" if total else "" for weight in self.weights]
        table = [
            Column("calls", [str(weight.calls) for weight in self.weights]),
            Column("predicted us", [f"{weight.call_us:.1f}" for weight in self.weights]),
            Column("share", shares),
            Column("problem", [str(weight.problem) for weight in self.weights], left=True),
        ]
        answered = sum(count for call, count in self.calls.items() if call.how in TUNED)
        lines = [*(f"note: {note}" for note in self.notes), *columns(table, width)]
        lines.append(
            f"answered exactly when recorded: {answered / sum(self.calls.values()):.0%} of the calls"
        )
        return [*lines, *self.end_lines(setting)]

    def end_lines(self, setting: Setting) -> list[str]:
        """Return how much of the recording the table answers; nothing without a table."""
        if setting.table is None:
            return []
        found = coverage(self.weights, setting.load_table(), setting.arch, setting.sm_count)
        left = f"; tuning the others is expected to save {found.gain_us:.1f} us" if found.gain_us else ""
        return [f"answered exactly by the table: {found}{left}"]

    def to_json(self, setting: Setting) -> dict[str, Json]:
        """Return the same as plain data."""
        found = coverage(self.weights, setting.load_table(), setting.arch, setting.sm_count)
        about: dict[str, Json] = {
            "problems": found.of,
            "calls": sum(self.calls.values()),
            "answered_problems": found.problems,
            "answered_calls": round(found.calls, 4),
            "answered_time": round(found.time, 4),
            "expected_gain_us": round(found.gain_us, 3),
            "notes": list(self.notes),
        }
        return {"recorded": about}


def varied(weights: Sequence[Weight]) -> tuple[Shape, ...]:
    """Return the problems, those that differ in rows only as a range; what takes longest comes first."""
    left, found = list(weights), list[tuple[float, Shape]]()
    for size in _ROWS:
        kinds: dict[object, list[Weight]] = {}
        for weight in left:
            kinds.setdefault(_kind(weight.problem, size), []).append(weight)
        for kin in kinds.values():
            if len(kin) >= _MANY and (whole := _range(kin, size)) is not None:
                found.append((sum(weight.us for weight in kin), NamedRange(str(whole), whole)))
                left = [weight for weight in left if weight not in kin]
    found += [(weight.us, NamedProblem(str(weight.problem), weight.problem)) for weight in left]
    return tuple(shape for _, shape in sorted(found, key=lambda item: -item[0]))


def _kind(problem: Problem, size: str) -> object:
    """Return what problems have in common that differ in ``size`` only."""
    if size not in problem.sizes or (size == "k" and getattr(problem, "layout", "") != _OF_WEIGHT):
        return problem
    others = tuple((name, value) for name, value in problem.sizes.items() if name != size)
    family, _, *words = str(problem).split(" ")
    return family, others, tuple(words), problem.signature


def _range(kin: Sequence[Weight], size: str) -> Range | None:
    """Return the range that holds problems which differ in ``size``; None if no kernel serves several."""
    ordered = sorted((weight.problem for weight in kin), key=lambda problem: problem.sizes[size])
    try:
        return Range(ordered[0], ordered[-1])
    except ProblemError:
        return None
