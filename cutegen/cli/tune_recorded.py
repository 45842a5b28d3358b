"""``python -m cutegen.tune --recorded``: problems by their weight, and how much of it has an answer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from cutegen.arch import find_arch
from cutegen.cli.wrapped_text import Column, columns
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.families.shapes import NamedProblem
from cutegen.measure.device import Device
from cutegen.records.recorded_calls import Call, problems_of, read_recordings
from cutegen.tuning.coverage import TUNED, Weight, coverage, weigh
from cutegen.tuning.setting import Setting

__all__ = ["Recording"]


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
        arch = device.arch if device else find_arch(args.arch)
        sm_count = device.sm_count if device else arch.nominal_sm_count
        return cls(weigh(problems_of(calls), arch, sm_count), calls, found.notes)

    @property
    def named(self) -> tuple[NamedProblem, ...]:
        """The problems in that order."""
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
        return [f"answered exactly by the table: {found}"]

    def to_json(self, setting: Setting) -> dict[str, Json]:
        """Return the same as plain data."""
        found = coverage(self.weights, setting.load_table(), setting.arch, setting.sm_count)
        about: dict[str, Json] = {
            "problems": found.of,
            "calls": sum(self.calls.values()),
            "answered_problems": found.problems,
            "answered_calls": round(found.calls, 4),
            "answered_time": round(found.time, 4),
            "notes": list(self.notes),
        }
        return {"recorded": about}
