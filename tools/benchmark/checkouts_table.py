"""What default kernels of two checkouts take: a file of tools/bench_checkouts.py, rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, line, short_commit
from tools.benchmark.quoted import QuotedFile

__all__ = ["AGAINST", "CHECKOUTS", "OURS", "Checkouts"]

#: What such files say that they are, and the names of the checkouts in them.
CHECKOUTS = "two checkouts"
OURS, AGAINST = "ours", "against"


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["times"][AGAINST] / row["times"][OURS])


class Checkouts(QuotedFile):
    """Default kernels of this checkout and of another."""

    tool = "tools/bench_checkouts.py"

    def summary(self) -> list[str]:
        """Return how much longer the kernels of the other checkout take."""
        rows = self.facts["rows"]
        if not rows:
            return ["- nothing was measured"]
        ratios = [_ratio(row) for row in rows]
        return [
            f"- the other checkout / this one, {len(ratios)} problems: geometric mean "
            f"**{down(geometric_mean(ratios), 3)}**, smallest {down(min(ratios), 3)}, "
            f"largest {down(max(ratios), 3)}"
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        other = short_commit(self.facts["against_commit"])
        table = [line(["problem", f"us at {other}", "us here", "ratio"]), line(["---", *["---:"] * 3])]
        for row in self.facts["rows"]:
            cells = [f"{row['times'][name]:.3f}" for name in (AGAINST, OURS)]
            table.append(line([f"`{row['problem']}`", *cells, down(_ratio(row), 3)]))
        where = "Default kernels, timed in the same rounds."
        return "\n".join([*self.summary(), "", *table, "", f"{where} {self.where()}"])
