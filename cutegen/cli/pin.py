"""``python -m cutegen.pin``: write the winners of a table into a folder that ships."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cutegen.build.store import Store
from cutegen.cli.args import EXIT_CODES, Parser, file_path
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.cli.text import say
from cutegen.deploy import Pinned, pin_table
from cutegen.families.registry import load_families, parse_problem
from cutegen.runtime.kernel_cache import Kernels

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m cutegen.pin --table TABLE.json --out deploy/
  python -m cutegen.pin --table TABLE.json --out deploy/ --problem 'gemm 17x7168x2048 bf16 kk'

then, with deploy/ on sys.path and only torch and tvm-ffi installed:
  import pinned; c = pinned.gemm(a, b); y = pinned.call("rmsnorm", x=x, weight=w, eps=1e-6)

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.pin",
        description="Write a dispatch table's winners into a folder that needs no cutegen and no compiler.",
        epilog=_EXAMPLES + EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--table", type=file_path, required=True, metavar="FILE.json", help="the dispatch table"
    )
    parser.add_argument(
        "--out",
        type=file_path,
        required=True,
        metavar="FOLDER",
        help="new, empty, or pinned before and unchanged since",
    )
    parser.add_argument(
        "--problem",
        action="append",
        default=[],
        metavar="LINE",
        help="a further problem, answered as a library call would be; repeatable",
    )
    parser.add_argument("--families", type=file_path, metavar="DIR", help="folder of further kernel families")
    parser.add_argument("--cache-dir", type=file_path, metavar="FOLDER", help="where compiled kernels are")
    parser.add_argument("--no-build", action="store_true", help="refuse kernels that are not compiled yet")
    return parser


def _run(args: argparse.Namespace) -> int:
    store = Store(args.cache_dir) if args.cache_dir else Store.default()
    kernels = Kernels(store, build="never" if args.no_build else "allow")
    if args.families is not None:
        load_families(args.families)
    problems = [parse_problem(line) for line in args.problem]
    pinned = pin_table(
        args.table,
        args.out,
        kernels=kernels,
        problems=problems,
        leave_out=lambda problem, why: say(f"left out: {problem}; {why}"),
    )
    for item in pinned:
        say(str(item.answer))
    say(_summary(pinned, args.out))
    return EXIT_OK


def _summary(pinned: Sequence[Pinned], out: Path) -> str:
    libraries = {item.artifact.symbol for item in pinned if item.artifact is not None}
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return f"{len(pinned)} problems, {len(libraries)} kernels, {size / 1e6:.1f} MB in {out}"
