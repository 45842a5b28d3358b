"""Measure which knobs change the energy of a GEMM: the best config with one knob changed at a time.

For every shape the base is the config that the dispatch table names (tune first, with ``python -m
cutegen.tune gemm --shape 8192x8192x8192``), else the default. Each variation is compiled, checked against
fp64, timed in the same interleaved rounds as the base and torch.mm, and then run alone, twice in opposite
order, while NVML's energy counter is read from edge to edge. ``tools/results_table.py`` renders the file.

    python tools/bench_energy.py --dry-run
    python tools/bench_energy.py --out docs/results/energy.json
    python tools/bench_energy.py --vary cluster_shape_mn --vary tile_shape_mn=128x256 --out RESULTS.json

exit codes: 0 everything was measured; 1 some variation failed; 2 bad usage; 3 no GPU, or one that hides its
energy; 130 interrupted (the shapes that were finished are kept)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build import Artifact
from cutegen.build.render import Source, render
from cutegen.build.store import Store, file_digest
from cutegen.cli.args import (
    add_cache_argument,
    add_problem_arguments,
    add_workers_argument,
    named_problems,
    parse_set,
    positive_float,
    positive_int,
)
from cutegen.cli.exit_codes import run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, DeviceError, UsageError
from cutegen.families.registry import find_space, space_of
from cutegen.families.shapes import NamedProblem
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.records.entry import Fingerprint
from cutegen.records.paths import default_table_path
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import look_up
from cutegen.search.defaults import default_config
from cutegen.space import Config, Space, Value
from tools.bench_gemm import ASSUMED
from tools.benchmark import energy_table, environment
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.contest import run_contest
from tools.benchmark.environment import session
from tools.benchmark.fixed import Absent, Fixed, build, fixed
from tools.benchmark.ours import short_config
from tools.benchmark.results import ENERGY, OWN, Results
from tools.benchmark.variations import coarse_values, complete_base, variations

#: Knobs that are varied unless others are asked for; the number of stages is derived, not a knob.
KNOBS = (
    *("tile_shape_mn", "tile_k", "mma_warpgroups", "pingpong", "cluster_shape_mn", "swap_ab"),
    *("use_tma_store", "use_pdl", "stream_k", "swizzle_size", "raster_along_m"),
)
DEFAULT_SHAPE = "8192x8192x8192"


@dataclass(frozen=True)
class Plan:
    """What is measured on one shape: configs by name, the base first."""

    named: NamedProblem
    space: Space
    configs: Mapping[str, Config]

    def source(self, name: str) -> Source:
        """Return the rendered kernel of a config."""
        return render(self.named.problem, self.configs[name], self.space.arch)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: dry_run(args) if args.dry_run else run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(family="gemm")
    add_problem_arguments(parser)
    group = parser.add_argument_group("what is varied")
    group.add_argument(
        "--base", nargs="+", default=[], metavar="KNOB=VALUE", help="changes of the config to start from"
    )
    group.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KNOB[=V1,V2]",
        help=f"knobs to change; repeatable (default: {', '.join(KNOBS)})",
    )
    group.add_argument(
        "--most", type=positive_int, default=48, help="variations per shape, at most (default 48)"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--table", type=Path, metavar="FILE", help="dispatch table (default: the cache's)")
    add_cache_argument(files, "compiled kernels")
    add_out_argument(files, "results file; it is begun anew")
    add_commit_argument(files)
    add_workers_argument(files)
    timing = parser.add_argument_group("measuring")
    timing.add_argument("--device", type=int, default=0, help="GPU, as CUDA counts (default 0)")
    timing.add_argument(
        "--energy-seconds",
        type=positive_float,
        default=0.5,
        metavar="SECONDS",
        help="of each of two (default 0.5)",
    )
    timing.add_argument("--rounds", type=positive_int, default=15, help="interleaved rounds (default 15)")
    timing.add_argument(
        "--settle", type=positive_float, default=3.0, metavar="SECONDS", help="longest burn-in"
    )
    timing.add_argument("--seed", type=int, default=0, help="of values and of the order within rounds")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be measured")
    args = parser.parse_args(argv)
    if not args.shape and args.shapes is None:
        args.shape = [DEFAULT_SHAPE]
    if args.arch is not None:
        parser.error("--arch: energy is measured on the GPU here")
    if args.out is None and not args.dry_run:
        parser.error("--out FILE.json is needed; results are kept there")
    return args


def policy_of(args: argparse.Namespace) -> Policy:
    """Return how everything is timed: the energy of all entries in isolation."""
    return Policy(
        rounds=args.rounds,
        min_rounds=args.rounds,
        settle_s=args.settle,
        seed=args.seed,
        objective="energy",
        energy_s=args.energy_seconds,
    )


def make_bench(args: argparse.Namespace) -> Bench:
    """Return the measuring child."""
    return Bench(device=args.device, timeout_s=30.0 + 2 * args.energy_seconds)


def make_plans(args: argparse.Namespace, device: Device) -> list[Plan]:
    """Return what is to be measured, without compiling anything.

    Raises:
        UsageError: A knob, a value or a file does not exist.
        ConfigError: The base is not valid.
        TableError: The table is for another GPU or toolchain.
    """
    table = _table(args, device)
    plans = []
    for named in named_problems(args):
        space = find_space(named.problem.family, device.arch)
        answer = look_up(table, named.problem, space, device.sm_count)
        start = answer.config or (answer.entry.config if answer.entry else None)
        start = start or default_config(space, named.problem, device.sm_count)
        space = space_of(start, named.problem.family, device.arch)
        changes = {k: v[0] for k, v in parse_set(args.base, space, named.problem).items()}
        base = complete_base(space, named.problem, start, changes)
        found = list(variations(space, named.problem, base, _wanted(args, space, named.problem)).items())
        if len(found) > args.most:
            raise UsageError(
                f"{len(found)} variations of {named.problem} are more than --most {args.most}; name values "
                "with --vary KNOB=V1,V2, or allow more"
            )
        plans.append(Plan(named, space, {OWN: base, **dict(found)}))
    return plans


def _wanted(args: argparse.Namespace, space: Space, problem: Problem) -> dict[str, Sequence[Value]]:
    """Return the knobs to vary with their values."""
    if not args.vary:
        return {knob: coarse_values(space, knob) for knob in KNOBS if knob in space.domains}
    found: dict[str, Sequence[Value]] = {}
    for word in args.vary:
        knob = word.partition("=")[0]
        if knob not in space.domains:
            raise UsageError(f"--vary names unknown knob {knob!r}; valid: {', '.join(space.domains)}")
        given = parse_set([word], space, problem)[knob] if "=" in word else coarse_values(space, knob)
        found[knob] = (*found.get(knob, ()), *given)
    return found


def _table_path(args: argparse.Namespace, device: Device) -> Path:
    path: Path = args.table or default_table_path(_store(args).root, device)
    return path


def _table(args: argparse.Namespace, device: Device) -> Table | None:
    path = _table_path(args, device)
    if not path.exists():
        if args.table:
            raise UsageError(f"dispatch table {path} does not exist; write it with cutegen.tune --table")
        return None
    table = Table.load(path)
    if device is not ASSUMED:
        table.require(Fingerprint.of(device))
    return table


def _store(args: argparse.Namespace) -> Store:
    return Store.at(args.cache_dir)


def run(args: argparse.Namespace) -> int:
    """Compile, check and measure; return the exit code.

    Raises:
        DeviceError: There is no GPU, or it hides its energy.
    """
    device = present_device(args.device)
    plans = make_plans(args, device)
    results = Results(conditions(args, device), kind=ENERGY).begin(session(vars(args), device, args.commit))
    with make_bench(args) as bench:
        bench.start()  # imports torch while the kernels compile
        built = build(
            _store(args), [plan.source(name) for plan in plans for name in plan.configs], args.workers
        )
        for plan in plans:
            row = run_contest(
                bench, plan.named, _entrants(plan, built, device), policy_of(args), seed=args.seed
            )
            if row.reference.energy is None:
                raise DeviceError(f"the energy counter of {device.name} cannot be read or does not change")
            results = results.with_shape(row)
            results.save(args.out)
    print("\n".join(energy_table.summary(results)))
    print(f"results are in {args.out}; render them with tools/results_table.py")
    return 0 if all(entry.ok for row in results.shapes for entry in row.entries.values()) else 1


def _entrants(
    plan: Plan, built: Mapping[str, Artifact | CutegenError], device: Device
) -> list[Fixed | Absent]:
    return [
        fixed(name, plan.space, config, built[plan.source(name).digest], device.sm_count)
        for name, config in plan.configs.items()
    ]


def conditions(args: argparse.Namespace, device: Device) -> dict[str, Json]:
    """Return what decides the numbers."""
    path = _table_path(args, device)
    return environment.conditions(
        device,
        policy_of(args),
        table=file_digest(path) if path.exists() else "",
        shapes={"names": [named.name for named in named_problems(args)]},
    )


def dry_run(args: argparse.Namespace) -> int:
    """List what would be measured; needs no GPU."""
    try:
        device = present_device(args.device)
    except DeviceError as error:
        device = ASSUMED
        print(f"GPU: none here ({error}); planning for {device.name}")
    for plan in make_plans(args, device):
        kernels = {plan.source(name).digest for name in plan.configs}
        entries = len(plan.configs) + 1
        seconds = args.settle + entries * (
            2 * args.energy_seconds + args.rounds * policy_of(args).round_us / 1e6
        )
        print(f"{plan.named.name}: {plan.named.problem}: base {short_config(plan.space, plan.configs[OWN])}")
        print(f"{entries} entries, {len(kernels)} kernels, {seconds:.0f} s or more on the GPU")
        for name in plan.configs:
            print(f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
