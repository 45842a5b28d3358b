"""Render results files into the Markdown documents that quote them, and print what they come to.

A document holds the place between two comments, which name the results file without its folder and suffix::

    <!-- results: gemm_dev -->
    <!-- end results: gemm_dev -->

Everything in between is replaced. A place for some shapes alone, in fewer columns, names them::

    <!-- results: gemm_dev rows=T1,L1 -->

Nothing is rounded in cutegen's favour: its times go up and its ratios
down, the others' times down and their ratios up.

    python tools/results_table.py docs/results/gemm_dev.json                     # print
    python tools/results_table.py docs/results/gemm_dev.json --into README.md    # write
    python tools/results_table.py docs/results/*.json --into README.md --check   # exit 1 if it would change
    python tools/results_table.py run1.json run2.json run3.json --spread         # how far runs disagree
    python tools/results_table.py docs/results/gpu_tests*.json --latest          # newest run of each file

With --into, --spread and --latest write to the place called like the first file with ``_spread`` or
``_latest`` behind.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.exit_codes import run_command
from cutegen.errors import UsageError
from cutegen.measure.statistics import geometric_mean
from tools.benchmark import bandwidth_table, energy_table, tables_table
from tools.benchmark.checkouts_table import CHECKOUTS, Checkouts
from tools.benchmark.cold_table import COLD_START, ColdStart
from tools.benchmark.family_table import FamilyResults
from tools.benchmark.first_call_table import FIRST_CALLS, HOST_ONLY, FirstCalls, HostCalls
from tools.benchmark.foreign_table import ForeignResults
from tools.benchmark.gpcs_table import GPC_TURNS, GpcTurns
from tools.benchmark.gpu_tests_table import GPU_TESTS, GpuTests, latest
from tools.benchmark.markdown import down, launches, line, tuning_words, up, where
from tools.benchmark.model_table import MODEL, ModelResults
from tools.benchmark.orders_table import SWEEP_OF_PRODUCTS, Orders
from tools.benchmark.profile_table import PROFILE, Profile
from tools.benchmark.quoted import QuotedFile
from tools.benchmark.range_table import RANGE_CHECK, RangeResults
from tools.benchmark.resident_table import RESIDENT, Resident
from tools.benchmark.results import COPY, ENERGY, FAMILY, FOREIGN, OWN, TABLES, Results, ShapeResult, kind_of
from tools.benchmark.row_order_table import ROW_ORDERS, RowOrders
from tools.benchmark.sweep_table import SWEEP, Sweep
from tools.benchmark.transcript import TRANSCRIPT, Transcript
from tools.benchmark.untuned_table import UNTUNED, UNTUNED_FAMILIES, UntunedFamilies, UntunedResults

#: Shapes with M and N of at least this are summed up on their own.
LARGE = 2048
#: How files that hold no contest are summed up and rendered.
_OTHERS = {
    ENERGY: (energy_table.summary, energy_table.render),
    TABLES: (tables_table.summary, tables_table.render),
}
#: What reads and renders the files that are no :class:`Results` at all.
_CHECKS: dict[str, type[Profile] | type[Sweep] | type[QuotedFile]] = {
    PROFILE: Profile,
    SWEEP: Sweep,
    COLD_START: ColdStart,
    FAMILY: FamilyResults,
    FIRST_CALLS: FirstCalls,
    HOST_ONLY: HostCalls,
    FOREIGN: ForeignResults,
    GPU_TESTS: GpuTests,
    TRANSCRIPT: Transcript,
    MODEL: ModelResults,
    UNTUNED: UntunedResults,
    RANGE_CHECK: RangeResults,
    UNTUNED_FAMILIES: UntunedFamilies,
    RESIDENT: Resident,
    ROW_ORDERS: RowOrders,
    CHECKOUTS: Checkouts,
    GPC_TURNS: GpcTurns,
    SWEEP_OF_PRODUCTS: Orders,
}
#: Names of shapes to the Markdown of their rows.
Brief = Callable[[Sequence[str]], str]
LABELS = {
    "quack": "QuACK",
    "operators": "Operator API",
    "cublaslt": "best of cuBLASLt",
    "max_autotune": "max-autotune",
}


@dataclass(frozen=True)
class Group:
    """Some rows and what they are called, to be summed up together."""

    title: str
    rows: tuple[ShapeResult, ...]

    def ratios(self, peer: str = "", context: str = "") -> list[float]:
        """Return time of ``peer`` (torch.mm if empty) over cutegen's, for the rows where both ran."""
        found = (row.ratio(peer, context) for row in self.rows)
        return [value for value in found if value is not None]


def groups(rows: Sequence[ShapeResult]) -> tuple[Group, ...]:
    """Return all rows, and the large ones."""
    large = tuple(row for row in rows if all(row.problem.sizes[axis] >= LARGE for axis in ("m", "n")))
    found = [Group(f"all {len(rows)} shapes", tuple(rows))]
    if large:
        found.append(Group(f"the {len(large)} with M and N of at least {LARGE}", large))
    return tuple(found)


def peers_of(rows: Iterable[ShapeResult]) -> list[str]:
    """Return the other implementations, in the order of the file."""
    return list(dict.fromkeys(name for row in rows for name in row.entries if name not in (OWN, COPY)))


def contexts_of(rows: Iterable[ShapeResult]) -> list[str]:
    """Return the launch contexts beside the first."""
    return list(dict.fromkeys(name for row in rows for name in row.contexts))


def burst_ratios(rows: Iterable[ShapeResult]) -> list[float]:
    """Return time of torch.mm over cutegen's in bursts, for the rows where power limits the clock."""
    timings = (row.timing(OWN) for row in rows)
    return [timing.burst_ratio for timing in timings if timing is not None and timing.burst_ratio]


def table(results: Results) -> list[str]:
    """Return the lines of the table, one row per shape."""
    peers, contexts = peers_of(results.shapes), contexts_of(results.shapes)
    bursts = bool(burst_ratios(results.shapes))
    head = ["shape", "M x N x K", "type", "torch.mm us", "cutegen us", "TFLOP/s", "torch.mm / cutegen (95 %)"]
    head += ["the same in bursts"] * bursts
    head += [f"the same {_words(context)}" for context in contexts]
    head += [f"{LABELS.get(peer, peer)} / cutegen" for peer in peers]
    head += ["MHz", "tuning s: cutegen" + "".join(f", {LABELS.get(peer, peer)}" for peer in peers), "kernel"]
    rows = [_cells(row, peers, contexts, bursts=bursts) for row in results.shapes]
    align = ["---", "---", "---", *["---:"] * (len(head) - 5), "---:", "---"]
    return [line(head), line(align), *map(line, rows)]


def _words(context: str) -> str:
    return context.replace("_", " ")


def _cells(
    row: ShapeResult, peers: Sequence[str], contexts: Sequence[str] = (), *, bursts: bool = False
) -> list[str]:
    p = row.problem
    cells = [row.name, row.shape, " ".join(str(p).split()[2:])]
    own = row.timing(OWN)
    cells.append(down(row.reference.median_us, 2))
    if own is None or own.ratio is None or own.ratio_low is None or own.ratio_high is None:
        entry = row.entries[OWN]
        cells += [f"**{entry.outcome}**", "", ""]
    else:
        spread = f"{down(own.ratio, 3)} ({down(own.ratio_low, 3)} to {down(own.ratio_high, 3)})"
        cells += [up(own.median_us, 2), down(p.flops / own.median_us / 1e6, 1), spread]
    if bursts:
        cells += [down(value, 3) for value in burst_ratios([row])] or [""]
    for context in contexts:
        value = row.ratio("", context)
        cells.append(down(value, 3) if value else "")
    for peer in peers:
        value = row.ratio(peer)
        entry_of_peer = row.entries.get(peer)
        cells.append(down(value, 3) if value else entry_of_peer.outcome if entry_of_peer else "")
    clock = own.sm_clock_mhz if own else None
    cells.append("" if clock is None else f"{clock:.0f}")
    cells.append(", ".join(_seconds(row, name) for name in (OWN, *peers)))
    return [*cells, row.entries[OWN].config]


def _seconds(row: ShapeResult, name: str) -> str:
    entry = row.entries.get(name)
    if entry is None or entry.tuning_s is None:
        return "-"
    return (up if name == OWN else down)(entry.tuning_s, 1)


def summary(results: Results) -> list[str]:
    """Return the lines that sum the table up: geometric means over all shapes and over the large ones."""
    if results.kind in _OTHERS:
        return _OTHERS[results.kind][0](results)
    lines = []
    for group in groups(results.shapes):
        lines += [f"- {sentence}" for sentence in _sentences(group, peers_of(results.shapes))]
        lines += [f"- {sentence}" for sentence in _context_sentences(group, contexts_of(results.shapes))]
        lines += _burst_lines(group)
    if took := tuning_words(row.entries[OWN].tuning_s for row in results.shapes):
        lines.append(f"- cutegen's tuning: {took}")
    lines += bandwidth_table.summary(results.shapes)
    failed = [row.name for row in results.shapes if row.timing(OWN) is None]
    if failed:
        lines.append(f"- **cutegen failed on {', '.join(failed)}; no mean includes these**")
    conditions: Any = results.conditions
    absent = sorted(set(conditions["shapes"]["names"]) - {row.name for row in results.shapes})
    if absent:
        lines.append(f"- **not measured: {', '.join(absent)}**")
    uncalled = [row.name for row in results.shapes if _called(row) not in ("ok", "")]
    if uncalled:
        lines.append(f"- **cutegen.gemm did not give the right answer on {', '.join(uncalled)}**")
    return lines


def _called(row: ShapeResult) -> str:
    return str(row.entries[OWN].details.get("called_through_gemm", ""))


def _sentences(group: Group, peers: Sequence[str]) -> Iterator[str]:
    own = group.ratios()
    if not own:
        return
    at_least = sum(value >= 1.0 for value in own)
    yield (
        f"{group.title}: geometric mean of torch.mm / cutegen **{down(geometric_mean(own), 3)}**"
        f"{_over(own, group)}, smallest {down(min(own), 3)}, at least 1 on {at_least} of {len(own)}"
    )
    for peer in peers:
        values = group.ratios(peer)
        theirs = [t.ratio for row in group.rows if (t := row.timing(peer)) and t.ratio]
        if values and theirs:
            label = LABELS.get(peer, peer)
            level = sum(value >= 0.99 for value in values)
            yield (
                f"{group.title}: {label} / cutegen **{down(geometric_mean(values), 3)}**"
                f"{_over(values, group)}, ahead or level (0.99) on {level} of {len(values)}; "
                f"torch.mm / {label} {up(geometric_mean(theirs), 3)}"
            )


def _context_sentences(group: Group, contexts: Sequence[str]) -> Iterator[str]:
    """Yield what the further launch contexts come to."""
    for context in contexts:
        if values := group.ratios("", context):
            level = sum(value >= 1.0 for value in values)
            yield (
                f"{group.title}, {_words(context)}: geometric mean of torch.mm / cutegen "
                f"**{down(geometric_mean(values), 3)}**{_over(values, group)}, "
                f"smallest {down(min(values), 3)}, at least 1 on {level} of {len(values)}"
            )


def _burst_lines(group: Group) -> list[str]:
    """Return what bursts come to, where any row was timed in them."""
    values = burst_ratios(group.rows)
    if not values:
        return []
    return [
        f"- {group.title}, in bursts, {len(values)} that a limit of power slows down: geometric mean of "
        f"torch.mm / cutegen **{down(geometric_mean(values), 3)}**, smallest {down(min(values), 3)}"
    ]


def _over(values: Sequence[float], group: Group) -> str:
    missing = len(group.rows) - len(values)
    return f" over {len(values)} (missing: {missing})" if missing else ""


def footing(results: Results) -> list[str]:
    """Return the lines that say where and how the numbers were measured."""
    conditions: Any = results.conditions
    policy = conditions["policy"]
    return [
        where(results),
        f"{policy['min_rounds']} to {policy['rounds']} interleaved rounds in CUDA graphs, operands rotated "
        f"past L2 (uniform in [-1, 1)), clocks {policy['clock']}{launches(policy)}; medians with 95 % "
        "intervals of paired ratios; MHz is the SM clock right after cutegen's launches. Above 1 cutegen is "
        "faster; rounding is never in its favour.",
    ]


def render(results: Results) -> str:
    """Return the Markdown of a results file."""
    if results.kind in _OTHERS:
        return _OTHERS[results.kind][1](results)
    tables = [table(results), bandwidth_table.table(results.shapes)]
    blocks = [summary(results), *tables, *[[text] for text in footing(results)]]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def brief(results: Results, names: Sequence[str]) -> str:
    """Return the Markdown of the shapes called ``names``, in the columns that a first look needs.

    Raises:
        UsageError: The file has no such shape.
    """
    rows = {row.name: row for row in results.shapes}
    if unknown := [name for name in names if name not in rows]:
        raise UsageError(f"no shape is called {', '.join(unknown)}; there are {', '.join(rows)}")
    columns = [1, 2, 3, 4, 5, 6]
    head = ["M x N x K", "type", "torch.mm us", "cutegen us", "TFLOP/s", "torch.mm / cutegen (95 %)"]
    cells = [[_cells(rows[name], ())[at] for at in columns] for name in names]
    lines = [line(head), line(["---", "---", *["---:"] * 4]), *map(line, cells)]
    summed = next(_sentences(groups(results.shapes)[0], ()))
    return "\n".join([*lines, "", f"Of {summed}.", "", where(results)])


def insert(document: str, name: str, text: str, rows: str = "") -> str:
    """Return ``document`` with ``text`` in the place called ``name``.

    Args:
        document: Markdown.
        name: Of the results.
        text: What goes there.
        rows: The shapes that the place names, with commas; empty for the place of all.

    Raises:
        UsageError: There is no such place, or more than one.
    """
    begin = f"<!-- results: {name}{f' rows={rows}' if rows else ''} -->"
    end = f"<!-- end results: {name} -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    count = len(place.findall(document))
    if count != 1:
        raise UsageError(f"found {count} places for {name!r}; wanted is one: {begin} ... {end}")
    return place.sub(lambda match: f"{begin}\n\n{text}\n\n{end}", document)


def places(document: str, name: str) -> list[str]:
    """Return the places of the results called ``name`` in ``document``: the rows that each names."""
    return re.findall(rf"<!-- results: {re.escape(name)}(?: rows=([\w,]+))? -->", document)


def spread(runs: Mapping[str, Results]) -> list[str]:
    """Return how far runs disagree: in the geometric mean, and for each shape in torch.mm / cutegen."""
    lines = [f"geometric means {_means(runs)}"]
    for (name, problem), (width, values) in _widths(runs).items():
        lines.append(f"{up(100 * width, 2)} %  {name} {problem}: {', '.join(down(v, 4) for v in values)}")
    return lines


def spread_summary(runs: Mapping[str, Results]) -> str:
    """Return the same as Markdown, with the shapes by name that disagree by 1 % or more."""
    widths = _widths(runs)
    apart = [f"{name} {up(100 * width, 2)} %" for (name, _), (width, _) in widths.items() if width >= 0.01]
    others = f"; the others: {', '.join(apart)}" if apart else ""
    return (
        f"- {len(runs)} runs, geometric means of torch.mm / cutegen {_means(runs)}\n"
        f"- {len(widths) - len(apart)} of {len(widths)} agree within 1 %{others}"
    )


def _means(runs: Mapping[str, Results]) -> str:
    """Return the geometric means over what all runs have, and how many shapes that are of how many.

    Raises:
        UsageError: No shape is in all of them.
    """
    widths = _widths(runs)
    if not widths:
        raise UsageError(f"no shape was measured in all of {', '.join(runs)}, so they do not compare")
    every = {(row.name, str(row.problem)) for run in runs.values() for row in run.shapes}
    count = f"all {len(every)}" if len(widths) == len(every) else f"the {len(widths)} of {len(every)}"
    means = [
        f"{name} {down(geometric_mean(values[at] for _, values in widths.values()), 4)}"
        for at, name in enumerate(runs)
    ]
    return f"over {count} shapes that every run has: {', '.join(means)}"


def _widths(runs: Mapping[str, Results]) -> dict[tuple[str, str], tuple[float, list[float]]]:
    """Return how far the ratios of each shape that all runs have lie apart, with these, widest first."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs.values():
        for row in run.shapes:
            if (value := row.ratio()) is not None:
                found.setdefault((row.name, str(row.problem)), []).append(value)
    shared = {shape: values for shape, values in found.items() if len(values) == len(runs)}
    widths = {shape: (max(values) / min(values) - 1, values) for shape, values in shared.items()}
    return dict(sorted(widths.items(), key=lambda item: -item[1][0]))


def write(
    paths: Sequence[Path], texts: Mapping[str, str], *, check: bool, briefs: Mapping[str, Brief] | None = None
) -> int:
    """Put ``texts`` into the documents that have a place for them; return the exit code.

    Args:
        paths: The documents.
        texts: Markdown by the name of its place.
        check: Change nothing.
        briefs: What makes the Markdown for places that name some rows.

    Raises:
        UsageError: No document has a place for one of them.
    """
    placed: set[str] = set()
    stale = []
    for path in paths:
        old = new = path.read_text(encoding="utf-8")
        for name, rows in [(found, rows) for found in texts for rows in places(old, found)]:
            text = texts[name]
            if rows:
                if name not in (briefs or {}):
                    raise UsageError(f"{path.name}: {name} cannot be cut to rows={rows}")
                text = (briefs or {})[name](rows.split(","))
            new = insert(new, name, text, rows)
            placed.add(name)
        if new != old:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if missing := sorted(set(texts) - placed):
        raise UsageError(f"no document has a place for {', '.join(missing)}: <!-- results: {missing[0]} -->")
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--into", nargs="+", type=Path, metavar="DOCUMENT.md", help="write instead of print")
    parser.add_argument(
        "--check", action="store_true", help="with --into: change nothing, exit 1 if it would"
    )
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--spread", action="store_true", help="print how far several runs disagree")
    several.add_argument(
        "--latest", action="store_true", help="of runs of GPU tests, print each file's newest"
    )
    args = parser.parse_args(argv)
    return run_command(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.spread:
        runs = {path.stem: Results.load(path) for path in args.results}
        print("\n".join(spread(runs)))
        place = f"{args.results[0].stem}_spread"
        return write(args.into, {place: spread_summary(runs)}, check=args.check) if args.into else 0
    if args.latest:
        lines, text = latest(GpuTests.load(path) for path in args.results)
        print("\n".join(lines) if args.into else text)
        place = f"{args.results[0].stem}_latest"
        return write(args.into, {place: text}, check=args.check) if args.into else 0
    texts, briefs = {}, {}
    for path in args.results:
        lines, texts[path.stem] = _read(path)
        if kind_of(path) not in {*_CHECKS, *_OTHERS}:
            briefs[path.stem] = partial(brief, Results.load(path))
        print("\n".join([f"{path.stem}:", *lines]) if args.into else texts[path.stem])
    return write(args.into, texts, check=args.check, briefs=briefs) if args.into else 0


def _read(path: Path) -> tuple[list[str], str]:
    """Return the summary and the Markdown of a file of any kind."""
    if (kind := kind_of(path)) in _CHECKS:
        found = _CHECKS[kind].load(path)
        return found.summary(), found.render()
    results = Results.load(path)
    return summary(results), render(results)


if __name__ == "__main__":
    sys.exit(main())
