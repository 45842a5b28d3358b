"""The arguments of ``python -m cutegen.tune``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cutegen.cli.args import (
    Parser,
    add_busy_argument,
    add_cache_argument,
    add_family_argument,
    add_json_argument,
    add_problem_arguments,
    add_quiet_argument,
    add_workers_argument,
    file_path,
    integer,
    positive_float,
    positive_int,
    words,
)
from cutegen.cli.report import LEGEND
from cutegen.cli.wrapped_text import say
from cutegen.families.gemm.operator_package import EXTRA
from cutegen.families.registry import SOURCES
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.policy import OBJECTIVES
from cutegen.records.table import FALLBACKS
from cutegen.tuning import EFFORTS, Effort

__all__ = ["make_parser"]

_EXAMPLES = """examples:
  python -m cutegen.tune gemm --shape 4096x4096x4096 --shape 64x7168x2048 --dtype bf16
  python -m cutegen.tune gemm --arch sm_90a --shape 4096x4096x4096       # no GPU: compile and predict
  python -m cutegen.tune gemm --shape 1..8192x7168x2048                  # every m from 1 to 8192
  python -m cutegen.tune gemm --shapes shapes.toml --budget 600 --table mine.json
  python -m cutegen.tune gemm --shape 8192x8192x8192 --objective energy --table green.json
  python -m cutegen.tune gemm --shape 4096x4096x4096 --set cluster_shape_mn=2x1,1x2
  python -m cutegen.tune gemm --shape 4096x4096x4096 --sources cutegen,operators
  python -m cutegen.tune --recorded model.jsonl --budget 600             # what a program called
  python -m cutegen.tune --kernel my_norm_kernel.py --shape 4096x4096    # your own kernel

Every candidate is compiled and checked against an fp64 reference on the GPU. The correct ones are timed in
rounds with the baseline, such as torch.mm. Every result is stored: the same command continues an interrupted
run, or answers from the stored trials. With --arch nothing is measured: candidates are compiled and
inspected, and times are predictions of the performance model. More: docs/tuning.md.

To compile on one machine and measure on another:
  1. python -m cutegen.tune gemm --arch sm_90a --shapes shapes.toml --export candidates.tar
  2. python -m cutegen.tune --import candidates.tar            # needs no compiler and no --shapes

exit codes:
  0    every shape has a winner
  1    some shape has no winner
  2    bad usage: an argument, a shape, a shapes file, a knob
  3    the environment: no GPU, no compiler, an unusable cache, table or database
  130  interrupted; everything measured is stored and the same command continues
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="python -m cutegen.tune",
        description="Find the fastest correct kernel for each problem, and write it to the dispatch table.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_family_argument(parser, "--kernel, --recorded or --import")
    add_problem_arguments(parser, ranges=True)
    parser.add_argument(
        "--recorded",
        type=file_path,
        action="extend",
        nargs="+",
        metavar="FILE",
        help="tune the problems of these recordings of cutegen.record, files of other ranks beside them "
        "included; problems with the most predicted time come first",
    )
    _add_effort(parser)
    _add_measuring(parser)
    _add_files(parser)
    add_json_argument(parser, instead_of="tables")
    add_quiet_argument(parser)
    parser.add_argument(
        "--wide", action="store_true", help="show all columns, and all knobs with their names"
    )
    parser.add_argument("--legend", action=_Legend, help="explain the columns of the tables and exit")
    return parser


class _Legend(argparse.Action):
    """Prints what the columns mean, as ``--help`` prints the options."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        say(LEGEND)
        parser.exit()


def _add_effort(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("effort")
    group.add_argument(
        "--effort",
        choices=EFFORTS,
        default="standard",
        help="how much to try: quick takes seconds per shape, exhaustive takes minutes (default standard)",
    )
    group.add_argument(
        "--budget",
        type=positive_float,
        metavar="SECONDS",
        help="time limit for all shapes together (default: none)",
    )
    group.add_argument(
        "--candidates",
        type=positive_int,
        metavar="N",
        help="compile at most N kernels per shape besides the default config (default by effort: "
        f"{', '.join(str(effort.kernels) for effort in EFFORTS.values())}). Further values of run-time knobs "
        "cost no compilation and do not count. Refinement in measured runs (not of quick effort) then "
        f"compiles up to {2 * Effort().refine} more around the fastest, and a quarter as many again",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=V1,V2",
        help="try only these values of a knob, and the default config; repeatable",
    )
    group.add_argument(
        "--sources",
        type=words,
        default=("cutegen",),
        metavar="S1,S2",
        help=f"providers of kernels: {','.join(SOURCES)} (NVIDIA's Operator API, which needs pip install "
        f"'{EXTRA}'); each may try as many (default cutegen)",
    )
    group.add_argument(
        "--seed",
        type=integer,
        default=0,
        metavar="N",
        help="seed of the random order within rounds (default 0)",
    )
    add_workers_argument(group)
    group.add_argument("--again", action="store_true", help="measure again what is already stored")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="time",
        help="what to minimize: time per launch, energy per launch, or edp, their product (default time). "
        "Energy takes longer to measure",
    )
    group.add_argument(
        "--context",
        choices=CONTEXTS,
        default=DEFAULT_CONTEXT,
        help="what runs before each timed launch: an element-wise kernel that writes the first input, as in "
        "a model (behind); such a kernel that overlaps with its neighbours, as those of cutegen do "
        "(overlapping); a kernel that touches no operand (alone); or the same kernel (back_to_back). Its "
        f"time is subtracted (default {DEFAULT_CONTEXT})",
    )
    add_busy_argument(group)
    group.add_argument("--allow-torch", action="store_true", help="allow torch.mm to win a table entry")
    group.add_argument(
        "--fallback",
        choices=FALLBACKS,
        help="write into the table which calls PyTorch computes: torch (where the kernel is not clearly "
        "faster), expected (where PyTorch was measured or, untuned, is predicted to be faster), measured, or "
        "none (default: keep what the table says)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument(
        "--table",
        type=file_path,
        metavar="FILE",
        help="write the winners to this dispatch table (JSON; default: tables/<gpu name>.json in the cache "
        "folder)",
    )
    group.add_argument(
        "--db",
        type=file_path,
        metavar="FILE",
        help="database of trials (SQLite; default: in the cache folder)",
    )
    add_cache_argument(group, "compiled kernels, tables, trials")
    group.add_argument(
        "--export",
        type=file_path,
        metavar="FILE.tar",
        help="write the compiled candidates to a bundle, to be measured on another machine",
    )
    group.add_argument(
        "--import",
        type=file_path,
        metavar="FILE.tar",
        dest="bundle",
        help="measure the candidates of a bundle; needs no compiler. A bundle is executable code: import "
        "only what you trust",
    )
