"""Answers of a tuned range: results files of one benchmark, read and rendered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, launches, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["RANGE_CHECK", "RangeResults"]

#: What such files say that they are.
RANGE_CHECK = "range check"
#: Last size of each band.
_BANDS = (8, 64, 128, 256, 512, 1024, 2048, 8192)


class RangeResults(QuotedFile):
    """What tools/check_range.py measured."""

    tool = "tools/check_range.py"

    def summary(self) -> list[str]:
        """Return the ratios to the baseline and the regret, a line each."""
        ratios, regrets = _ratios(self._rows()), _regrets(self._rows())
        found = [
            f"- {self.facts['range']}: {len(ratios)} sizes, geometric mean "
            f"**{down(geometric_mean(ratios), 3)}**, smallest {down(min(ratios), 3)}"
        ]
        if self._bursts:
            full = _at_full_clock(self._rows())
            found.append(
                f"- {self._bursts} of them in bursts, the others as before: geometric mean "
                f"**{down(geometric_mean(full), 3)}**, smallest {down(min(full), 3)}"
            )
        if self._left:
            served = _served(self._rows())
            found.append(
                f"- as served by default, which leaves {self._left} of them to the library: geometric mean "
                f"**{down(geometric_mean(served), 3)}**, smallest {down(min(served), 3)}"
            )
        if regrets:
            found.append(f"- {len(regrets)} of them beside exact tuning: {_behind(regrets)}")
        return found

    def render(self) -> str:
        """Return the Markdown of the file."""
        served, bursts = bool(self._left), bool(self._bursts)
        names = ["sizes", "number", "geometric mean", "smallest"]
        names += ["mean in bursts", "smallest in bursts"] if bursts else []
        names += ["left to the library", "mean as served", "smallest as served"] if served else []
        names += ["behind exact tuning"]
        table = [line(names), line(["---", *["---:"] * (len(names) - 2), "---"])]
        table += [_cells("all", self._rows(), served, bursts)]
        table += [_cells(f"{first} to {last}", part, served, bursts) for first, last, part in self._bands()]
        facts = self.facts
        took = f"tuned in {up(facts['tuned_s'], 0)} s; " if facts["tuned_s"] else ""
        where = (
            f"Time of the library's call over that of the answer of `{facts['range']}`, {took}sizes at "
            f"random, even over the doublings. {facts['gpu']}, driver {facts['machine']['driver']}; commit "
            f"{short_commit(facts['commit'])}; {facts['measured_at'][:10]}{launches(facts['policy'])}."
        )
        if bursts:
            where += (
                " Sizes at which the power limit may hold the clock down were timed with settled clocks, "
                "and once more in bursts, at full clock; the others run at full clock in any case."
            )
        if served:
            where += (
                " The first mean and smallest are of our kernels at every size; as served by default, sizes "
                "at which the library was measured to be faster while tuning are left to it, and count as 1."
            )
        return "\n".join([*table, "", where])

    @property
    def _left(self) -> int:
        return sum(bool(row.get("by_baseline")) for row in self._rows())

    @property
    def _bursts(self) -> int:
        return sum(row.get("burst_ratio") is not None for row in self._rows())

    def _rows(self) -> Sequence[Any]:
        rows: Sequence[Any] = [row for row in self.facts["rows"] if row["ratio"] is not None]
        return rows

    def _bands(self) -> Iterator[tuple[int, int, Sequence[Any]]]:
        for before, last in zip((0, *_BANDS), _BANDS, strict=False):
            if part := [row for row in self._rows() if before < row["size"] <= last]:
                yield before + 1, last, part


def _ratios(rows: Sequence[Any]) -> list[float]:
    return [float(row["ratio"]) for row in rows]


def _at_full_clock(rows: Sequence[Any]) -> list[float]:
    """Return the ratios in bursts, and the ratios of sizes that have none."""
    return [float(row["ratio"] if row.get("burst_ratio") is None else row["burst_ratio"]) for row in rows]


def _served(rows: Sequence[Any]) -> list[float]:
    """Return the ratios of calls with default settings: 1 where the library is called."""
    return [1.0 if row.get("by_baseline") else float(row["ratio"]) for row in rows]


def _regrets(rows: Sequence[Any]) -> list[float]:
    return [float(row["regret"]) for row in rows if row["regret"] is not None]


def _behind(regrets: Sequence[float]) -> str:
    mean = geometric_mean(1 + regret for regret in regrets) - 1
    return f"{up(100 * mean, 1)} % behind in the geometric mean, {up(100 * max(regrets), 1)} % at worst"


def _cells(title: str, rows: Sequence[Any], served: bool, bursts: bool) -> str:
    ratios, regrets = _ratios(rows), _regrets(rows)
    cells = [title, str(len(rows)), down(geometric_mean(ratios), 3), down(min(ratios), 3)]
    if bursts:
        full = _at_full_clock(rows)
        cells += [down(geometric_mean(full), 3), down(min(full), 3)]
    if served:
        found = _served(rows)
        left = sum(bool(row.get("by_baseline")) for row in rows)
        cells += [str(left), down(geometric_mean(found), 3), down(min(found), 3)]
    shown = f"{len(regrets)}: {_behind(regrets)}" if regrets else ""
    return line([*cells, shown])
