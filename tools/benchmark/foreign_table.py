"""Kernels that others wrote, tuned: the results file of tools/bench_foreign.py, read and rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.benchmark.markdown import down, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["ForeignResults"]

_OWN, _DEFAULT, _COPIES = "cutegen", "cutegen default", ("copy", "copy kernel")


class ForeignResults(QuotedFile):
    """What tools/bench_foreign.py measured."""

    tool = "tools/bench_foreign.py"

    def summary(self) -> list[str]:
        """Return for each kernel how far author's default and baselines are behind, and what was tried."""
        lines = []
        for name, kernel in self.facts["kernels"].items():
            gains = [_over(row, _DEFAULT) for row in kernel["rows"]]
            ahead = sum(gain >= 1.03 for gain in gains)
            lines.append(
                f"- {name}: author's default / winner at most **{down(max(gains), 3)}**, at least "
                f"{down(min(gains), 3)}; 1.03 or more on {ahead} of {len(gains)} shapes; "
                f"{_search(kernel['rows'])}"
                + "".join(
                    f"; {other} / winner {down(min(ratios), 3)} to {down(max(ratios), 3)}"
                    for other in _baselines(kernel["rows"][0])
                    if (ratios := [_over(row, other) for row in kernel["rows"] if other in row["entries"]])
                )
            )
        return lines

    def render(self) -> str:
        """Return the Markdown of the file."""
        head = ["kernel", "shape", "author's default us", "winner us", "default / winner"]
        head += ["baselines / winner", "tried", "winner"]
        table = [line(head), line(["---", "---", *["---:"] * 5, "---"])]
        table += [self._line(name, row) for name, row in self._rows()]
        return "\n".join([*self.summary(), "", *table, "", self._footing()])

    def _rows(self) -> Iterator[tuple[str, Any]]:
        for name, kernel in self.facts["kernels"].items():
            for row in kernel["rows"]:
                yield name, row

    def _line(self, name: str, row: Any) -> str:
        entries = row["entries"]
        own = entries[_OWN]["median_us"]
        default = entries.get(_DEFAULT, entries[_OWN])["median_us"]
        beside = (f"{down(_over(row, other), 3)} ({other})" for other in _baselines(row))
        return line(
            [
                f"`{name}`",
                row["name"],
                down(default, 2),
                up(own, 2),
                down(_over(row, _DEFAULT), 3),
                ", ".join(beside),
                f"{row['candidates']} of {row['configs']}{_outcomes(row)}",
                f"`{row['config']}`" if _DEFAULT in entries else "the default",
            ]
        )

    def _footing(self) -> str:
        kernels = self.facts["kernels"].values()
        gpus = sorted({kernel["gpu"] for kernel in kernels})
        drivers = sorted({row.get("machine", k["machine"])["driver"] for k in kernels for row in k["rows"]})
        commits = sorted({short_commit(row.get("commit", k["commit"])) for k in kernels for row in k["rows"]})
        dates = sorted({row.get("measured_at", k["measured_at"])[:10] for k in kernels for row in k["rows"]})
        packages = next(iter(kernels))["software"]["packages"]
        wanted = ("torch", "nvidia-cutlass-dsl", "quack-kernels")
        named = ", ".join(f"{name} {packages[name]}" for name in wanted if name in packages)
        return (
            f"{', '.join(gpus)}, driver {', '.join(drivers)}; {named}; commit {', '.join(commits)}; "
            f"{', '.join(dates)}. Winner and default are configs of the same kernel, timed in the same "
            "interleaved rounds with cold L2 caches. Above 1 the winner is faster."
        )


def _outcomes(row: Any) -> str:
    """Return how many of the tried configs were timed; nothing of rows that do not say."""
    outcomes = row.get("outcomes")
    if not outcomes:
        return ""
    timed = outcomes.get("ok", 0) + outcomes.get("pruned", 0)
    failed = [f"{count} {name}" for name, count in sorted(outcomes.items()) if name not in ("ok", "pruned")]
    return f": {', '.join([f'{timed} timed', *failed])}"


def _search(rows: Any) -> str:
    """Say on how many shapes every valid config was tried, and of the others how many were."""
    partly = [row for row in rows if row["candidates"] < row["configs"]]
    if not partly:
        return "**exhaustive**: every valid config tried on every shape"
    shares = [f"{row['candidates']} of {row['configs']}" for row in partly]
    most = dict.fromkeys(shares)  # once each
    whole = len(rows) - len(partly)
    return f"exhaustive on {whole} shapes, else {', '.join(most)} configs tried"


def _baselines(row: Any) -> list[str]:
    """Return the names of what PyTorch users call instead."""
    return [name for name in row["entries"] if name not in (_OWN, _DEFAULT, *_COPIES)]


def _over(row: Any, name: str) -> float:
    """Return the time of an entry over the winner's; the default is the winner where it has no entry."""
    entry = row["entries"].get(name)
    return 1.0 if entry is None else float(entry["over_cutegen"])
