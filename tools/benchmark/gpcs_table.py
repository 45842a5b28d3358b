"""On which GPC clusters run: a file of tools/find_gpcs.py, rendered."""

from __future__ import annotations

from collections import Counter

from tools.benchmark.markdown import down, line
from tools.benchmark.quoted import QuotedFile

__all__ = ["GPC_TURNS", "GpcTurns"]

#: What such files say that they are.
GPC_TURNS = "turns of GPCs"


class GpcTurns(QuotedFile):
    """What tools/find_gpcs.py found."""

    tool = "tools/find_gpcs.py"

    def summary(self) -> list[str]:
        """Return how many multiprocessors each GPC has, and how many clusters run where turns have them."""
        sizes = ", ".join(str(len(group)) for group in self.facts["sms"])
        rows = self.facts["rows"]
        all_ = sum(row["clusters"] * len(row["right"]) for row in rows)
        right = down(100 * sum(sum(row["right"]) for row in rows) / all_, 1)
        return [
            f"- multiprocessors of the {len(self.facts['sms'])} GPCs: {sizes}",
            f"- clusters that run where turns would have them: **{right} %** of {all_}",
        ]

    def render(self) -> str:
        """Return the Markdown of the file."""
        count = len(self.facts["sms"])
        heads = [
            "CTAs of a cluster",
            "clusters at a time",
            "clusters of each GPC",
            "as turns have them",
            "of launches",
        ]
        table = [line(heads), line(["---:", "---:", "---", "---:", "---:"])]
        for row in self.facts["rows"]:
            of = Counter(row["gpcs"])
            least = f"{down(100 * min(row['right']) / row['clusters'], 1)} % or more"
            each = ", ".join(str(of[gpc]) for gpc in range(count))
            table.append(
                line([str(row["cluster"]), str(row["clusters"]), each, least, str(len(row["right"]))])
            )
        return "\n".join([*self.summary(), "", *table, "", f"{self.where()}"])
