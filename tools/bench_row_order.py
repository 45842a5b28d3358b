"""Time kernels over rows in both orders, with and without rows that leave L2 first, in the same rounds.

    python tools/bench_row_order.py --out docs/results/row_order.json

Each problem has its default kernel, whose constants say which rows come first and which leave L2 early; their
values are replaced. The numbers of spaces/row/left_in_l2.py rest on these times.

exit codes: 0 all was measured; 2 bad usage; 3 no GPU; 4 some problems could not be measured
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.device import present_device
from cutegen.space import Config
from tools.benchmark.arguments import add_out_argument
from tools.benchmark.drawn import DrawnRows, add_brief_arguments, add_drawing_arguments, brief_policy
from tools.benchmark.family_child import BARE_ENGINE
from tools.benchmark.results import write_json
from tools.benchmark.row_order_table import AS_CHOSEN, ROW_ORDERS, VARIANTS
from tools.benchmark.side_by_side import SideBySide, compiled

__all__ = ["main", "variants"]

#: Problems of 17 to 1074 MB in all, whose first input is 8 to 537 MB.
PROBLEMS = (
    *(f"rmsnorm {m}x4096 bf16" for m in (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)),
    *(f"softmax {m}x4096 bf16" for m in (2048, 4096, 8192, 16384, 32768)),
    *(f"layernorm {m}x8192 bf16" for m in (1024, 2048, 4096, 8192)),
    "layernorm 32768x4096 fp32",
    "layernorm 4096x32768 bf16",
    "rmsnorm_quantized 8192x4096 bf16",
    "rmsnorm_quantized 16384x4096 bf16",
    *(f"gated {m}x14336 bf16" for m in (256, 512, 768, 1024, 1536, 2048, 3072, 8192)),
    *(f"gated_backward {m}x14336 bf16" for m in (512, 1024, 2048)),
    *(f"activation {m}x14336 bf16" for m in (1024, 2048, 4096)),
    *(f"rope {m}x32x8x128x64x1 bf16" for m in (2048, 4096, 8192, 16384)),
)
_ALL = 2**31 - 1
_HELD = r"^(ROWS_HELD) = \d+"
_PASSING = r"^(PASSING_FROM, PASSING_TO) = \d+, \d+"


def variants(source: Source) -> dict[str, Source]:
    """Return a kernel by what it does: as it chooses, and in every other way that it has."""
    found = {AS_CHOSEN: source}
    for name, (last_first, leaves) in VARIANTS.items():
        text, held = re.subn(_HELD, rf"\1 = {0 if last_first else _ALL}", source.text, flags=re.MULTILINE)
        text, passing = re.subn(_PASSING, rf"\1 = 0, {_ALL if leaves else 0}", text, flags=re.MULTILINE)
        if held and (passing or not leaves):
            found[name] = replace(source, text=text)
    return found


def _usual(problem: Problem, arch: Arch) -> tuple[Config, dict[str, Source]]:
    """Return the default config of a problem, and its kernels by what they do."""
    config = find_space(problem.family, arch).default(problem)
    return config, variants(render(problem, config, arch))


def run(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    device = present_device()
    usual = {
        problem: _usual(problem, device.arch) for problem in map(parse_problem, args.problem or PROBLEMS)
    }
    policy = brief_policy(args)
    found = DrawnRows(ROW_ORDERS, device, args.commit, policy, {})
    with Bench(engine=BARE_ENGINE) as bench:
        bench.start()
        kernels = compiled(
            Store.at(args.cache_dir), chain.from_iterable(sources.values() for _, sources in usual.values())
        )
        side_by_side = SideBySide(bench, device, kernels, policy)
        for problem, (config, sources) in usual.items():
            if found.take(partial(side_by_side.row, problem, config, sources)):
                print(found.rows[-1]["problem"], found.rows[-1]["times"], flush=True)
            write_json(args.out, found.document())
    return EXIT_NO_WINNER if found.failures else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problem", nargs="*", metavar="PROBLEM", help="such as 'softmax 8192x4096 bf16'")
    add_out_argument(parser, required=True)
    add_brief_arguments(parser, round_us=800)
    add_drawing_arguments(parser, rounds=5)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
