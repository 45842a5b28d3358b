"""Time the winners of several dispatch tables against each other, in one run.

Tuning twice rarely names the same config twice, since many are equally fast; what matters is whether those
named are. Every problem that all tables name is measured: each table's config is compiled, checked and timed
in the same interleaved rounds, also where two tables name the same one; where power limits the clock, in
bursts too. Two are tied if cutegen's own tuner would call them tied.

    python tools/compare_tables.py --table tuned=A.json --table imported=B.json --out docs/results/bundle.json

exit codes: 0 every winner is as fast as the first table's or faster; 1 some is slower, or failed; 2 bad
usage; 3 no usable GPU, or no compiler; 130 interrupted (the shapes that were finished are kept)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.build.render import render
from cutegen.build.store import Store, file_digest
from cutegen.cli.args import add_cache_argument, add_workers_argument, positive_float, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.digest import Json
from cutegen.errors import UsageError
from cutegen.families.registry import space_of
from cutegen.families.shapes import NamedProblem, read_shapes
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.context import CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import Device, present_device
from cutegen.measure.policy import Policy
from cutegen.records.entry import Fingerprint
from cutegen.records.table import Table
from cutegen.space import Config
from tools.benchmark import tables_table
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.contest import run_contest
from tools.benchmark.environment import conditions, session
from tools.benchmark.fixed import Absent, Fixed, build, fixed
from tools.benchmark.ours import read_tuning_seconds
from tools.benchmark.results import TABLES, Results

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table",
        action="append",
        required=True,
        metavar="NAME=FILE.json",
        help="a dispatch table and what to call it; the first is what others are compared with",
    )
    parser.add_argument(
        "--tuned",
        action="append",
        default=[],
        metavar="NAME=FILE.json",
        help="what cutegen.tune --json printed when it wrote that table: has the seconds of tuning",
    )
    parser.add_argument(
        "--shapes", type=Path, metavar="FILE.toml", help="names of problems; only these are measured"
    )
    add_out_argument(parser, required=True)
    add_commit_argument(parser)
    add_cache_argument(parser, "compiled kernels")
    add_workers_argument(parser)
    parser.add_argument("--device", type=int, default=0, help="GPU, as CUDA counts (default 0)")
    parser.add_argument("--rounds", type=positive_int, default=15, help="interleaved rounds (default 15)")
    parser.add_argument(
        "--settle", type=positive_float, default=3.0, metavar="SECONDS", help="longest burn-in"
    )
    parser.add_argument(
        "--context", choices=CONTEXTS, default=DEFAULT_CONTEXT, help="launch context (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of values and of the order within rounds")
    return parser.parse_args(argv)


def policy_of(args: argparse.Namespace) -> Policy:
    """Return how everything is timed."""
    common = Policy(rounds=args.rounds, min_rounds=args.rounds, settle_s=args.settle, seed=args.seed)
    return replace(common, context=args.context, burst_rounds=Policy.final().burst_rounds)


def make_bench(args: argparse.Namespace) -> Bench:
    """Return the measuring child."""
    return Bench(device=args.device)


def read_tables(words: Sequence[str], device: Device) -> dict[str, tuple[Path, Table]]:
    """Return the tables by name.

    Raises:
        UsageError: A word is no NAME=FILE, a name comes twice, or there is one table only.
        TableError: A table cannot be read, or is for another GPU or toolchain.
    """
    tables: dict[str, tuple[Path, Table]] = {}
    for word in words:
        name, _, file = word.partition("=")
        if not name or not file or name in tables:
            raise UsageError(f"--table {word!r} must be NAME=FILE.json, with a name of its own")
        table = Table.load(Path(file))
        table.require(Fingerprint.of(device))
        tables[name] = Path(file), table
    if len(tables) < 2:
        raise UsageError("--table must be given twice or more; there is nothing to compare one table with")
    return tables


def read_seconds(words: Sequence[str], tables: Collection[str]) -> dict[str, dict[Problem, float]]:
    """Return the seconds that tuning took, by table and problem.

    Raises:
        UsageError: A word is no NAME=FILE of a table, or a file is no document of cutegen.tune.
    """
    found = {}
    for word in words:
        name, _, file = word.partition("=")
        if name not in tables or not file:
            raise UsageError(f"--tuned {word!r} must be NAME=FILE.json, with the name of a --table")
        found[name] = read_tuning_seconds(Path(file))
    return found


def common_problems(tables: Mapping[str, Table], shapes: Path | None) -> list[NamedProblem]:
    """Return what all tables name a kernel for, as far as ``shapes`` names it too.

    Raises:
        UsageError: Nothing is left.
        ShapesError: The shapes cannot be read.
    """
    shared = set.intersection(*({p for p, e in t.entries.items() if e.config} for t in tables.values()))
    if shapes is None:
        named = [NamedProblem(str(problem), problem) for problem in sorted(shared, key=str)]
    else:
        named = [item for item in read_shapes(shapes) if item.problem in shared]
    if not named:
        raise UsageError(f"no problem is in all of {', '.join(tables)}, so there is nothing to compare")
    return named


def winners(tables: Mapping[str, Table], problem: Problem) -> dict[str, Config]:
    """Return the config that each table names for a problem that all of them have."""
    found = {name: table.entries[problem].config for name, table in tables.items()}
    return {name: config for name, config in found.items() if config is not None}


def _entrants(
    configs: Mapping[NamedProblem, Mapping[str, Config]], device: Device, args: argparse.Namespace
) -> dict[NamedProblem, list[Fixed | Absent]]:
    """Compile the configs that tables name for each problem, and return what competes there."""
    store = Store.at(args.cache_dir)
    sources = {
        (item.problem, config): render(item.problem, config, device.arch)
        for item, found in configs.items()
        for config in found.values()
    }
    built = build(store, list(sources.values()), args.workers)
    return {
        item: [
            fixed(
                name,
                space_of(config, item.problem.family, device.arch),
                config,
                built[sources[item.problem, config].digest],
                device.sm_count,
            )
            for name, config in found.items()
        ]
        for item, found in configs.items()
    }


def run(args: argparse.Namespace) -> int:
    """Compile, check and measure; return the exit code.

    Raises:
        UsageError: As raised by :func:`read_tables` and :func:`common_problems`.
        DeviceError: There is no GPU.
    """
    device = present_device(args.device)
    files = read_tables(args.table, device)
    tables = {name: table for name, (_, table) in files.items()}
    seconds = read_seconds(args.tuned, tables)
    named = common_problems(tables, args.shapes)
    digests: dict[str, Json] = {name: file_digest(path) for name, (path, _) in files.items()}
    shapes: dict[str, Json] = {"names": [item.name for item in named]}
    facts = conditions(device, policy_of(args), tables=digests, shapes=shapes)
    results = Results(facts, kind=TABLES)
    names = {name: path.name for name, (path, _) in files.items()}
    results = results.begin(
        session({**vars(args), "table": names, "tuned": sorted(seconds)}, device, args.commit)
    )
    configs = {item: winners(tables, item.problem) for item in named}
    with make_bench(args) as bench:
        bench.start()  # imports torch while the kernels compile
        for item, entrants in _entrants(configs, device, args).items():
            row = run_contest(bench, item, entrants, policy_of(args), seed=args.seed)
            timed = {
                name: replace(entry, tuning_s=seconds.get(name, {}).get(item.problem))
                for name, entry in row.entries.items()
            }
            row = replace(row, entries=timed)
            results = results.with_shape(row)
            results.save(args.out)
            print("; ".join(f"{name}: {entry.config}" for name, entry in row.entries.items()))
    print("\n".join(tables_table.summary(results)))
    print(f"results are in {args.out}; render them with tools/results_table.py")
    return 1 if any(tables_table.slower(row) for row in results.shapes) else 0


if __name__ == "__main__":
    sys.exit(main())
