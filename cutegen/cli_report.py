"""Results as people and programs read them: aligned tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cutegen.arch import find_arch
from cutegen.build import Resources
from cutegen.catalog import space_of
from cutegen.digest import Json
from cutegen.policy import Timing
from cutegen.space import Config, format_value
from cutegen.stats import geometric_mean
from cutegen.text import printable
from cutegen.tuner import Failed, Row, TuneResult

__all__ = ["document", "result_lines", "short_config", "summary_lines"]

#: Candidates of each source shown where nothing was measured.
_PREDICTED_ROWS = 8


def result_lines(name: str, result: TuneResult | Failed) -> list[str]:
    """Return the lines that show what one problem came to."""
    name = printable(name)
    if isinstance(result, Failed):
        return [f"{name}: {result.problem}", f"  no winner: {result.error}"]
    how = "from records" if result.reused else f"{result.candidates} candidates"
    predicted = result.winner.predicted_us is not None
    unmeasured = "times are predicted" if predicted else "no model of its speed either, so no times"
    where = result.device or f"{result.arch}, nothing measured: {unmeasured}"
    how += "" if result.objective == "time" else f", by {result.objective}"
    lines = [f"{name}: {result.problem} on {where} ({how}, {result.seconds:.1f} s{_counts(result)})"]
    lines += _measured_table(result) if result.measured else _predicted_table(result)
    if result.contended_by:
        lines.append(f"  contended: {result.contended_by} used the GPU meanwhile; run again when it is free")
    lines += [f"  not tried: {reason}" for reason in result.refused]
    word = "best" if result.measured else "predicted best" if predicted else "first"
    return [*lines, f"  {word}: {result.config}"]


def _counts(result: TuneResult) -> str:
    bad = {k: v for k, v in sorted(result.outcomes.items()) if k != "ok"}
    words = [f"{count} {outcome}" for outcome, count in bad.items()]
    words += [f"{result.untried} untried for lack of time"] if result.untried else []
    return "".join(f", {word}" for word in words)


def _measured_table(result: TuneResult) -> list[str]:
    reference = result.torch.reference if result.torch and result.torch.reference else "torch.mm"
    versus = _versus(result, reference)
    rows = [["", "time us", "TFLOP/s", "mJ", "W", versus, "regs", "smem KB", "source", "config"]]
    for row in result.rows:
        timing = row.timing
        if timing is not None:
            cells = [_mark(row, result), *_time(timing.median_us, result), *_energy(timing)]
            cells.append(_ratio(result, timing))
            rows.append([*cells, *_taken(row.resources), *_named(result, row.config)])
    if result.torch is not None:
        mark = "best" if result.torch_wins else ""
        known = result.torch.cost(result.objective) is not None
        times = [*_time(result.torch.median_us, result), *_energy(result.torch)]
        rows.append([mark, *times, "1.000" if known else "", "", "", "torch", reference])
    return _align(rows)


def _predicted_table(result: TuneResult) -> list[str]:
    predicted = result.winner.predicted_us is not None
    times = ["predicted us", "predicted TFLOP/s"] if predicted else []
    rows = [["", *times, "regs", "spill B", "smem KB", "source", "config"]]
    shown, hidden = _first_of_each_source(result)
    for row in shown:
        taken = row.resources
        spills = str(taken.spill_store_bytes + taken.spill_load_bytes) if taken else ""
        registers, smem = _taken(taken)
        times = _predicted(row, result) if predicted else []
        mark = "default" if row.default else ""
        rows.append([mark, *times, registers, spills, smem, *_named(result, row.config)])
    slower = ", predicted to be slower" if predicted else ""
    more = {source: f"of {source} that compile" for source in hidden} | {"cutegen": f"that compile{slower}"}
    return _align(rows) + [f"  ... and {count} more {more[source]}" for source, count in hidden.items()]


def _first_of_each_source(result: TuneResult) -> tuple[list[Row], Counter[str]]:
    """Return the rows to show, the default always, and how many others there are of each source."""
    seen: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    shown = []
    for row in result.rows:
        seen[row.config.source] += 1
        if row.default or seen[row.config.source] <= _PREDICTED_ROWS:
            shown.append(row)
        else:
            hidden[row.config.source] += 1
    return shown, hidden


def _predicted(row: Row, result: TuneResult) -> list[str]:
    if row.predicted_us is None:
        return ["no model", ""]
    time, rate = _time(row.predicted_us, result)
    return [f"{time} predicted", rate]


def _named(result: TuneResult, config: Config) -> list[str]:
    return [config.source, short_config(result, config)]


def _mark(row: Row, result: TuneResult) -> str:
    words = []
    if row.chosen and not result.torch_wins:
        words.append("best")
    elif row.equal:
        words.append("tied")
    if row.default:
        words.append("default")
    return " ".join(words)


def _time(time_us: float, result: TuneResult) -> list[str]:
    return [f"{time_us:.2f}", f"{result.problem.flops / time_us / 1e6:.1f}" if time_us else ""]


def _energy(timing: Timing) -> list[str]:
    """Return millijoules per launch and watts; empty for entries whose energy was not read."""
    if timing.energy_mj is None or timing.power_w is None:
        return ["", ""]
    return [f"{timing.energy_mj:.4g}", f"{timing.power_w:.0f}"]


def _versus(result: TuneResult, reference: str) -> str:
    return f"vs {reference}" if result.objective == "time" else f"{result.objective} vs {reference}"


def _ratio(result: TuneResult, timing: Timing) -> str:
    ratio = result.against_torch(timing)
    return f"{ratio.mid:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]" if ratio else ""


def _taken(resources: Resources | None) -> list[str]:
    if resources is None:
        return ["", ""]
    return [str(resources.registers), f"{resources.smem_bytes / 1024:.0f}"]


def short_config(result: TuneResult, config: Config) -> str:
    """Return the knobs in which ``config`` is not the simplest, which is how people compare configs."""
    space = space_of(config, result.problem.family, find_arch(result.arch))
    first = next((knob for knob, domain in space.domains.items() if len(domain) > 1), "")
    shown = {knob for knob, domain in space.domains.items() if knob == first or config[knob] != domain[0]}
    return " ".join(f"{knob}={format_value(value)}" for knob, value in config.items() if knob in shown)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows with columns lined up: text to the left, numbers to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i in (0, last - 1, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def summary_lines(results: Mapping[str, TuneResult | Failed]) -> list[str]:
    """Return one line per problem and the geometric mean, for runs of more than one problem."""
    measured = {name: r for name, r in results.items() if isinstance(r, TuneResult) and r.measured}
    failed = [name for name, r in results.items() if isinstance(r, Failed)]
    lines = []
    if len(measured) > 1:
        versus = _versus(next(iter(measured.values())), "torch.mm")
        rows = [["shape", "time us", "TFLOP/s", "mJ", "W", versus, "vs default", "source", "config"]]
        for name, result in measured.items():
            winner = result.winner.timing
            assert winner is not None
            gain = f"{result.ratio_to_default.mid:.3f}" if result.ratio_to_default else ""
            cells = [name, *_time(winner.median_us, result), *_energy(winner), _ratio(result, winner), gain]
            rows.append([*cells, *_named(result, result.config)])
        lines += _align(rows)
    known = [r.against_torch(r.winner.timing) for r in measured.values() if r.winner.timing]
    ratios = [ratio.mid for ratio in known if ratio is not None]
    if len(ratios) > 1:
        objective = next(iter(measured.values())).objective
        lines.append(
            f"geometric mean of torch.mm's {objective} over cutegen's: {geometric_mean(ratios):.3f} "
            f"({len(ratios)} shapes)"
        )
    if failed:
        lines.append(f"without a winner: {', '.join(map(printable, failed))}")
    return lines


def document(results: Mapping[str, TuneResult | Failed], about: Mapping[str, Json]) -> dict[str, Json]:
    """Return everything as plain JSON data."""
    return {"schema": 1, **about, "results": [_result_json(name, r) for name, r in results.items()]}


def _result_json(name: str, result: TuneResult | Failed) -> dict[str, Json]:
    head: dict[str, Json] = {
        "name": name,
        "problem": str(result.problem),
        "seconds": round(result.seconds, 3),
    }
    if isinstance(result, Failed):
        return {**head, "winner": None, "error": str(result.error)}
    ratio = result.ratio_to_default
    return {
        **head,
        "measured": result.measured,
        "objective": result.objective,
        "reused": result.reused,
        "run": result.run,
        "outcomes": dict(result.outcomes),
        "untried": result.untried,
        "winner": "torch" if result.torch_wins else result.config.to_json(),
        "source": "torch" if result.torch_wins else result.config.source,
        "refused": list(result.refused),
        "ratio_to_default": None if ratio is None else [ratio.low, ratio.mid, ratio.high],
        "torch": result.torch.to_json() if result.torch else None,
        "candidates": [_row_json(row, result) for row in result.rows],
    }


def _row_json(row: Row, result: TuneResult) -> dict[str, Json]:
    flops = result.problem.flops
    timing = row.timing
    return {
        "config": row.config.to_json(),
        "source": row.config.source,
        "default": row.default,
        "chosen": row.chosen,
        "tied": row.equal,
        "timing": timing.to_json() if timing else None,
        "tflops": flops / timing.median_us / 1e6 if timing else None,
        "predicted_us": row.predicted_us,
        "resources": row.resources.to_json() if row.resources else None,
        "artifact_key": row.artifact_key,
        "trial": row.trial,
    }
