"""Results as people and programs read them: aligned tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from cutegen.arch import find_arch
from cutegen.build import Resources
from cutegen.cli.range_report import range_json, range_lines
from cutegen.cli.wrapped_text import Column, columns, fold
from cutegen.digest import Json
from cutegen.families.registry import find_family, space_of
from cutegen.measure.statistics import geometric_mean
from cutegen.measure.timing import Timing
from cutegen.space import Config
from cutegen.text import printable
from cutegen.tuning import Failed, RangeResult, Row, TuneResult

__all__ = ["LEGEND", "AnyResult", "document", "result_lines", "summary_lines"]

AnyResult: TypeAlias = "TuneResult | RangeResult | Failed"
#: Candidates of each provider that are shown where nothing was measured.
_PREDICTED_ROWS = 8
#: Reasons of failures that are shown.
_REASONS = 4
#: Longest name of a baseline that becomes a heading.
_SHORT_NAME = 14

LEGEND = """headline, in parentheses:
  candidates      Configs that were tried. Several configs may share one compiled kernel.
  kernels         Compiled kernels that were tried.
  timed ...       What ran before each timed launch. behind: an element-wise kernel that writes the first
                  input; overlapping: the same kernel, which lets the next launch start early; alone: a kernel
                  that touches no operand; back to back: the previous launch of the same kernel. The time of
                  that kernel is subtracted from every time, the baseline's too (not for back to back).

columns:
  (first)         best: the winner, which the table gets. tied: statistically tied with the fastest. default:
                  the config that an untuned call uses.
  place           Rank by predicted time; 1 is the fastest prediction.
  time us         Time of one launch in microseconds: the median over interleaved rounds, after the clock has
                  settled under load.
  predicted us    Time of one launch by the performance model. Never a measurement.
  TFLOP/s, GB/s   Operations or bytes per second at that time; bytes count each input and output once.
  vs BASELINE     Time of the baseline (torch.mm, ...) divided by the kernel's: above 1 the kernel is faster.
                  With --objective energy or edp, the same ratio of energy or of energy times time.
  95 %            95 % confidence interval of that ratio, from paired rounds.
  in bursts       vs BASELINE in short bursts after idling, when the power limit does not lower the clock yet.
                  Only entries that may win are timed so. The winner is the entry whose larger loss of the
                  two, under load and in bursts, is smallest.
  back to back    vs BASELINE in launches back to back. Only entries that may win are timed so. An entry that
                  is nearly fastest wins if it saves clearly more here than it loses in the context above.
  vs default      Time of the default config divided by the winner's.
  mJ, W           Energy of one launch and mean power, for entries that ran alone long enough for the GPU's
                  energy counter.
  regs            Registers per thread at launch. In warp-specialized kernels this is not what each thread
                  uses: all threads start with the same number (168 with 384 threads), and the warpgroups then
                  exchange registers.
  spill B         Bytes of registers that the compiler spills to local memory. 0 in a good kernel.
  smem KB         Shared memory of a CTA.
  scratch KB      Global memory that a launch uses as workspace; shown if any config needs it.
  provider        Who wrote the kernel: cutegen, or operators for NVIDIA's Operator API.
  config          Tile shape, cluster shape, then every knob that is not at its simplest value; pingpong means
                  pingpong=true. The line below the table that begins with best names all knobs.

columns of a range:
  m (or n, ...)   Sizes that one config serves: a piece of the range.
  vs BASELINE     As above, measured or estimated for the piece.

Columns that do not fit the terminal are left out (W, mJ, in bursts, back to back, 95 %, regs, smem and
scratch KB, in this order). --wide shows all of them and the names of all knobs; --json has everything.
docs/knobs.md describes each knob, docs/tuning.md how kernels are measured.
"""


def result_lines(name: str, result: AnyResult, width: int | None = None) -> list[str]:
    """Return the lines that show what one problem came to.

    Args:
        name: What the user calls the problem.
        result: What became of it.
        width: Columns of the terminal; None for the long form, with all columns and names of knobs.
    """
    name = printable(name)
    if isinstance(result, Failed):
        return _folded(
            [f"{name}: {result.range or result.problem}", f"  no winner: {printable(str(result.error))}"],
            width,
        )
    if isinstance(result, RangeResult):
        return range_lines(name, result, width)
    lines = _folded([_headline(name, result)], width)
    lines += _measured_table(result, width) if result.measured else _predicted_table(result, width)
    notes = []
    if result.contended_by:
        notes.append(f"  contended: {result.contended_by} used the GPU meanwhile; run again when it is free")
    notes += [f"  not tried: {printable(reason)}" for reason in result.refused]
    notes += [f"  failed: {printable(sentence)}" for sentence in result.failed[:_REASONS]]
    notes += [f"  failed for {len(result.failed) - _REASONS} more reasons"] * (len(result.failed) > _REASONS)
    notes += [f"  no effect: {printable(sentence)}" for sentence in result.dead_knobs]
    notes += _conclusion(result)
    return lines + _folded(notes, width)


def _folded(lines: Iterable[str], width: int | None) -> list[str]:
    return [piece for line in lines for piece in ([line] if width is None else fold(line, width))]


def _headline(name: str, result: TuneResult) -> str:
    known = result.predicted_us is not None
    unmeasured = "times are predicted" if known else "there is no performance model, so no times"
    where = result.device or f"{result.arch}, nothing measured: {unmeasured}"
    how = "from records" if result.reused else f"{result.candidates} candidates"
    how += f", {result.kernels} kernels" if result.kernels else ""
    how += "" if result.objective == "time" else f", by {result.objective}"
    how += f", timed {result.context.replace('_', ' ')}" if result.measured else ""
    line = str(result.problem)
    what = line if name == line else f"{name}: {line}"
    return f"{what} on {where} ({how}, {result.seconds:.1f} s{_counts(result)})"


def _conclusion(result: TuneResult) -> list[str]:
    """Return the whole config of the winner and, of a prediction, what it is worth."""
    if result.measured:
        return [f"  best: {result.config}"]
    count = len(result.rows)
    if result.predicted_us is None:
        return [f"  first of {count} that compile: {result.config}"]
    accuracy = find_family(result.problem.family).accuracy(find_arch(result.arch))
    worth = accuracy or f"How well its order agrees with measurements on {result.arch} is not measured."
    return [f"  best of {count} that compile, by the model: {result.config}", f"  The model: {worth}"]


def _counts(result: TuneResult) -> str:
    bad = {k: v for k, v in sorted(result.outcomes.items()) if k != "ok"}
    words = [f"{count} {outcome}" for outcome, count in bad.items()]
    words += [f"{result.untried} untried for lack of time"] if result.untried else []
    return "".join(f", {word}" for word in words)


def _measured_table(result: TuneResult, width: int | None) -> list[str]:
    rows = [row for row in result.rows if row.timing is not None]
    timings = [row.timing for row in rows if row.timing is not None]
    marks = [_mark(row, result) for row in rows]
    taken = [row.resources for row in rows]
    scratch = [row.workspace_bytes for row in rows]
    ratios = [_ratio(result, timing) for timing in timings]
    names = _configs(result, [row.config for row in rows], width)
    providers = [row.config.source for row in rows]
    if result.torch is not None:
        marks.append("best" if result.baseline_wins else "")
        timings.append(result.torch)
        taken.append(None)
        scratch.append(0)
        ratios.append(("1.000" if result.torch.cost(result.objective) is not None else "", ""))
        names.append(result.baseline)
        providers.append("torch")
    return columns(
        [
            Column("", marks, left=True),
            *_time_columns([timing.median_us for timing in timings], result, "time us"),
            *_energy_columns(timings, result),
            Column(_versus(result, result.baseline), [ratio for ratio, _ in ratios]),
            Column("95 %", [interval for _, interval in ratios], drop=5),
            *_ratio_column("in bursts", [timing.burst_ratio for timing in timings]),
            *_ratio_column("back to back", [timing.back_to_back_ratio for timing in timings]),
            *_resource_columns(taken, scratch),
            _provider_column(providers),
            Column("config", names, left=True),
        ],
        width,
    )


def _predicted_table(result: TuneResult, width: int | None) -> list[str]:
    shown, hidden = _first_of_each_source(result)
    rows = [row for _, row in shown]
    times = [row.predicted_us for row in rows]
    modelled = result.predicted_us is not None
    found = [
        Column("", ["default" if row.default else "" for row in rows], left=True),
        Column("place", [str(place) if modelled else "" for place, _ in shown]),
        *(_time_columns(times, result, "predicted us") if modelled else []),
        *_resource_columns([row.resources for row in rows], [row.workspace_bytes for row in rows]),
        _provider_column([row.config.source for row in rows]),
        Column("config", _configs(result, [row.config for row in rows], width), left=True),
    ]
    slower = ", predicted to be slower" if modelled else ""
    more = {source: f"of {source} that compile" for source in hidden} | {"cutegen": f"that compile{slower}"}
    return columns(found, width) + [
        f"  ... and {count} more {more[source]}" for source, count in hidden.items()
    ]


def _first_of_each_source(result: TuneResult) -> tuple[list[tuple[int, Row]], Counter[str]]:
    """Return the rows to show with their places, the default always, and how many more each source has."""
    seen: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    shown = []
    for place, row in enumerate(result.rows, 1):
        seen[row.config.source] += 1
        if row.default or seen[row.config.source] <= _PREDICTED_ROWS:
            shown.append((place, row))
        else:
            hidden[row.config.source] += 1
    return shown, hidden


def _time_columns(times: Sequence[float | None], result: TuneResult, title: str) -> list[Column]:
    words = ["no model" if time is None else f"{time:.2f}" for time in times]
    rates = [f"{result.rate(time):.1f}" if time else "" for time in times]
    return [Column(title, words), Column(result.metric, rates, drop=1)]


def _energy_columns(timings: Sequence[Timing], result: TuneResult) -> list[Column]:
    """Return millijoules per launch and watts; empty cells for entries whose energy was not read."""
    known = [None if t.energy_mj is None or t.power_w is None else (t.energy_mj, t.power_w) for t in timings]
    energy = ["" if pair is None else f"{pair[0]:.4g}" for pair in known]
    power = ["" if pair is None else f"{pair[1]:.0f}" for pair in known]
    return [
        Column("mJ", energy, drop=6 if result.objective == "time" else 0),
        Column("W", power, drop=7 if result.objective == "time" else 2),
    ]


def _ratio_column(title: str, ratios: Sequence[float | None]) -> list[Column]:
    """Return ratios to the baseline in another regime; nothing if nobody was timed so."""
    words = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    return [Column(title, words, drop=6)] if any(words) else []


def _resource_columns(taken: Sequence[Resources | None], scratch: Sequence[int]) -> list[Column]:
    spills = [0 if r is None else r.spill_store_bytes + r.spill_load_bytes for r in taken]
    return [
        Column("regs", ["" if r is None else str(r.registers) for r in taken], drop=4),
        Column("spill B", [str(s) if s else "" for s in spills], drop=2),
        Column("smem KB", ["" if r is None else f"{r.smem_bytes / 1024:.0f}" for r in taken], drop=3),
        *([Column("scratch KB", [f"{s / 1024:.0f}" if s else "" for s in scratch], drop=3)] * any(scratch)),
    ]


def _provider_column(providers: Sequence[str]) -> Column:
    """Return whose kernels they are; nothing if no other provider competes."""
    others = set(providers) - {"cutegen", "torch"}
    return Column("provider", list(providers) if others else [], left=True)


def _configs(result: TuneResult, configs: Iterable[Config], width: int | None) -> list[str]:
    """Return the configs in their short form, or with the names of all knobs that are not the simplest."""
    arch = find_arch(result.arch)
    spaces = [(space_of(config, result.problem.family, arch), config) for config in configs]
    return [space.short(config, names=width is None) for space, config in spaces]


def _mark(row: Row, result: TuneResult) -> str:
    words = []
    if row.chosen and not result.baseline_wins:
        words.append("best")
    elif row.equal:
        words.append("tied")
    if row.default:
        words.append("default")
    return " ".join(words)


def _versus(result: TuneResult, baseline: str) -> str:
    name = baseline if len(baseline) <= _SHORT_NAME else "baseline"
    return f"vs {name}" if result.objective == "time" else f"{result.objective} vs {name}"


def _ratio(result: TuneResult, timing: Timing) -> tuple[str, str]:
    """Return the ratio to the baseline and its interval."""
    ratio = result.against_baseline(timing)
    return (f"{ratio.mid:.3f}", f"[{ratio.low:.3f}, {ratio.high:.3f}]") if ratio else ("", "")


def summary_lines(results: Mapping[str, AnyResult], width: int | None = None) -> list[str]:
    """Return one line per problem and the geometric mean, for runs of more than one problem."""
    measured = {name: r for name, r in results.items() if isinstance(r, TuneResult) and r.measured}
    failed = [name for name, r in results.items() if isinstance(r, Failed)]
    lines = []
    if len(measured) > 1:
        lines += _summary_table(measured, width)
    ratios = [result.ratio.mid for result in measured.values() if result.ratio is not None]
    if len(ratios) > 1:
        objective = next(iter(measured.values())).objective
        lines.append(
            f"geometric mean of {objective}, {_baselines(measured.values())} over cutegen: "
            f"{geometric_mean(ratios):.3f} "
            f"({len(ratios)} shapes)"
        )
    if failed:
        lines += _folded([f"without a winner: {', '.join(map(printable, failed))}"], width)
    return lines


def _summary_table(measured: Mapping[str, TuneResult], width: int | None) -> list[str]:
    results = list(measured.values())
    first = results[0]
    timings = [result.winner.timing for result in results if result.winner.timing is not None]
    ratios = [_ratio(result, timing) for result, timing in zip(results, timings, strict=True)]
    same = len({result.metric for result in results}) == 1
    rates = [
        f"{r.rate(t.median_us):.1f}" + ("" if same else f" {r.metric}")
        for r, t in zip(results, timings, strict=True)
    ]
    gains = [f"{r.ratio_to_default.mid:.3f}" if r.ratio_to_default else "" for r in results]
    return columns(
        [
            Column("shape", [printable(name) for name in measured], left=True),
            Column("time us", [f"{timing.median_us:.2f}" for timing in timings]),
            Column(first.metric if same else "rate", rates, drop=1),
            *_energy_columns(timings, first),
            Column(_versus(first, _baselines(results)), [ratio for ratio, _ in ratios]),
            Column("95 %", [interval for _, interval in ratios], drop=5),
            Column("vs default", gains, drop=4),
            _provider_column([result.config.source for result in results]),
            Column("config", [_configs(r, [r.config], width)[0] for r in results], left=True),
        ],
        width,
    )


def _baselines(results: Iterable[TuneResult]) -> str:
    """Return the baseline that the results have in common, else a word for all of them."""
    names = {result.baseline for result in results}
    return names.pop() if len(names) == 1 else "baseline"


def document(results: Mapping[str, AnyResult], about: Mapping[str, Json]) -> dict[str, Json]:
    """Return everything as plain JSON data."""
    return {"schema": 1, **about, "results": [_result_json(name, r) for name, r in results.items()]}


def _result_json(name: str, result: AnyResult) -> dict[str, Json]:
    if isinstance(result, RangeResult):
        return range_json(name, result)
    head: dict[str, Json] = {
        "name": name,
        "problem": str(result.range if isinstance(result, Failed) and result.range else result.problem),
        "seconds": round(result.seconds, 3),
    }
    if isinstance(result, Failed):
        return {**head, "winner": None, "error": str(result.error)}
    ratio = result.ratio_to_default
    return {
        **head,
        "measured": result.measured,
        "objective": result.objective,
        "context": result.context if result.measured else None,
        "reused": result.reused,
        "run": result.run,
        "stages": {name: round(seconds, 3) for name, seconds in result.stages.items()},
        "outcomes": dict(result.outcomes),
        "untried": result.untried,
        "winner": "torch" if result.baseline_wins else result.config.to_json(),
        "source": "torch" if result.baseline_wins else result.config.source,
        "refused": list(result.refused),
        "failed": list(result.failed),
        "dead_knobs": list(result.dead_knobs),
        "ratio_to_default": None if ratio is None else [ratio.low, ratio.mid, ratio.high],
        "baseline": result.baseline,
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
        "workspace_bytes": row.workspace_bytes,
        "artifact_key": row.artifact_key,
        "trial": row.trial,
    }
