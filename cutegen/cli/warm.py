"""``python -m cutegen.warm``: compile kernels before the first calls that need them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cutegen.arch import ARCHES, Arch
from cutegen.build.store import Store
from cutegen.cli.args import (
    Parser,
    add_cache_argument,
    add_family_argument,
    add_json_argument,
    add_kernel_arguments,
    add_quiet_argument,
    add_workers_argument,
    file_path,
    load_given_families,
    positive_float,
    words,
)
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.cli.progress_display import Display, make_display
from cutegen.cli.target import find_target
from cutegen.cli.wrapped_text import say, say_json
from cutegen.digest import Json
from cutegen.errors import TableError, UsageError
from cutegen.families.ranges import Range, is_range, range_ends
from cutegen.families.registry import find_family
from cutegen.families.shapes import NamedRange, read_shapes_and_ranges
from cutegen.family import Problem
from cutegen.records.table import Table
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.runtime.needs import Needs, each_once, kinds
from cutegen.runtime.warming import Warming, compile_wanted, prepare_choices
from cutegen.text import how_many
from cutegen.tuning.progress import Progress

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m cutegen.warm gemm                                                  # bf16, layout kk
  python -m cutegen.warm gemm --dtype bf16,fp16 --layout kk,kn --options '' --options 'bias=n act=silu'
  python -m cutegen.warm gemm --dtype e4m3 --options 'scale promote'           # cutegen.scaled_gemm
  python -m cutegen.warm gemm --arch sm_90a --cache-dir image/cache            # on a machine without a GPU
  python -m cutegen.warm gemm --table TABLE.json --shapes shapes.toml
  python -m cutegen.warm rmsnorm --shape 1x4096 --shape 1x7168                 # row lengths are compiled in

For each kind of problem (dtype, layout, options) this compiles every kernel that an untuned problem may need,
whatever its sizes. Calls then compile nothing. Kernels that the cache has are skipped, so the same command
continues an interrupted run. More: docs/pytorch.md, "Warm-up".

exit codes:
  0    everything is compiled
  1    some kernel does not compile, or the budget was used up
  2    bad usage: an argument, a shape, a shapes file
  3    the environment: no GPU, no compiler, an unusable cache or table
  130  interrupted; the same command continues
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.warm",
        description="Compile kernels into the cache before the first calls that need them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_family_argument(parser)
    _add_wanted(parser)
    parser.add_argument(
        "--arch", metavar="NAME", help=f"compile target: {', '.join(ARCHES)} (default: that of the local GPU)"
    )
    add_workers_argument(parser)
    parser.add_argument("--budget", type=positive_float, metavar="SECONDS", help="time limit (default: none)")
    parser.add_argument(
        "--launch", action="store_true", help="also load and launch each kernel once on the local GPU"
    )
    add_cache_argument(parser, "where the kernels go")
    add_json_argument(parser)
    add_quiet_argument(parser)
    return parser


def _add_wanted(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("kernels")
    group.add_argument(
        "--dtype", type=words, default=(), metavar="D1,D2", help="dtypes (default: the first of the family)"
    )
    group.add_argument(
        "--layout", type=words, default=(), metavar="L1,L2", help="layouts of a GEMM (default: kk)"
    )
    group.add_argument(
        "--options",
        action="append",
        default=[],
        metavar="WORDS",
        help="options of one kind of problem, such as 'bias=n act=silu', or '' for none; repeatable",
    )
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="SIZES",
        help="sizes, for families that compile some in, or with --table; a range such as 1..8192x64x64 means "
        "all kernels that may answer such sizes. Repeatable",
    )
    group.add_argument(
        "--shapes",
        type=file_path,
        metavar="FILE.toml",
        help="file of problems: [[shape]] tables (docs/tuning.md)",
    )
    group.add_argument(
        "--table", type=file_path, metavar="FILE", help="compile all kernels of this dispatch table"
    )
    add_kernel_arguments(group)


def _run(args: argparse.Namespace) -> int:
    load_given_families(args)
    if args.launch and args.arch:
        raise UsageError("--launch is for the present GPU; leave out --arch")
    store = Store.at(args.cache_dir)
    arch, sm_count, table = _target(args)
    of_kinds, problems = _asked(args)
    needs = Needs(table, arch, sm_count)
    named = needs.of_table() if args.table is not None else ()
    found = (*needs.of_problems(problems), *named, *needs.of_kinds((*of_kinds, *problems)))
    wanted = each_once(found, arch)
    with make_display(args.quiet) as display:
        display.begin(f"{args.family} {arch}", 1, 1)
        warmed = compile_wanted(
            wanted,
            store,
            arch,
            workers=args.workers,
            budget_s=args.budget,
            observe=lambda state: _show(display, state),
        )
        display.hide()
    prepare_choices(wanted, store, arch, sm_count)
    launched = _launch(warmed, store, table) if args.launch else 0
    _report(warmed, launched, store, arch, as_json=args.json)
    return EXIT_NO_WINNER if warmed.failed or warmed.missing else EXIT_OK


def _target(args: argparse.Namespace) -> tuple[Arch, int, Table | None]:
    """Return architecture, SMs, and the table that calls there will ask.

    Raises:
        DeviceError: There is no GPU, and no architecture is given.
        TableError: The table that is given would be ignored there.
    """
    arch, sm_count, table, ignored = find_target(args, "to compile for another machine")
    if ignored and args.table is not None:
        raise TableError(f"table {args.table} would not be used on {arch}: {ignored}")
    return arch, sm_count, table


def _asked(args: argparse.Namespace) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Return problems of the kinds that are wanted, and problems that are."""
    family = find_family(args.family)
    given = args.dtype or args.layout or args.options
    of_kinds: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()
    for shape in args.shape:
        if is_range(shape):
            ends = (kinds(family, args.dtype, args.layout, args.options, [end]) for end in range_ends(shape))
            of_kinds += tuple(Range(low, high).low for low, high in zip(*ends, strict=True))
        else:
            problems += kinds(family, args.dtype, args.layout, args.options, [shape])
    only_files = not given and (args.shapes is not None or args.table is not None)
    if not args.shape and not only_files:
        of_kinds = kinds(family, args.dtype, args.layout, args.options)
    for item in read_shapes_and_ranges(args.shapes, args.family) if args.shapes is not None else ():
        if isinstance(item, NamedRange):
            of_kinds += (item.range.low,)
        else:
            problems += (item.problem,)
    return of_kinds, problems


def _show(display: Display, state: Warming) -> None:
    if not state.wanted:
        return
    outcomes = {"there": len(state.present), "compiled": len(state.compiled), "failed": len(state.failed)}
    done = sum(outcomes.values())
    stage = "done" if done == len(state.wanted) else "compile"
    shown = {name: count for name, count in outcomes.items() if count}
    problem = state.wanted[0].problem
    display.show(
        Progress(problem, stage, done, len(state.wanted), shown, None, state.left_s, state.elapsed_s)
    )


def _launch(warmed: Warming, store: Store, table: Table | None) -> int:
    """Load and launch what is compiled; return how many."""
    from cutegen.torch_ops.warmup import launch_once

    dispatcher = Dispatcher(table, kernels=Kernels(store, build="never"))
    for each in warmed.ready:
        launch_once(dispatcher, each)
    return len(warmed.ready)


def _report(warmed: Warming, launched: int, store: Store, arch: Arch, *, as_json: bool) -> None:
    root = Path(store.root)
    if as_json:
        failed: list[Json] = [
            {"problem": str(each.problem), "config": each.config.to_json(), "reason": reason}
            for each, reason in warmed.failed
        ]
        say_json(
            {
                "arch": arch.name,
                "cache": str(root),
                "kernels": len(warmed.wanted),
                "compiled": len(warmed.compiled),
                "present": len(warmed.present),
                "failed": failed,
                "missing": warmed.missing,
                "launched": launched,
                "seconds": round(warmed.elapsed_s, 3),
            }
        )
        return
    for each, reason in warmed.failed:
        say(f"failed: {each.problem} ({each.config}): {reason}")
    counts = f"{len(warmed.compiled)} compiled in {warmed.elapsed_s:.1f} s, {len(warmed.present)} were there"
    counts += f", {len(warmed.failed)} failed" if warmed.failed else ""
    counts += f", {launched} launched" if launched else ""
    say(f"{how_many(len(warmed.wanted), 'kernel')} for {arch}: {counts}; in {root}")
    if warmed.missing:
        say(f"{warmed.missing} are missing, for the budget was over; the same command continues")
