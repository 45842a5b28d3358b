"""``python -m cutegen.shrink``: reduce a family's space to a few configs by what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext

from cutegen.arch import find_arch
from cutegen.build.store import file_digest
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
    load_given_families,
    named_problems,
    positive_float,
    positive_int,
)
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.cli.progress_display import make_display
from cutegen.cli.wrapped_text import Column, columns, line_width, say, say_json
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.families.registry import find_space
from cutegen.families.shapes import NamedProblem
from cutegen.measure.device import Device, present_device
from cutegen.records.trials import TrialStore
from cutegen.search.defaults import strategy_of
from cutegen.search.short_list import DEFAULT, MOST
from cutegen.system.publish import require_place
from cutegen.tuning.backends import Backends
from cutegen.tuning.setting import Setting
from cutegen.tuning.shrink_run import ShrinkRun
from cutegen.tuning.shrinking import Shrunk, read_results, shrink, write_list

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m cutegen.shrink softmax --shapes tools/shapes/softmax.toml            # measures what is missing
  python -m cutegen.shrink activation --shapes tools/shapes/activation.toml --arch sm_90a \\
      --results docs/results/activation.json                                       # needs no GPU
  python -m cutegen.shrink rope --shapes my.toml --out short_list.json

Times come from --results, then from the trial database, then from the GPU. As short_list.json beside a
family's spaces the list is tried first in every search, and provides the default of untuned problems whose
sizes are like those of a measured shape. GEMMs have a performance model instead. More: docs/tuning.md.

exit codes:
  0    there is a list
  2    bad usage, or some shape was not measured
  3    the environment: no GPU and no --arch, no compiler, an unusable cache or database
  130  interrupted; everything measured is stored and the same command continues
"""


def main(
    argv: Sequence[str] | None = None, *, device: Device | None = None, backends: Backends | None = None
) -> int:
    """Run the command and return its exit code; tests give a GPU and what to use instead of it."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args, device, backends))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m cutegen.shrink",
        description="Reduce the space of a family to the few configs that its shapes need.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_family_argument(parser)
    add_problem_arguments(parser)
    parser.add_argument(
        "--results",
        type=file_path,
        nargs="+",
        default=[],
        metavar="FILE.json",
        help="results files of tools/bench_family.py; later ones override",
    )
    parser.add_argument(
        "--most",
        type=positive_int,
        default=MOST,
        metavar="N",
        help=f"maximum length of the list, including the default (default {MOST})",
    )
    parser.add_argument(
        "--kernels",
        type=positive_int,
        default=24,
        metavar="N",
        help="configs to time on each shape (default 24)",
    )
    parser.add_argument(
        "--budget", type=positive_float, metavar="SECONDS", help="start no shape later (default: no limit)"
    )
    parser.add_argument("--out", type=file_path, metavar="FILE", help="write the list to this file")
    parser.add_argument(
        "--db", type=file_path, metavar="FILE", help="database of trials (default: in the cache folder)"
    )
    add_cache_argument(parser, "kernels, trials")
    add_workers_argument(parser)
    add_busy_argument(parser)
    add_json_argument(parser)
    add_quiet_argument(parser)
    return parser


def _run(args: argparse.Namespace, device: Device | None, backends: Backends | None) -> int:
    load_given_families(args)
    if not 2 <= args.most <= MOST:
        raise UsageError(f"--most {args.most} is not possible; valid: 2 to {MOST}, the default counted")
    if args.kernels < 2:
        raise UsageError("--kernels 1 leaves nothing to choose; valid: 2 and more")
    shapes = named_problems(args)
    if args.out is not None:
        require_place(args.out, "short list")  # measuring comes first, and may take hours
    if args.arch is None:
        device = device or present_device()
    arch = device.arch if device is not None else find_arch(args.arch)
    if strategy_of(find_space(args.family, arch)) is not None:
        raise UsageError(
            f"configs of {args.family} on {arch} are chosen by its performance model, not from a list; "
            "shrink is for families without one"
        )
    setting = Setting.of(
        arch,
        device,
        cache_dir=args.cache_dir,
        db=args.db,
        workers=args.workers,
        busy=args.busy,
        backends=backends,
    )
    found, sources = _shrunk(args, setting, shapes)
    if args.out is not None:
        made_of: dict[str, Json] = {"sources": sources}
        if args.shapes is not None:
            made_of["shapes"] = {"file": args.shapes.name, "sha256": file_digest(args.shapes)}
        write_list(args.out, arch, args.family, found, made_of)
    _report(args, found, shapes)
    return EXIT_OK


def _shrunk(
    args: argparse.Namespace, setting: Setting, shapes: Sequence[NamedProblem]
) -> tuple[Shrunk, list[Json]]:
    """Return the list, and what it is made of."""
    results = [read_results(path) for path in args.results]
    sources: list[Json] = [made for _, made in results]
    gpus = {str(made["gpu"]) for _, made in results} | ({setting.device.name} if setting.device else set())
    if len(gpus) > 1:
        raise UsageError(
            f"--results are of {' and '.join(sorted(gpus))}; times of one kind of GPU are wanted"
        )
    there = setting.device is not None or setting.db.exists()
    with (
        TrialStore(setting.db, read_only=setting.device is None) if there else nullcontext() as trials,
        make_display(args.quiet) as display,
    ):
        display.begin("shrink", 1, 1)
        run = ShrinkRun(
            setting, trials, [times for times, _ in results], kernels=args.kernels, observe=display.show
        )
        times = run.times([shape.problem for shape in shapes], args.budget)
        display.hide()
    if run.recorded:
        sources.append({"trials": run.recorded, "gpu": ", ".join(sorted(gpus)) or run.gpu})
    return shrink(times, args.most), sources


def _report(args: argparse.Namespace, found: Shrunk, shapes: Sequence[NamedProblem]) -> None:
    configs = [DEFAULT, *map(str, found.configs)]
    mean, worst = found.mean, found.worst
    if args.json:
        rows: list[Json] = [
            {
                "name": shape.name,
                "problem": str(each.problem),
                "choice": str(each.choice or DEFAULT),
                "best": str(each.best),
                "regret": each.regret,
                "default_regret": each.default_regret,
                "timed": each.timed,
            }
            for shape, each in zip(shapes, found.shapes, strict=True)
        ]
        say_json({"configs": list(configs), "shapes": rows, "regret": mean[0], "default_regret": mean[1]})
        return
    table = [
        Column("shape", [shape.name for shape in shapes], left=True),
        Column("timed", [str(each.timed) for each in found.shapes], drop=1),
        Column("default", [f"{100 * each.default_regret:.1f} %" for each in found.shapes]),
        Column("list", [f"{100 * each.regret:.1f} %" for each in found.shapes]),
        Column("config", [str(each.choice or DEFAULT) for each in found.shapes], left=True),
    ]
    for line in columns(table, line_width()):
        say(line)
    say(
        f"{_count(configs)} {100 * mean[0]:.1f} % longer than the best of each shape in the "
        f"geometric mean, {100 * worst[0]:.1f} % at most; the default alone {100 * mean[1]:.1f} %, "
        f"{100 * worst[1]:.1f} % at most"
    )
    for config in configs:
        say(f"  {config}")
    if args.out is not None:
        say(f"written: {args.out}")


def _count(configs: Sequence[str]) -> str:
    return f"{len(configs)} configs take" if len(configs) > 1 else "the default takes"
