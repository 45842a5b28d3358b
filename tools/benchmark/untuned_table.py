"""Answers to problems that nobody tuned: results files of two benchmarks, read and rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, launches, line, short_commit
from tools.benchmark.quoted import QuotedFile

__all__ = ["UNTUNED", "UNTUNED_FAMILIES", "UntunedFamilies", "UntunedResults"]

#: What such files say that they are.
UNTUNED, UNTUNED_FAMILIES = "untuned products", "untuned families"
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
        drawing = self.facts["conditions"]["drawing"]
        what = f"Time of the library's call over that of cutegen's answer, of {drawing['drawn']} products"
        return f"{what} {_origin(self.facts, '; a call that is left to PyTorch counts as 1')}"


class UntunedFamilies(QuotedFile):
    """What tools/bench_untuned_families.py measured."""

    tool = "tools/bench_untuned_families.py"

    def summary(self) -> list[str]:
        """Return a line per family."""
        return [
            f"- {family}: {len(ratios)} sizes, geometric mean **{down(geometric_mean(ratios), 3)}**, "
            f"smallest {down(min(ratios), 3)}"
            for family, ratios in self._ratios().items()
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        head = [
            "family",
            "sizes",
            "geometric mean",
            "smallest",
            *(f">= {floor:.2f}" for floor in _FLOORS[1:]),
        ]
        table = [line(head), line(["---", *["---:"] * (len(head) - 1)])]
        for family, ratios in self._ratios().items():
            mean, smallest = down(geometric_mean(ratios), 3), down(min(ratios), 3)
            shares = _shares(ratios, _FLOORS[1:])
            table.append(line([f"`{family}`", str(len(ratios)), mean, smallest, *shares]))
        what = "Time of the fastest config over that of cutegen's answer, of sizes"
        return "\n".join([*table, "", f"{what} {_origin(self.facts)}"])

    def _ratios(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for row in self.facts["rows"]:
            found.setdefault(str(row["problem"]).split()[0], []).append(float(row["ratio"]))
        return found


def _origin(facts: Any, more: str = "") -> str:
    about, failed = facts["conditions"], len(facts["failures"])
    lost = f"; {failed} failed" if failed else ""
    return (
        f"drawn with seed {about['drawing']['seed']}{lost}{more}. {facts['gpu']}, "
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
    shares = _shares(ratios, _FLOORS)
    mean, smallest = down(geometric_mean(ratios), 3), down(min(ratios), 3)
    return line([title, setting, str(len(rows)), str(left), mean, smallest, *shares])


def _shares(ratios: Sequence[float], floors: Sequence[float]) -> list[str]:
    return [f"{down(100 * sum(r >= floor for r in ratios) / len(ratios), 1)} %" for floor in floors]
