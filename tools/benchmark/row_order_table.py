"""What orders of rows take: a file of tools/bench_row_order.py, rendered."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, line
from tools.benchmark.quoted import QuotedFile

__all__ = ["AS_CHOSEN", "ROW_ORDERS", "VARIANTS", "RowOrders"]

#: What such files say that they are.
ROW_ORDERS = "orders of rows"
AS_CHOSEN = "as chosen"
#: What a kernel may do: whether the last rows come first, and whether all rows leave L2 first.
VARIANTS: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {
        "first rows first": (False, False),
        "last rows first": (True, False),
        "first rows first, leaving L2 first": (False, True),
        "last rows first, leaving L2 first": (True, True),
    }
)


class RowOrders(QuotedFile):
    """Kernels over rows in several orders."""

    tool = "tools/bench_row_order.py"

    def summary(self) -> list[str]:
        """Return what the kernels choose takes beside the first rows first, and beside the best."""
        rows = [row["times"] for row in self.facts["rows"]]
        usual = [times[next(iter(VARIANTS))] / times[AS_CHOSEN] for times in rows]
        best = [min(times.values()) / times[AS_CHOSEN] for times in rows]
        return [
            f"- first rows first / as chosen: geometric mean **{down(geometric_mean(usual), 3)}**, "
            f"smallest {down(min(usual), 3)}, largest {down(max(usual), 3)}",
            f"- the fastest / as chosen: geometric mean **{down(geometric_mean(best), 3)}**, "
            f"smallest {down(min(best), 3)}",
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        names = [*VARIANTS, AS_CHOSEN]
        table = [line(["problem", "MB", *names]), line(["---", *["---:"] * (1 + len(names))])]
        for row in self.facts["rows"]:
            cells = [f"{row['times'][name]:.2f}" if name in row["times"] else "" for name in names]
            table.append(line([f"`{row['problem']}`", f"{row['bytes'] / 1e6:.0f}", *cells]))
        return "\n".join([*self.summary(), "", *table, "", f"Microseconds. {self.where()}"])
