"""Renders what tools/bench_energy.py measured: a table per shape, the base first, then a knob at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cutegen.measure.statistics import Interval, tied
from cutegen.measure.timing import Timing, cost_ratio
from tools.benchmark.markdown import down, line, up, where
from tools.benchmark.results import OWN, Entry, Results, ShapeResult

__all__ = ["changes_of_energy", "render", "summary"]

_ONE = Interval(1.0, 1.0, 1.0)
_HEAD = ("change", "time us", "W", "mJ", "pJ/FLOP (spread)", "energy / base (spread)", "time / base", "MHz")


def render(results: Results) -> str:
    """Return the Markdown of an energy results file."""
    tables = ["\n".join(_table(row)) for row in results.shapes]
    return "\n\n".join(["\n".join(summary(results)), *tables, *_footing(results)])


def summary(results: Results) -> list[str]:
    """Return the lines that say what each shape takes and which changes of a knob lower or raise that."""
    return [f"- {sentence}" for row in results.shapes for sentence in _sentences(row)]


def changes_of_energy(row: ShapeResult) -> dict[str, Interval]:
    """Return energy of every variation over that of the base, cautiously, where both are known."""
    base = row.entries[OWN].timing
    found: dict[str, Interval] = {}
    for name, entry in row.entries.items():
        if name == OWN or base is None or entry.timing is None:
            continue
        ratio = cost_ratio(entry.timing, base, "energy")
        if ratio is not None:
            found[name] = ratio
    return found


def _sentences(row: ShapeResult) -> Iterator[str]:
    base, torch = row.entries[OWN].timing, row.reference
    if base is None or base.energy is None:
        yield f"**{row.name}: the energy of the base is not known ({row.entries[OWN].outcome})**"
        return
    ratio = cost_ratio(torch, base, "energy")
    name = torch.reference
    against = f"; {name} {_pj(torch, row, down)}; {name} / base {down(ratio.mid, 3)}" if ratio else ""
    yield f"{row.name}: **{_pj(base, row, up)} pJ/FLOP** ({row.entries[OWN].config}){against}"
    ratios = changes_of_energy(row)
    apart = {name: r for name, r in sorted(ratios.items(), key=lambda x: x[1].mid) if not tied(r, _ONE)}
    lower = [f"`{name}` {up(r.mid, 3)}" for name, r in apart.items() if r.mid < 1]
    higher = [f"`{name}` {down(r.mid, 3)}" for name, r in apart.items() if r.mid > 1]
    yield f"{row.name}: beyond the spread lower: {', '.join(lower) or 'none'}"
    yield f"{row.name}: beyond the spread higher: {', '.join(higher) or 'none'}"
    failed = [f"`{name}` {entry.outcome}" for name, entry in row.entries.items() if not entry.ok]
    if failed:
        yield f"{row.name}: **not measured: {', '.join(failed)}**"


def _pj(timing: Timing, row: ShapeResult, rounding: Any) -> str:
    return "?" if timing.energy is None else str(rounding(timing.energy.mid * 1e9 / row.problem.flops, 3))


def _table(row: ShapeResult) -> list[str]:
    lines = [line(_HEAD), line(["---", *["---:"] * (len(_HEAD) - 1)])]
    base = row.entries[OWN].timing
    lines.append(line([f"base: {row.entries[OWN].config}", *_cells(row.entries[OWN].timing, row, base, up)]))
    lines.append(line([row.reference.reference, *_cells(row.reference, row, base, down)]))
    for name, entry in row.entries.items():
        if name != OWN:
            lines.append(line([name, *_entry_cells(entry, row, base)]))
    return lines


def _entry_cells(entry: Entry, row: ShapeResult, base: Timing | None) -> list[str]:
    if not entry.ok:
        return [f"**{entry.outcome}**", *[""] * (len(_HEAD) - 2)]
    return _cells(entry.timing, row, base, up)


def _cells(timing: Timing | None, row: ShapeResult, base: Timing | None, rounding: Any) -> list[str]:
    """Return everything behind the name; ``rounding`` goes against whoever it is about."""
    if timing is None:
        return [""] * (len(_HEAD) - 1)
    cells = [rounding(timing.median_us, 2)]
    energy, watts = timing.energy, timing.power_w
    if energy is None or watts is None:
        cells += ["", "", ""]
    else:
        pj = [rounding(mj * 1e9 / row.problem.flops, 3) for mj in (energy.mid, energy.low, energy.high)]
        cells += [f"{watts:.0f}", rounding(energy.mid, 2), f"{pj[0]} ({pj[1]} to {pj[2]})"]
    if timing is base or base is None:
        cells += ["", ""]
    else:
        ratio = cost_ratio(timing, base, "energy")
        ends = [rounding(x, 3) for x in (ratio.mid, ratio.low, ratio.high)] if ratio else []
        cells.append(f"{ends[0]} ({ends[1]} to {ends[2]})" if ends else "")
        cells.append(rounding(timing.paired.mid / base.paired.mid, 3))
    return [*cells, "" if timing.sm_clock_mhz is None else f"{timing.sm_clock_mhz:.0f}"]


def _footing(results: Results) -> list[str]:
    conditions: Any = results.conditions
    policy = conditions["policy"]
    return [
        where(results),
        f"Energy from NVML's counter, edge to edge while an entry ran alone for at least "
        f"{policy['dwell_s']:g} s, twice in opposite order after the clocks had settled: the mean of both, "
        "with a spread that covers both and how late the edges may have been seen. Times are medians of "
        f"{policy['rounds']} interleaved rounds; MHz is the SM clock there. "
        "Operands are uniform in [-1, 1) and rotate past the L2 cache. Our numbers are rounded up, "
        "torch.mm's down.",
    ]
