"""A family beside its baselines: the results file of tools/bench_family.py, read and rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cutegen.measure.statistics import geometric_mean
from tools.benchmark.markdown import down, launches, line, short_commit, up
from tools.benchmark.quoted import QuotedFile

__all__ = ["FamilyResults"]

_OWN, _DEFAULT, _COPIES = "cutegen", "cutegen default", ("copy", "copy kernel")
#: The end of names of entries whose outputs are in the place of inputs; they are compared with each other.
_IN_PLACE = " in place"
#: The same of ratios in bursts.
_BURSTS = " in bursts"
#: What a table says of copies.
_WITH = (
    "A copy moves as many bytes as the problem must; of two, by the driver and by a kernel, the faster one "
    "counts."
)
_WITHOUT = "No copies are in the rounds, which would let the clock rise."


class FamilyResults(QuotedFile):
    """What tools/bench_family.py measured."""

    tool = "tools/bench_family.py"

    def summary(self) -> list[str]:
        """Return the geometric mean over each competitor, and over the fastest of them and of the copies."""
        rows = list(self._rows())
        found = [self._ratios(row) for row in rows]
        lines = []
        for name in dict.fromkeys(name for each in found for name in each):
            ratios = [each[name] for each in found if name in each]
            ahead = sum(ratio >= 1 for ratio in ratios)
            mean = down(geometric_mean(ratios), 3)
            lines.append(f"- {name}: geometric mean **{mean}**, at least 1 on {ahead} of {len(ratios)}")
        best = [self._best(row) for row in rows]
        lines.append(
            f"- the fastest of these / cutegen: geometric mean **{down(geometric_mean(best), 3)}**, smallest "
            f"{down(min(best), 3)}, at least 0.98 on {sum(ratio >= 0.98 for ratio in best)} of {len(best)}"
        )
        return lines

    def render(self) -> str:
        """Return the Markdown of the file."""
        rows = list(self._rows())
        names = list(dict.fromkeys(name for row in rows for name in self._ratios(row)))
        rate = "TFLOP/s" if "flops" in rows[0] else "GB/s"
        copied = ["copy / cutegen"] if self._has_copies else []
        head = ["shape", "time us", rate, *copied, *names, "config"]
        table = [line(head), line(["---"] * len(head)), *(self._line(row, names) for row in rows)]
        return "\n".join([*self.summary(), "", *table, "", self._footing()])

    @property
    def _has_copies(self) -> bool:
        conditions: Any = self.facts["conditions"]
        return bool(conditions.get("copies") != "none")

    def _rows(self) -> Iterator[Any]:
        rows: Any = self.facts["rows"]
        yield from rows

    def _of_rows(self, read: Callable[[Any], str]) -> str:
        """Return what ``read`` finds in the rows, each once; what a row does not say, its file says."""
        return ", ".join(sorted({read({**self.facts, **row}) for row in self._rows()}))

    def _others(self, row: Any) -> list[str]:
        return [name for name in row["entries"] if name not in (_OWN, _DEFAULT, *_COPIES)]

    def _ratios(self, row: Any) -> dict[str, float]:
        """Return what is compared in a row: others with cutegen; in place those in place, and copies."""
        over = {name: float(entry["over_cutegen"]) for name, entry in row["entries"].items()}
        others = self._others(row)
        found = {f"{name} / cutegen": over[name] for name in others if not name.endswith(_IN_PLACE)}
        bursts = {name: entry.get("burst_over_cutegen") for name, entry in row["entries"].items()}
        found |= {f"{name} / cutegen{_BURSTS}": float(bursts[name]) for name in others if bursts[name]}
        own = over.get(_OWN + _IN_PLACE)
        if own is not None:
            copies = [over[name] for name in _COPIES if name in over]
            found |= {f"copy / cutegen{_IN_PLACE}": min(copies) / own} if copies else {}
            placed = [name for name in others if name.endswith(_IN_PLACE) and name != _OWN + _IN_PLACE]
            found |= {f"{name} / cutegen{_IN_PLACE}": over[name] / own for name in placed}
        return found

    def _best(self, row: Any) -> float:
        return min(r for name, r in self._ratios(row).items() if not name.endswith((_IN_PLACE, _BURSTS)))

    def _line(self, row: Any, names: list[str]) -> str:
        entries = row["entries"]
        own = entries[_OWN]
        copies = [entries[name]["over_cutegen"] for name in _COPIES if name in entries]
        found = self._ratios(row)
        ratios = [down(found[name], 3) if name in found else "" for name in names]
        copied = [down(min(copies), 3) if copies else ""] if self._has_copies else []
        rate = row["flops"] / own["median_us"] / 1e6 if "flops" in row else own["gb_per_s"]
        cells = [row["name"], up(own["median_us"], 2), down(rate, 0)]
        return line([*cells, *copied, *ratios, f"`{row['config']}`"])

    def _footing(self) -> str:
        facts: Any = self.facts
        packages = facts["software"]["packages"]
        wanted = ("torch", "nvidia-cutlass-dsl", "quack-kernels")
        named = ", ".join(f"{name} {packages[name]}" for name in wanted if name in packages)
        copies = _WITH if self._has_copies else _WITHOUT
        return (
            f"{facts['gpu']}, driver {self._of_rows(lambda row: row['machine']['driver'])}; {named}; commit "
            f"{self._of_rows(lambda row: short_commit(row['commit']))}; "
            f"{self._of_rows(lambda row: row['measured_at'][:10])}. Time of each over cutegen's in "
            "the same interleaved rounds, with cold L2 caches"
            f"{launches(facts['conditions']['policy'])}: above 1 cutegen is faster. {copies}"
        )
