"""Answers to products that nobody tuned: the results file of tools/bench_untuned.py, read and rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, launches, line, short_commit
from tools.benchmark.quoted import QuotedFile

__all__ = ["UNTUNED", "UntunedResults"]

#: What such a file says that it is.
UNTUNED = "untuned products"
#: Last m of each band.
_BANDS = (8, 32, 64, 128, 256, 512, 1024, 2048, 8192)
#: Settings of the dispatcher, in the order of the table.
_SETTINGS = ("none", "expected", "torch")
_FLOORS = (1.0, 0.98, 0.95, 0.85)


class UntunedResults(QuotedFile):
    """What tools/bench_untuned.py measured."""

    tool = "tools/bench_untuned.py"

    def summary(self) -> list[str]:
        """Return a line per setting of fallback."""
        rows = self._rows()
        return [
            f"- fallback `{setting}`: {len(rows)} products, geometric mean "
            f"**{down(geometric_mean(ratios), 3)}**, smallest {down(min(ratios), 3)}"
            for setting in _SETTINGS
            for ratios in [_ratios(rows, setting)]
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        rows = self._rows()
        head = ["products", "fallback", "number", "left to PyTorch", "geometric mean", "smallest"]
        head += [f">= {floor:.2f}" for floor in _FLOORS]
        table = [line(head), line(["---"] * 2 + ["---:"] * (len(head) - 2))]
        table += [_cells("all", rows, setting) for setting in _SETTINGS]
        table += [_cells(f"`{kind}`", part, "expected") for kind, part in _kinds(rows)]
        table += [_cells(f"m {first} to {last}", part, "expected") for first, last, part in _bands(rows)]
        return "\n".join([*table, "", self._footing()])

    def _rows(self) -> Sequence[Any]:
        rows: Sequence[Any] = self.facts["rows"]
        return rows

    def _footing(self) -> str:
        facts = self.facts
        about, failed = facts["conditions"], len(facts["failures"])
        drawing = about["drawing"]
        lost = f"; {failed} failed" if failed else ""
        return (
            f"Time of the library's call over that of cutegen's answer, of {drawing['drawn']} products drawn "
            f"with seed {drawing['seed']}{lost}; a call that is left to PyTorch counts as 1. {facts['gpu']}, "
            f"driver {facts['machine']['driver']}; commit {short_commit(facts['commit'])}; "
            f"{facts['measured_at'][:10]}{launches(about['policy'])}."
        )


def _ratios(rows: Sequence[Any], setting: str) -> list[float]:
    return [1.0 if setting in row["left_to_torch"] else float(row["ratio"]) for row in rows]


def _kinds(rows: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    for kind in dict.fromkeys(row["kind"] for row in sorted(rows, key=lambda row: str(row["kind"]))):
        yield kind, [row for row in rows if row["kind"] == kind]


def _bands(rows: Sequence[Any]) -> Iterator[tuple[int, int, Sequence[Any]]]:
    for before, last in zip((0, *_BANDS), _BANDS, strict=False):
        if part := [row for row in rows if before < row["m"] <= last]:
            yield before + 1, last, part


def _cells(title: str, rows: Sequence[Any], setting: str) -> str:
    ratios = _ratios(rows, setting)
    left = sum(setting in row["left_to_torch"] for row in rows)
    shares = [f"{down(100 * sum(r >= floor for r in ratios) / len(ratios), 1)} %" for floor in _FLOORS]
    mean, smallest = down(geometric_mean(ratios), 3), down(min(ratios), 3)
    return line([title, setting, str(len(rows)), str(left), mean, smallest, *shares])
