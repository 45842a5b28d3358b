"""``python -m cutegen.explain``: which config answers a problem, by which rule of lookup, on any machine."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from cutegen.arch import Arch
from cutegen.cli.args import (
    EXIT_CODES,
    Parser,
    add_cache_argument,
    add_family_argument,
    add_json_argument,
    add_problem_arguments,
    file_path,
    load_given_families,
    named_shapes,
)
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.cli.target import find_target
from cutegen.cli.wrapped_text import Column, columns, fold, line_width, say, say_json
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.families.ranges import Range
from cutegen.families.registry import find_family, find_space, space_of
from cutegen.families.shapes import NamedProblem, NamedRange, Shape
from cutegen.records.table import FALLBACKS, Table
from cutegen.runtime.answer_lookup import DEFAULT_FALLBACK, Answer, look_up
from cutegen.runtime.answer_runs import AnswerRun, answer_runs
from cutegen.text import how_many

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m cutegen.explain gemm --arch sm_90a --table TABLE.json --shape 63x7168x2048
  python -m cutegen.explain gemm --shape 63x7168x2048           # local GPU, table of the cache folder
  python -m cutegen.explain gemm --shape 1..8192x7168x2048      # which m is served by which config
  python -m cutegen.explain gemm --arch sm_90a --table TABLE.json   # all problems and ranges of the table

Nothing is compiled or measured. The first of these rules that finds a valid config serves the call:
  exact    the table has an entry for this problem
  range    the table has a range of sizes that contains it
  bucket   the table has an entry of the same kind whose sizes round up to the same powers of two
  nearest  the closest entry, with each size less than a factor of four away
  default  the default config, selected by the performance model if there is one

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.explain",
        description="Show which config a call would use for each problem, and why.",
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_family_argument(parser)
    add_problem_arguments(parser, ranges=True)
    parser.add_argument(
        "--table",
        type=file_path,
        metavar="FILE",
        help="dispatch table (default: the one in the cache folder for the local GPU; none with --arch)",
    )
    parser.add_argument(
        "--fallback",
        choices=FALLBACKS,
        default="",
        help="which calls PyTorch computes: torch (where the kernel is not clearly faster), expected (where "
        "PyTorch was measured or, untuned, is predicted to be faster), measured, or none "
        f"(default: what the table says, else {DEFAULT_FALLBACK})",
    )
    add_cache_argument(parser, "tables and calibrations")
    add_json_argument(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    load_given_families(args)
    named = named_shapes(args) if args.shape or args.shapes is not None else ()
    arch, sm_count, table, ignored = find_target(args)
    asked = named or _held(table, args.family)
    if not asked:
        raise UsageError(_nothing_asked(args, table, ignored))
    documents: list[Json] = []
    target = f"{arch}, {sm_count} SMs"
    for item in asked:
        if isinstance(item, NamedRange):
            runs = answer_runs(item.range, table, arch, sm_count, args.fallback)
            documents.append(_range_document(item.range, runs, ignored))
            notes = [f"  the table is ignored: {ignored}"] if ignored else []
            lines = [f"{item.range} on {target}", *notes, *_range_lines(item.range, runs, arch)]
        else:
            space = find_space(item.problem.family, arch)
            answer = look_up(table, item.problem, space, sm_count, args.fallback)
            documents.append(_document(answer, ignored))
            lines = _lines(answer, target, table, ignored)
        if not args.json:
            say("\n".join(piece for line in lines for piece in fold(line, line_width())))
    if args.json:
        say_json(documents)
    return EXIT_OK


def _nothing_asked(args: argparse.Namespace, table: Table | None, ignored: str) -> str:
    """Return what to do where no shape is given and the table names none."""
    if ignored:
        why = f"the table is ignored: {ignored}"
    elif table is None:
        why = "there is no table to ask"
    else:
        why = f"the table has nothing of {args.family}"
    sizes = find_family(args.family).example_shape
    return f"no shape given, and {why}; use --shape, such as --shape {sizes}, or --shapes FILE.toml"


def _held(table: Table | None, family: str) -> tuple[Shape, ...]:
    """Return the problems and ranges of a family that the table was tuned for."""
    if table is None:
        return ()
    problems = (NamedProblem(str(p), p) for p in table.entries if p.family == family)
    ranges = (NamedRange(str(e.range), e.range) for e in table.ranges if e.range.low.family == family)
    return (*problems, *ranges)


def _lines(answer: Answer, target: str, table: Table | None, ignored: str) -> list[str]:
    because = f": {answer.because}" if answer.because else ""
    config = f"torch computes it{because}" if answer.config is None else str(answer.config)
    lines = [f"{answer.problem} on {target}", f"  {answer.how}: {_reason(answer, table, ignored)}"]
    return [*lines, *(f"  passed over: {reason}" for reason in answer.skipped), f"  config: {config}"]


def _reason(answer: Answer, table: Table | None, ignored: str) -> str:
    entry = answer.entry
    if entry is not None:
        words = {
            "exact": "the table has this very problem",
            "range": _within(answer),
            "bucket": f"measured for {entry.problem}, whose sizes round up to the same powers of two",
            "nearest": f"measured for {entry.problem}, the closest entry within a factor of four",
        }
        notes = [f"tuned for {entry.objective}"] if entry.objective != "time" else []
        notes += [f"timed {entry.context.replace('_', ' ')}"]
        notes += [f"measured beside {entry.contended_by}"] if entry.contended_by else []
        return words[answer.how] + (f" ({'; '.join(notes)})" if notes else "")
    if ignored:
        return f"the table is ignored: {ignored}"
    return "no entry of the table serves" if table is not None else "there is no table to ask"


def _within(answer: Answer) -> str:
    """Return which range answers, which piece of it, and how well its answers were seen to do."""
    within = answer.within
    if within is None:
        return ""
    piece, regret = within.piece(answer.problem), within.regret
    words = f"the table has {within.range}, in which this config answers {piece.first} to {piece.last}"
    if regret is None:
        return words
    return (
        f"{words}; at {regret.sizes} sizes taken at random its answers were {regret.mean:.1%} behind the "
        f"best candidate, {regret.worst:.1%} at worst"
    )


def _document(answer: Answer, ignored: str) -> dict[str, Json]:
    entry = answer.entry
    return {
        "problem": str(answer.problem),
        "how": answer.how,
        "entry": None if entry is None or answer.within is not None else str(entry.problem),
        "range": None if answer.within is None else str(answer.within.range),
        "config": None if answer.config is None else answer.config.to_json(),
        "because": answer.because,
        "skipped": list(answer.skipped),
        "table_ignored": ignored,
    }


def _range_lines(asked: Range, runs: Sequence[AnswerRun], arch: Arch) -> list[str]:
    """Return a table of which config serves which sizes, and how many configs and kernels that takes."""
    family = asked.low.family
    spaces = {config: space_of(config, family, arch) for run in runs if (config := run.answer.config)}
    names = {config: space.short(config) for config, space in spaces.items()}
    kernels = {space.compile_view(config) for config, space in spaces.items()}
    counts: Counter[str] = Counter()
    for run in runs:
        counts[run.answer.how if run.answer.config else "torch"] += run.sizes
    sizes = [str(run.first) if run.first == run.last else f"{run.first}..{run.last}" for run in runs]
    table = (
        Column(asked.size, sizes),
        Column("rule", [run.answer.how for run in runs], left=True),
        Column(
            "config", [names[c] if (c := r.answer.config) else "torch computes it" for r in runs], left=True
        ),
    )
    listed = ", ".join(f"{count} {rule}" for rule, count in sorted(counts.items()))
    total = f"  {how_many(len(names), 'config')} of {how_many(len(kernels), 'kernel')}; sizes: {listed}"
    return [*columns(table, line_width()), total]


def _range_document(asked: Range, runs: Sequence[AnswerRun], ignored: str) -> dict[str, Json]:
    listed: list[Json] = [
        {
            "first": run.first,
            "last": run.last,
            "sizes": run.sizes,
            "how": run.answer.how,
            "config": None if run.answer.config is None else run.answer.config.to_json(),
            "because": run.answer.because,
        }
        for run in runs
    ]
    return {"range": str(asked), "runs": listed, "table_ignored": ignored}
