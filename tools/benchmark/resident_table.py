"""How many CTAs run at a time: a file of tools/count_ctas.py, rendered."""

from __future__ import annotations

from tools.benchmark.markdown import line
from tools.benchmark.quoted import QuotedFile

__all__ = ["RESIDENT", "Resident"]

#: What such files say that they are.
RESIDENT = "resident CTAs"


class Resident(QuotedFile):
    """What tools/count_ctas.py counted."""

    tool = "tools/count_ctas.py"

    def summary(self) -> list[str]:
        """Return whether the driver counts the same, and the most CTAs of a multiprocessor."""
        rows, each = self.facts["rows"], self.facts["sm_count"]
        alike = sum(row["clusters"] == row["by_driver"] for row in rows)
        alone = max(row["clusters"] for row in rows if row["cluster"] == 1)
        shared = max(row["clusters"] * row["cluster"] for row in rows if row["cluster"] > 1)
        return [
            f"- most CTAs at a time: **{alone}** without clusters, {alone / each:g} for each of {each} "
            f"multiprocessors; **{shared}** in clusters, {shared / each:g} for each",
            f"- the driver's count is the same in {alike} of {len(rows)} cases",
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        rows = self.facts["rows"]
        threads = sorted({row["threads"] for row in rows})
        found = {(row["cluster"], row["threads"]): row for row in rows}
        table = [line(["CTAs of a cluster", *(f"{n} threads" for n in threads)])]
        table.append(line(["---:"] * (1 + len(threads))))
        for cluster in sorted({row["cluster"] for row in rows}):
            cells = []
            for n in threads:
                row = found[cluster, n]
                other = "" if row["by_driver"] == row["clusters"] else f" (driver: {row['by_driver']})"
                cells.append(f"{row['clusters']}{other}")
            table.append(line([str(cluster), *cells]))
        return "\n".join([*self.summary(), "", *table, "", f"Clusters at a time. {self.where()}"])
