"""Measure cutegen's tuned kernels against torch.mm, QuACK, NVIDIA's Operator API and copies, interleaved.

For every shape: cutegen's kernel is the one that its dispatch table names (tune first, with
``python -m cutegen.tune gemm --shapes FILE --table TABLE``), QuACK's the one that its own autotuner finds,
the Operator API's the fastest of all its operators. All are checked against fp64, then timed with
torch.mm in the same rounds: CUDA graphs, operands rotated past the L2 cache, uniform random data, settled
clocks; behind an element-wise kernel that writes A, and once more back to back. Where m is at most 16, copies
that move as many bytes run in these rounds too and show what memory gives. Results are added to --out shape
by shape; the same command again measures those that are missing.

    python tools/bench_gemm.py --table TABLE --dry-run
    python tools/bench_gemm.py --table TABLE --out RESULTS.json --stop-after 480   # and again for the rest
    python tools/bench_gemm.py --table TABLE --out NEXT.json --reuse RESULTS.json  # no tuning of peers

QuACK's tuning takes 5 to 70 s per shape, 8 minutes for the default list, most of it timing on the GPU:
``--quack-timed-calls 40`` shortens that for large shapes, ``--peers operators`` leaves QuACK out, ``--reuse``
runs what an earlier file says it chose. With ``--peers cublaslt`` the best of all algorithms that cuBLASLt
offers competes, not only the one that torch.mm takes. A peer that fails or takes longer than --peer-budget is
recorded with its error, and the others go on.

exit codes: 0 every shape is there, cutegen right on all; 1 some shape is missing or failed (run again);
2 bad usage; 3 no GPU, or an unusable file; 130 interrupted (what was measured is kept)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.cli.args import add_cache_argument, positive_float, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.digest import Json
from cutegen.errors import CutegenError, DeviceError, UsageError
from cutegen.families.shapes import NamedProblem, read_shapes
from cutegen.family import Problem
from cutegen.measure import Bench
from cutegen.measure.context import BACK_TO_BACK, CONTEXTS, DEFAULT_CONTEXT
from cutegen.measure.device import Device, present_device
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.bandwidth import Copy
from tools.benchmark.child import ENGINE
from tools.benchmark.contest import Contestant, UnsupportedError, run_contest
from tools.benchmark.environment import ROOT, session, software
from tools.benchmark.lineup import (
    PEERS,
    conditions,
    final_policies,
    make_contestants,
    set_environment,
    taking_part,
)
from tools.benchmark.max_autotune import MaxAutotune
from tools.benchmark.operators import Operators
from tools.benchmark.ours import Ours
from tools.benchmark.quack import Quack
from tools.benchmark.results import OWN, Results, ShapeResult, differences
from tools.benchmark.vendor import Vendor

#: What a dry run without a GPU plans for. Source: NVIDIA H200, as its driver reports it.
ASSUMED = Device("NVIDIA H200", (9, 0), 132, 62_914_560, 150_754_820_096, "unknown", "13.0", "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = parse(argv)
    return run_command(lambda: dry_run(args) if args.dry_run else run(args))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = parser.add_argument_group("what and where")
    files.add_argument(
        "--shapes", type=Path, default=ROOT / "tools/shapes/gemm_dev.toml", metavar="FILE.toml"
    )
    files.add_argument("--only", default="", metavar="ID,ID", help="these shapes of the file")
    files.add_argument("--table", type=Path, metavar="FILE", help="dispatch table (default: the cache's)")
    add_cache_argument(files, "compiled kernels")
    add_out_argument(files, "results file, begun or continued")
    files.add_argument("--fresh", action="store_true", help="begin --out anew")
    files.add_argument(
        "--tuned", type=Path, metavar="FILE", help="what cutegen.tune --json printed: its seconds"
    )
    add_commit_argument(files)
    files.add_argument("--device", type=int, default=0, help="GPU, as CUDA counts (default 0)")
    _add_peers(parser)
    _add_timing(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list what would be measured")
    args = parser.parse_args(argv)
    if args.out is None and not args.dry_run:
        parser.error("--out FILE.json is needed; results are kept there")
    return args


def _add_peers(parser: argparse.ArgumentParser) -> None:
    peers = parser.add_argument_group("peers")
    peers.add_argument("--peers", default=",".join(PEERS), help=f"some of {', '.join(PEERS)}, or none")
    peers.add_argument(
        "--peer-budget",
        type=positive_float,
        default=120.0,
        metavar="SECONDS",
        help="longest time for one step on one shape, such as QuACK's tuning (default 120)",
    )
    peers.add_argument(
        "--reuse", type=Path, metavar="FILE.json", help="results whose choices of peers to run"
    )
    peers.add_argument(
        "--quack-split-k",
        choices=("default", "tune"),
        default="default",
        help="tune: let its autotuner split k too, as its users must ask for (default: 1, as they get it)",
    )
    peers.add_argument(
        "--quack-timed-calls",
        type=positive_int,
        default=0,
        metavar="N",
        help="calls its autotuner times per config (default: its own 200)",
    )
    peers.add_argument(
        "--workers", type=positive_int, metavar="N", help="compilations at a time, QuACK's too"
    )


def _add_timing(parser: argparse.ArgumentParser) -> None:
    timing = parser.add_argument_group("timing")
    timing.add_argument(
        "--context",
        default=f"{DEFAULT_CONTEXT},{BACK_TO_BACK}",
        metavar="C1,C2",
        help=f"launch contexts, some of {', '.join(CONTEXTS)}: the first counts, the others are shown beside "
        "it (default %(default)s)",
    )
    timing.add_argument("--rounds", type=positive_int, default=61, help="most rounds per shape (default 61)")
    timing.add_argument("--min-rounds", type=positive_int, default=15, help="fewest (default 15)")
    timing.add_argument(
        "--settle", type=positive_float, default=3.0, metavar="SECONDS", help="longest burn-in"
    )
    timing.add_argument("--seed", type=int, default=0, help="of values and of the order within rounds")
    timing.add_argument(
        "--stop-after", type=positive_float, metavar="SECONDS", help="begin no shape after that"
    )
    timing.add_argument(
        "--retry-failed", action="store_true", help="measure again the shapes where one failed"
    )


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and return the exit code."""
    started = time.monotonic()
    device = present_device(args.device)
    shapes = chosen_shapes(args)
    contestants = make_contestants(args, device)
    results = open_results(args, conditions(args, device, contestants))
    todo = [s for s in shapes if not covers(results, s, contestants, retry=args.retry_failed)]
    names = ", ".join(contestant.name for contestant in contestants)
    print(f"{len(shapes)} shapes, {len(shapes) - len(todo)} of them in {args.out} already; {names}")
    if todo:
        set_environment(args)
        results = results.begin(session(vars(args), device, args.commit))
        results = measure(args, todo, contestants, results, started)
    return verdict(shapes, contestants, results, args.out)


def covers(results: Results, shape: NamedProblem, contestants: Sequence[Contestant], *, retry: bool) -> bool:
    """Whether the results hold everyone who takes part on ``shape``."""
    names = [contestant.name for contestant in taking_part(contestants, shape.problem)]
    return results.covers(shape.name, shape.problem, names, retry=retry)


def measure(
    args: argparse.Namespace,
    todo: Sequence[NamedProblem],
    contestants: Sequence[Contestant],
    results: Results,
    started: float,
) -> Results:
    """Run a contest on each shape and save after each."""
    policy, *further = final_policies(args)
    with make_bench(args) as bench:
        bench.start()  # imports torch while the peers compile
        absent = prepare(contestants, [shape.problem for shape in todo])
        for at, shape in enumerate(todo):
            if args.stop_after and time.monotonic() - started > args.stop_after:
                print(f"stopped after {args.stop_after:g} s; {len(todo) - at} shapes are left, run again")
                break
            present = taking_part(contestants, shape.problem)
            try:
                row = run_contest(
                    bench, shape, present, policy, seed=args.seed, absent=absent, further=further
                )
            except CutegenError as error:
                print(f"{shape.name}: {shape.problem}: failed: {error}", file=sys.stderr)
                continue
            results = results.with_shape(row)
            results.save(args.out)
            print(line(row), flush=True)
    return results


def make_bench(args: argparse.Namespace) -> Bench:
    """Return the measuring child of the contest."""
    return Bench(timeout_s=args.peer_budget, device=args.device, engine=ENGINE, search_path=[ROOT])


def prepare(contestants: Sequence[Contestant], problems: Sequence[Problem]) -> dict[str, CutegenError]:
    """Let all get ready; return those that cannot take part, with the reason."""
    absent: dict[str, CutegenError] = {}
    for contestant in contestants:
        try:
            contestant.prepare(problems)
        except CutegenError as error:
            print(f"{contestant.name} does not take part: {error}", file=sys.stderr)
            absent[contestant.name] = error
    return absent


def chosen_shapes(args: argparse.Namespace) -> tuple[NamedProblem, ...]:
    """Return the shapes to measure.

    Raises:
        UsageError: --only names one that the file lacks.
    """
    shapes = read_shapes(args.shapes)
    wanted = [name for name in args.only.split(",") if name]
    missing = sorted(set(wanted) - {shape.name for shape in shapes})
    if missing:
        raise UsageError(f"{args.shapes} has no shape {', '.join(missing)}")
    return tuple(shape for shape in shapes if not wanted or shape.name in wanted)


def open_results(args: argparse.Namespace, present: Mapping[str, Json]) -> Results:
    """Return the results to continue, or new ones.

    Raises:
        UsageError: The file was measured under other conditions; the message names them.
    """
    if args.fresh or not args.out.exists():
        return Results(present)
    results = Results.load(args.out)
    different = list(differences(results.conditions, present))
    if different:
        lines = "\n".join(f"  {sentence}" for sentence in different)
        raise UsageError(
            f"{args.out} was measured under other conditions; take another --out, or --fresh\n{lines}"
        )
    return results


def verdict(
    shapes: Sequence[NamedProblem], contestants: Sequence[Contestant], results: Results, out: Path
) -> int:
    """Say what is missing or failed and return the exit code."""
    rows = {shape.name: shape for shape in results.shapes}
    missing = [shape.name for shape in shapes if not covers(results, shape, contestants, retry=False)]
    wrong = [s.name for s in shapes if s.name in rows and not rows[s.name].entries[OWN].ok]
    if missing:
        print(f"missing: {', '.join(missing)}; the same command continues")
    if wrong:
        print(f"cutegen failed on: {', '.join(wrong)}")
    print(f"results are in {out}; render them with tools/results_table.py")
    return 1 if missing or wrong else 0


def line(row: ShapeResult) -> str:
    """Return what was found on one shape, in one line."""
    words = [f"{row.name} {row.problem}: {row.reference.reference} {row.reference.median_us:.2f} us"]
    for name, entry in row.entries.items():
        timing = entry.timing
        if timing is None or timing.ratio is None:
            words.append(f"{name} {entry.outcome}: {entry.error.splitlines()[0] if entry.error else ''}")
        else:
            tuned = "" if entry.tuning_s is None else f", {entry.tuning_s:.1f} s"
            others = (f"{context} {r:.3f}" for context in row.contexts if (r := _ratio(row, name, context)))
            words.append(f"{name} {', '.join([f'{timing.ratio:.3f}', *others])} ({entry.config}{tuned})")
    return "; ".join([*words, f"{row.seconds:.1f} s"])


def _ratio(row: ShapeResult, name: str, context: str) -> float | None:
    timing = row.timing(name, context)
    return None if timing is None else timing.ratio


def dry_run(args: argparse.Namespace) -> int:
    """List what would be measured; needs no GPU."""
    try:
        device = present_device(args.device)
        print(f"GPU: {device.name}, driver {device.driver_version}")
    except DeviceError as error:
        device = ASSUMED
        print(f"GPU: none here ({error}); planning for {device.name}")
    print(json.dumps(software(), indent=1))
    print(f"policies: {json.dumps([policy.to_json() for policy in final_policies(args)])}")
    contestants = make_contestants(args, device, measured=device is not ASSUMED)
    for shape in chosen_shapes(args):
        print(f"{shape.name}: {shape.problem}: {'; '.join(plans(contestants, shape.problem))}")
    return 0


def plans(contestants: Sequence[Contestant], problem: Problem) -> Iterator[str]:
    """Yield what each contestant would do with a problem."""
    for contestant in contestants:
        if isinstance(contestant, Ours):
            yield f"cutegen {contestant.plan(problem)}"
        elif isinstance(contestant, Quack | Operators):
            known = contestant.knows(problem)
            yield f"{contestant.name} {'as in the earlier results' if known else 'tunes'}"
        elif isinstance(contestant, Vendor | MaxAutotune):
            yield f"{contestant.name} {_tries(contestant, problem)}"
        elif isinstance(contestant, Copy) and contestant.concerns(problem):
            yield f"copy of {problem.min_bytes} bytes"


def _tries(contestant: Vendor | MaxAutotune, problem: Problem) -> str:
    """Return whether a library that chooses for itself takes part in a problem."""
    try:
        contestant.require(problem)
    except UnsupportedError as error:
        return f"is left out: {error}"
    return "tries all that it offers"


if __name__ == "__main__":
    sys.exit(main())
