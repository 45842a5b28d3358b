"""Renders what tools/compare_tables.py measured: the winners of several tables side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from cutegen.measure.statistics import Interval, geometric_mean, tied
from cutegen.measure.timing import Timing
from tools.benchmark.markdown import down, launches, line, tuning_words, up, where
from tools.benchmark.results import Entry, Results, ShapeResult

__all__ = ["render", "slower", "summary", "verdicts"]

SAME, TIED, FASTER, SLOWER, FAILED = "same config", "tied", "faster", "slower", "failed"


def render(results: Results) -> str:
    """Return the Markdown of a comparison of tables."""
    conditions: Any = results.conditions
    footing = (
        f"Each table's winner was checked and timed in the same {conditions['policy']['rounds']} interleaved "
        f"rounds{launches(conditions['policy'])}; two are tied if cutegen's tuner would call them so. Times "
        "and ratios of the first table are rounded down, those of the others up."
    )
    return "\n\n".join(["\n".join(summary(results)), "\n".join(_table(results)), where(results), footing])


def summary(results: Results) -> list[str]:
    """Return a line per table beside the first: how its winners compare with that one's."""
    lines = []
    rows = results.shapes
    first, *others = list(rows[0].entries) if rows else [""]
    for name in others:
        found = Counter(verdicts(row)[name] for row in rows)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in found.most_common())
        lines.append(f"- {name} beside {first}, {len(rows)} shapes: {counts}{_mean(rows, first, name)}")
    for name in (first, *others):
        lines += _against_library(rows, name)
        sources = Counter(source_of(row.entries[name]) for row in rows)
        counts = ", ".join(f"{source} {count}" for source, count in sources.most_common())
        lines.append(f"- {name}: winners come from {counts}")
        if took := tuning_words(row.entries[name].tuning_s for row in rows):
            lines.append(f"- {name}: tuned in {took}")
    return lines


def _mean(rows: Sequence[ShapeResult], first: str, name: str) -> str:
    """Return what one table's winners take as a multiple of another's, in geometric mean."""
    pairs = [(row.entries[first].timing, row.entries[name].timing) for row in rows]
    ratios = [own.paired.mid / base.paired.mid for base, own in pairs if base is not None and own is not None]
    return f"; time in geometric mean {up(geometric_mean(ratios), 3)} of {first}'s" if ratios else ""


def _against_library(rows: Sequence[ShapeResult], name: str) -> Iterator[str]:
    """Yield how fast a table's winners are beside the library, under settled clocks and in bursts."""
    timings = [t for row in rows if (t := row.entries[name].timing) is not None]
    for what, found in (
        ("", [t.ratio for t in timings if t.ratio is not None]),
        (" in bursts", [t.burst_ratio for t in timings if t.burst_ratio is not None]),
    ):
        if found:
            yield (
                f"- {timings[0].reference} / {name}{what}: geometric mean {down(geometric_mean(found), 3)}, "
                f"smallest {down(min(found), 3)} of {len(found)}"
            )


def source_of(entry: Entry) -> str:
    """Return where a winner comes from: our templates, or NVIDIA's operators."""
    return str(entry.details.get("source", "?"))


def verdicts(row: ShapeResult) -> dict[str, str]:
    """Return for each table but the first how its winner compares with the first's."""
    (_, base), *others = row.entries.items()
    return {name: _verdict(base, entry) for name, entry in others}


def slower(row: ShapeResult) -> bool:
    """Whether some table's winner is slower than the first's, or any failed."""
    return bool({SLOWER, FAILED} & set(verdicts(row).values()))


def _verdict(base: Entry, entry: Entry) -> str:
    if base.timing is None or entry.timing is None:
        return FAILED
    if base.choice == entry.choice and source_of(base) == source_of(entry):
        return SAME
    ours, theirs = base.timing.paired, entry.timing.paired
    if tied(ours, theirs):
        return TIED
    return FASTER if theirs.mid < ours.mid else SLOWER


def _table(results: Results) -> list[str]:
    first, *others = list(results.shapes[0].entries) if results.shapes else [""]
    head = ["shape", "problem", f"{first} us", first]
    for name in others:
        head += [f"{name} us", name, f"{name} / {first}", "verdict"]
    lines = [line(head), line(["---"] * len(head))]
    for row in results.shapes:
        base = row.entries[first]
        cells = [row.name, str(row.problem), _time(base.timing, down), _kernel(base)]
        for name, verdict in verdicts(row).items():
            entry = row.entries[name]
            cells += [_time(entry.timing, up), _kernel(entry), _ratio(base.timing, entry.timing), verdict]
        lines.append(line(cells))
    return lines


def _kernel(entry: Entry) -> str:
    return entry.config if entry.ok else f"**{entry.outcome}**"


def _time(timing: Timing | None, rounding: Any) -> str:
    return "" if timing is None else str(rounding(timing.median_us, 2))


def _ratio(base: Timing | None, timing: Timing | None) -> str:
    if base is None or timing is None:
        return ""
    ours, theirs = base.paired, timing.paired
    found = Interval(theirs.low / ours.high, theirs.mid / ours.mid, theirs.high / ours.low)
    return f"{up(found.mid, 3)} ({up(found.low, 3)} to {up(found.high, 3)})"
