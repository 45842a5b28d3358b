"""``python -m cutegen.pin``: write the winners of a table into a folder that ships."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from cutegen.arch import ARCHES, find_arch
from cutegen.build.store import Store
from cutegen.cli.args import (
    EXIT_CODES,
    Parser,
    add_cache_argument,
    add_kernel_arguments,
    file_path,
)
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.cli.wrapped_text import say
from cutegen.deploy import Pinned, PinnedRange, pin_table
from cutegen.deploy.manifest import OUTSIDE
from cutegen.deploy.selection import PINNED_FALLBACKS, ranges_over, widened
from cutegen.errors import UsageError
from cutegen.families.ranges import Range, is_range, parse_range
from cutegen.families.registry import load_families, load_kernel, parse_problem
from cutegen.family import Problem
from cutegen.measure.device import or_else, present_device
from cutegen.records.paths import default_table_path
from cutegen.records.recorded_calls import read_recordings
from cutegen.records.table import Table
from cutegen.runtime.kernel_cache import Kernels
from cutegen.text import how_many, shown

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m cutegen.pin --table TABLE.json --out deploy/
  python -m cutegen.pin --table TABLE.json --out deploy/ --problem 'gemm 17x7168x2048 bf16 kk'
  python -m cutegen.pin --table TABLE.json --out deploy/ --range m=1..8192 --outside torch
  python -m cutegen.pin --recorded model.jsonl --m 1..8192 --out deploy/ --cpp

To use the folder, put it on sys.path. Only torch and tvm-ffi must be installed:
  import pinned; c = pinned.gemm(a, b); y = pinned.call("rmsnorm", x=x, weight=w, eps=1e-6)
More: docs/deploy.md.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.pin",
        description="Export the winners of a table into a folder that needs neither cutegen nor a compiler.",
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--table",
        type=file_path,
        metavar="FILE.json",
        help="dispatch table (with --recorded the default is the one in the cache folder for the local GPU)",
    )
    parser.add_argument(
        "--recorded",
        type=file_path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help="pin only the problems of forward calls in these recordings of cutegen.record, with the "
        "configs that the table gives them",
    )
    parser.add_argument(
        "--m",
        metavar="FIRST..LAST",
        default="",
        help="with --recorded: serve all of these m for every problem that has an m, such as 1..8192",
    )
    parser.add_argument(
        "--out",
        type=file_path,
        required=True,
        metavar="FOLDER",
        help="folder to write: new, empty, or pinned before and unchanged",
    )
    parser.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="LINE",
        help="also pin this problem, or range such as 'gemm 1..8192x7168x2048 bf16 kk', with the config that "
        "a library call would use; repeatable",
    )
    parser.add_argument(
        "--range",
        action="append",
        default=[],
        metavar="SIZE=FIRST..LAST",
        help="serve all of these sizes for every kind of problem in the table, such as m=1..8192; repeatable",
    )
    parser.add_argument(
        "--arch",
        metavar="NAME",
        help=f"the target, where the table is for any compute capability: {', '.join(ARCHES)} (default: what "
        "the table says)",
    )
    _add_torch_arguments(parser)
    parser.add_argument(
        "--cpp",
        action="store_true",
        help="also build libcutegen_ops.so: the GEMMs as an operator for C++ programs and AOTInductor",
    )
    add_kernel_arguments(parser)
    add_cache_argument(parser, "compiled kernels, tables")
    parser.add_argument("--no-build", action="store_true", help="fail if a kernel is not compiled yet")
    return parser


def _add_torch_arguments(parser: Parser) -> None:
    """Add what torch computes in the deployment."""
    parser.add_argument(
        "--outside",
        choices=OUTSIDE,
        default="none",
        help="what computes a call that is not pinned: none (an error, default), or torch for a plain GEMM",
    )
    parser.add_argument(
        "--fallback",
        choices=PINNED_FALLBACKS,
        default="none",
        help="what computes a plain GEMM where torch was measured to be faster: none (the kernel, default) "
        "or measured (torch)",
    )


def _run(args: argparse.Namespace) -> int:
    store = Store.at(args.cache_dir)
    kernels = Kernels(store, build="never" if args.no_build else "allow")
    arch = None if args.arch is None else find_arch(args.arch)
    if args.families is not None:
        load_families(args.families)
    for path in args.kernel or ():
        load_kernel(path)
    problems: list[Problem | Range] = [
        parse_range(line) if is_range(line) else parse_problem(line) for line in args.problem
    ]
    table = _table(args, store)
    for text in args.range:
        problems += _ranges(text, Table.load(table))
    problems += _recorded(args)
    pinned = pin_table(
        table,
        args.out,
        kernels=kernels,
        problems=problems,
        outside=args.outside,
        fallback=args.fallback,
        cpp=args.cpp,
        whole_table=not args.recorded,
        leave_out=lambda problem, why: say(f"left out: {problem}; {why}"),
        arch=arch,
    )
    for item in pinned:
        say(str(item))
    say(_summary(pinned, args.out))
    return EXIT_OK


def _table(args: argparse.Namespace, store: Store) -> Path:
    """Return the table that answers.

    Raises:
        DeviceError: None is named, and there is no GPU whose table could be meant.
        UsageError: None is named, and problems are not from a recording.
    """
    if args.table is not None:
        return Path(args.table)
    if not args.recorded:
        raise UsageError("one of --table and --recorded is needed")
    with or_else("--table names the table, and so the GPU, to pin for"):
        return default_table_path(store.root, present_device())


def _recorded(args: argparse.Namespace) -> tuple[Problem | Range, ...]:
    """Return what was recorded: pinned kernels compute no gradients, so backward calls are left out.

    Raises:
        UsageError: A file cannot be read, holds no such call, or ``--m`` is malformed or alone.
    """
    if not args.recorded:
        if args.m:
            raise UsageError("--m is of recorded problems; use --range with --table")
        return ()
    found = read_recordings(args.recorded)
    for note in found.notes:
        say(f"note: {note}")
    calls = [call for call in found.calls if call.phase == "forward" and call.how != "given"]
    if not calls:
        raise UsageError(f"no forward call in {', '.join(map(str, args.recorded))}")
    problems = tuple(dict.fromkeys(call.problem for call in calls))
    if not args.m:
        return problems
    ends = re.fullmatch(r"([0-9]{1,18})(?::|\.\.)([0-9]{1,18})", args.m)
    if ends is None or not 0 < int(ends[1]) <= int(ends[2]):
        raise UsageError(f"--m is {shown(args.m)}, not FIRST..LAST with FIRST up to LAST, such as 1..8192")
    return widened(problems, "m", int(ends[1]), int(ends[2]))


def _ranges(text: str, table: Table) -> tuple[Range, ...]:
    """Return the ranges that ``m=1..8192`` stands for."""
    found = re.fullmatch(r"(\w+)=([0-9]{1,18})\.\.([0-9]{1,18})", text)
    if found is None:
        raise UsageError(
            f"range {shown(text)} is not of the form SIZE=FIRST..LAST; write for example m=1..8192"
        )
    return ranges_over(table, found[1], int(found[2]), int(found[3]))


def _summary(pinned: Sequence[Pinned | PinnedRange], out: Path) -> str:
    every = [each for item in pinned for each in (item.pinned if isinstance(item, PinnedRange) else [item])]
    libraries = {item.artifact.symbol for item in every if item.artifact is not None}
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    problems, kernels = how_many(len(pinned), "problem"), how_many(len(libraries), "kernel")
    return f"{problems}, {kernels}, {size / 1e6:.1f} MB in {out}"
