"""Tune a family's kernels over a shapes file, then time winners, baselines and peers in the same rounds.

    python tools/bench_family.py rmsnorm --shapes tools/shapes/rmsnorm.toml --out docs/results/rmsnorm.json

For each shape one interleaved run times cutegen's winner, everything that the family names as a baseline, the
peers that know the family, and a copy of as many bytes. What compiles when it is first called is called
beforehand.

    python tools/bench_family.py rmsnorm --shapes F.toml --candidates 12 --cache-dir DIR --compile-for sm_90a
    python tools/bench_family.py rmsnorm --shapes F.toml --candidates 12 --cache-dir DIR --out F.json

With ``--candidates`` as many configs of each shape, those that the family's model puts first or, without a
model, those most like its default, are tried in one set of rounds instead of a search, and all of them are
compiled first; the first of these commands does only that, where there need be no GPU. ``--set`` leaves out
what need not be tried. With ``--candidates 1`` nothing is tuned: defaults are compared. Rows that the results
file holds already stay, with their date, commit and GPU, unless they are measured again; render it with
tools/results_table.py.

With ``--in-place`` the winner, and peers that can, are timed once more with outputs in the place of inputs.

Copies draw less power than GEMMs, so the clock is higher in rounds that have some. ``--copies none`` leaves
them out, and ``--burst-rounds`` adds times in short bursts where the power limit held the clock down.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import Arch, find_arch
from cutegen.build.store import Store, file_digest
from cutegen.cli.args import add_cache_argument, integer, parse_set, positive_float, positive_int
from cutegen.cli.exit_codes import EXIT_NO_WINNER, EXIT_OK, run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, UsageError
from cutegen.families.registry import find_family, find_space, load_families
from cutegen.families.shapes import NamedProblem, read_shapes
from cutegen.family import Problem
from cutegen.measure import Bench, Candidate
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.calibrations import packaged_arch
from cutegen.runtime.kernel_cache import Kernels
from cutegen.search.defaults import default_config
from cutegen.space import Config, Launch
from cutegen.tuning import AutoTuner, Failed, TuneResult
from cutegen.tuning.backends import Backends
from cutegen.tuning.request import EFFORTS
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.compiled import compiled_candidate
from tools.benchmark.environment import check_facts, conditions
from tools.benchmark.family_child import CALL, COPIES, ENGINE, PEERS, call_names, in_place, order
from tools.benchmark.family_rows import joined, row_slice
from tools.benchmark.few_candidates import Compilation, few_candidates
from tools.benchmark.results import FAMILY, write_json
from tools.benchmark.warm_calls import warm_calls

OWN = "cutegen"
DEFAULT = "cutegen default"
#: The winner with its outputs in the place of inputs.
IN_PLACE = "cutegen in place"
#: How ``--candidates`` are tried: all in one set of rounds, which also decides.
FEW = EFFORTS["quick"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parser().parse_args(argv)
    work = run if args.compile_for is None else compile_only
    return run_command(lambda: work(_with_family(args)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", default="", help="such as rmsnorm")
    parser.add_argument(
        "--kernel", type=Path, metavar="FILE.py", help="declaration of a kernel, instead of a family"
    )
    parser.add_argument("--shapes", type=Path, required=True, metavar="FILE.toml")
    add_out_argument(parser)
    parser.add_argument(
        "--candidates",
        type=positive_int,
        metavar="N",
        help="try N configs: the model's first, or most like the default",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=V1,V2",
        help="with --candidates, try only these values, beside the default; repeatable",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="time the winner with outputs in the place of inputs, too"
    )
    parser.add_argument(
        "--compile-for", metavar="ARCH", help="only compile the candidates, for a target such as sm_90a"
    )
    add_cache_argument(parser, "compiled kernels, database and table")
    parser.add_argument(
        "--rows", type=row_slice, default=slice(None), metavar="A:B", help="only these shapes of the file"
    )
    parser.add_argument(
        "--warm", type=integer, default=_processes(), help="processes that call beforehand (%(default)s)"
    )
    parser.add_argument("--peers", default="all", help="all or none")
    parser.add_argument("--budget", type=positive_float, metavar="SECONDS", help="for tuning all shapes")
    add_commit_argument(parser)
    _add_timing_arguments(parser)
    return parser


def _add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how everything is timed."""
    parser.add_argument("--rounds", type=positive_int, default=31, help="interleaved rounds (31)")
    parser.add_argument(
        "--min-rounds", type=positive_int, metavar="N", help="rounds before --precision counts (half of them)"
    )
    parser.add_argument(
        "--precision",
        type=positive_float,
        default=0.002,
        help="after --min-rounds, stop if no interval is wider than this fraction (%(default)s)",
    )
    parser.add_argument(
        "--round-us", type=positive_float, default=6000.0, help="GPU time of each entry in a round (6000)"
    )
    parser.add_argument("--settle", type=positive_float, default=1.0, help="longest burn-in in seconds (1)")
    parser.add_argument(
        "--context",
        choices=CONTEXTS,
        default=DEFAULT_CONTEXT,
        help="launch context of tuning and comparison (%(default)s)",
    )
    parser.add_argument("--copies", choices=("all", "none"), default="all", help="in the rounds (all)")
    parser.add_argument(
        "--burst-rounds",
        type=int,
        default=0,
        metavar="N",
        help="of short bursts, if a power limit held the clock down (%(default)s)",
    )


def _with_family(args: argparse.Namespace) -> argparse.Namespace:
    """Make the kernel of ``--kernel`` known; its name is the family."""
    if bool(args.family) == (args.kernel is not None):
        raise UsageError("give a family, or a declaration with --kernel")
    if args.kernel is not None:
        args.family = load_families(args.kernel)[0].name
    return args


def compile_only(args: argparse.Namespace) -> int:
    """Compile the candidates that :func:`run` tries of the same shapes, and print how many there are."""
    if args.candidates is None or args.cache_dir is None:
        raise UsageError("--compile-for needs --candidates and --cache-dir: how many, and where they go")
    arch = find_arch(args.compile_for)
    plan = _plan(_shapes(args), arch, arch.nominal_sm_count, args)
    compilation = Compilation(Store(args.cache_dir), arch, _pairs(plan))
    compilation.begin()
    good, bad = compilation.finish()
    print(f"{good} kernels for {arch} in {args.cache_dir}, {bad} could not be compiled")
    return EXIT_NO_WINNER if bad else EXIT_OK


#: The configs to try of each problem; None for those that a search finds.
_Plan = Mapping[Problem, Sequence[Config] | None]


def _plan(shapes: Sequence[NamedProblem], arch: Arch, sm_count: int, args: argparse.Namespace) -> _Plan:
    space, count = find_space(shapes[0].problem.family, arch), args.candidates
    problems = [shape.problem for shape in shapes]
    fixed = parse_set(args.set, space, problems[0])
    return {p: None if count is None else few_candidates(space, p, sm_count, count, fixed) for p in problems}


def _pairs(plan: _Plan) -> list[tuple[Problem, Config]]:
    return [(problem, config) for problem, configs in plan.items() for config in configs or ()]


def _shapes(args: argparse.Namespace) -> Sequence[NamedProblem]:
    everything = read_shapes(args.shapes, args.family)
    rows: slice = args.rows
    shapes = everything[rows]
    if not shapes:
        raise UsageError(f"--rows names none of the {len(everything)} shapes of {args.shapes}")
    return shapes


def run(args: argparse.Namespace) -> int:
    """Tune, compare, print and write."""
    if args.in_place and find_family(args.family).repeat == "restore":
        raise UsageError(
            f"{args.family} cannot be timed in place: what it leaves would not stay in its range; valid: a "
            "family whose repeat is bounded"
        )
    if args.set and args.candidates is None:
        raise UsageError("--set needs --candidates: without it the search decides what is tried")
    if args.out is None:
        raise UsageError("--out is missing: give the results file, or --compile-for to compile only")
    device = present_device()
    shapes = _shapes(args)
    everything = read_shapes(args.shapes, args.family)
    policy = Policy(
        rounds=args.rounds,
        min_rounds=min(args.rounds, args.min_rounds or max(7, args.rounds // 2)),
        precision=args.precision,
        round_us=args.round_us,
        settle_s=args.settle,
        context=args.context,
        burst_rounds=args.burst_rounds,
    )
    store = Store.at(args.cache_dir)
    kernels = Kernels(store, build="allow")
    rows: list[dict[str, Json]] = []
    _write(args, device, policy, everything, rows)  # a file that the rows cannot join is refused now
    plan = _plan(shapes, packaged_arch(device), device.sm_count, args)
    compilation = Compilation(store, device.arch, _pairs(plan))
    compilation.begin()
    problems = [shape.problem for shape in shapes]
    warm_calls(problems, args.warm, peers=args.peers != "none", in_place=args.in_place)
    with Bench(engine=ENGINE, timeout_s=120) as bench:  # operands and baselines are made once for all
        bench.start()
        call_names(problems[0])  # both processes import torch at a time
        compilation.finish()
        for shape, choice in zip(shapes, _choices(bench, problems, plan, device, args), strict=True):
            begun = time.monotonic()
            row = _contest(bench, shape, choice, kernels, device, policy, args)
            rows.append(row)
            print(f"{_line(row)}; {time.monotonic() - begun:.1f} s", flush=True)
            _write(args, device, policy, everything, rows)
    return EXIT_OK


@dataclass(frozen=True)
class Choice:
    """What stands for cutegen on a shape.

    Attributes:
        config: Its config.
        how: What its record says of how it was found.
    """

    config: Config
    how: Mapping[str, Json]


def _choices(
    bench: Bench, problems: Sequence[Problem], plan: _Plan, device: Device, args: argparse.Namespace
) -> Iterator[Choice]:
    """Yield the config of each problem: its default if nothing is tuned, else the winner."""
    if args.candidates == 1:
        for problem in problems:
            space = find_space(problem.family, packaged_arch(device))
            yield Choice(default_config(space, problem, device.sm_count), {})
        return
    with AutoTuner(
        device=device,
        cache_dir=args.cache_dir,
        context=args.context,
        effort="standard" if args.candidates is None else FEW,
        backends=Backends(bench=lambda: bench),
    ) as tuner:
        requests = [tuner.request(problem, plan[problem]) for problem in problems]
        for result in tuner.run(requests, args.budget):
            if isinstance(result, Failed):
                raise result.error
            assert isinstance(result, TuneResult)
            yield Choice(result.config, _how(result))


def _how(result: TuneResult) -> Mapping[str, Json]:
    return {
        "tuning_s": round(result.seconds, 2),
        "candidates": result.candidates,
        "outcomes": dict(result.outcomes),
        "failed": list(result.failed),
        "tried": {str(row.config): round(row.timing.median_us, 3) for row in result.rows if row.timing},
    }


def _contest(
    bench: Bench,
    shape: NamedProblem,
    choice: Choice,
    kernels: Kernels,
    device: Device,
    policy: Policy,
    args: argparse.Namespace,
) -> dict[str, Json]:
    """Return the record of one shape."""
    problem = shape.problem
    if bench.opened != problem:  # an answer that the database knew opened nothing
        bench.open(problem)
    entrants = dict(_entrants(problem, choice.config, kernels, device, args))
    failures: dict[str, Json] = {}
    for name in entrants.keys() & {OWN, DEFAULT}:
        checked = bench.check(entrants[name], repeats=1)
        if not checked.ok:
            raise CutegenError(f"{name} on {problem}: {checked.error}")
    run = bench.time(list(entrants.values()), policy, [each.name for each in entrants.values()])
    shown = {candidate.name: name for name, candidate in entrants.items()}
    timings = {shown[name]: timing for name, timing in run.items()}
    failures.update((shown[name], failure.error) for name, failure in run.failures.items())
    own = timings[OWN]
    entries: dict[str, Json] = {name: _entry(problem, timing, own) for name, timing in timings.items()}
    return {
        "name": shape.name,
        "problem": str(problem),
        "bytes": problem.min_bytes,
        **({"flops": problem.flops} if find_family(problem.family).metric == "TFLOP/s" else {}),
        "config": str(choice.config),
        **choice.how,
        "reference": run.reference.reference,
        "rounds": run.rounds,
        "entries": entries,
        "failures": failures,
    }


def _entrants(
    problem: Problem, chosen: Config, kernels: Kernels, device: Device, args: argparse.Namespace
) -> Iterator[tuple[str, Candidate]]:
    """Yield everything to time, by its name in the results."""
    space = find_space(problem.family, packaged_arch(device))
    default = default_config(space, problem, device.sm_count)
    configs = {OWN: chosen, **({DEFAULT: default} if default != chosen else {})}
    for name, config in configs.items():
        yield name, compiled_candidate(kernels, device, name, problem, config)
    if args.in_place:
        yield IN_PLACE, in_place(compiled_candidate(kernels, device, IN_PLACE, problem, chosen))
    for name in call_names(problem, peers=args.peers != "none", in_place=args.in_place):
        if args.copies == "all" or name not in COPIES:
            yield name, call_candidate(problem, name)


def call_candidate(problem: Problem, name: str) -> Candidate:
    """Return the call of a baseline, peer or copy; a baseline may have a name that means the reference."""
    return Candidate(f"call of {name}", Path(CALL), order(problem, name), Launch((), 0), problem)


def _entry(problem: Problem, timing: Timing, own: Timing) -> Json:
    """Return one entry: its time, bytes per second, and its time over cutegen's, also in bursts."""
    mine, others = own.steady_us or own.median_us, timing.steady_us or timing.median_us
    bursts: dict[str, Json] = {}
    if own.burst_us and timing.burst_us:
        over = round(timing.burst_us / own.burst_us, 4)
        bursts = {"burst_us": round(timing.burst_us, 3), "burst_over_cutegen": over}
    return {
        "median_us": round(timing.median_us, 3),
        "low_us": round(timing.low_us, 3),
        "high_us": round(timing.high_us, 3),
        "gb_per_s": round(problem.min_bytes / timing.median_us / 1e3, 1),
        "over_cutegen": round(others / mine, 4),
        **bursts,
    }


def _line(row: Mapping[str, Any]) -> str:
    entries = row["entries"]
    words = [
        f"{name} {entry['median_us']:.2f} ({entry['over_cutegen']:.3f})" for name, entry in entries.items()
    ]
    return f"{row['name']}: {', '.join(words)}" + (f"; failed: {row['failures']}" if row["failures"] else "")


def _write(
    args: argparse.Namespace,
    device: Device,
    policy: Policy,
    shapes: Sequence[NamedProblem],
    rows: Sequence[Mapping[str, Json]],
) -> None:
    names: list[Json] = [shape.name for shape in shapes]
    about = {"file": args.shapes.name, "sha256": file_digest(args.shapes), "names": names}
    facts: dict[str, Any] = {
        **check_facts(FAMILY, device, args.commit),
        "family": args.family,
        "conditions": conditions(device, policy, shapes=about),
        "peers": sorted(PEERS),
    }
    if args.copies != "all":
        facts["conditions"]["copies"] = args.copies
    if args.candidates is not None:
        screening = Policy.quick(context=args.context).to_json()
        strategy = find_family(args.family).strategy(device.arch)
        which = "most_like_default" if strategy is None else "first_of_model"
        facts["conditions"]["tuning"] = {which: args.candidates, "policy": screening}
        if args.set:
            facts["conditions"]["tuning"]["set"] = args.set
    order = [shape.name for shape in shapes]
    write_json(args.out, {**facts, "rows": joined(args.out, facts, order, rows)})


def _processes() -> int:
    """Return in how many processes calls are made beforehand: each imports torch and compiles."""
    return max(1, min(12, len(os.sched_getaffinity(0)) - 2))


if __name__ == "__main__":
    sys.exit(main())
