"""Check random (problem, config) pairs on the GPU: tails, dtypes, layouts, batches, epilogues, every knob.

Each pair is compiled, run on poisoned outputs, compared with an fp64 reference on the problem and on an odd
tail, and repeated for equal bits, as every candidate of a tuning run is, only more often.

    python tools/walk_kernels.py --pairs 300 --repeats 20 --seed 1 --out results/walk.json

The file is written after each dtype; a walk that is stopped has lost the dtype that it was at.

exit codes: 0 all right; 1 some pair is wrong; 2 bad usage; 3 no usable GPU, or no compiler
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.cli.args import add_cache_argument, positive_int
from cutegen.cli.exit_codes import run_command
from cutegen.errors import UsageError
from cutegen.families.gemm.problem import BLOCK_SCALED, BLOCK_SCALED_FAMILY, OUT_DTYPES, Problem
from cutegen.families.registry import find_space
from cutegen.measure import Bench, Candidate
from cutegen.measure.device import Device, present_device
from cutegen.space import Config, Space
from tools.benchmark.arguments import add_commit_argument, add_out_argument
from tools.benchmark.environment import check_facts
from tools.benchmark.kernel_store import kernel_store
from tools.benchmark.results import write_json
from tools.bringup_parts.random_problems import random_pairs

Pair = tuple[Problem, Config]


def check_pairs(
    pairs: Sequence[Pair], device: Device, builder: Builder, bench: Bench, repeats: int | None = None
) -> list[dict[str, Any]]:
    """Return one record per pair, in order: outcome, error, whether a tail was run, whether bits repeated.

    Kernels are checked while others compile.
    """
    places: dict[Source, list[int]] = {}
    for place, (problem, config) in enumerate(pairs):
        places.setdefault(render(problem, config, device.arch), []).append(place)
    records: list[dict[str, Any]] = [{"problem": str(p), "config": str(c)} for p, c in pairs]
    for source, result in builder.build(list(places)):
        for place in places[source]:
            if isinstance(result, Artifact):
                records[place] |= _check(pairs[place], result, device, bench, repeats)
            else:
                records[place] |= {"outcome": "build_failed", "error": result.message}
    return records


def _check(
    pair: Pair, artifact: Artifact, device: Device, bench: Bench, repeats: int | None
) -> dict[str, Any]:
    problem, config = pair
    space = find_space(problem.family, device.arch)
    bench.open(problem)
    candidate = Candidate.of(
        "kernel", artifact.shared_object, artifact.symbol, space, config, problem, device.sm_count
    )
    result = bench.check(candidate, repeats)
    verdicts = [verdict for verdict in (result.verdict, result.tail) if verdict is not None]
    return {
        "outcome": result.outcome,
        "error": result.error,
        "tail": result.tail is not None,
        "same_bits": all(verdict.deterministic for verdict in verdicts),
    }


def dtypes_of(space: Space) -> list[str]:
    """Return the types of operands that a space has kernels for."""
    known = BLOCK_SCALED if space.family == BLOCK_SCALED_FAMILY else OUT_DTYPES
    problems = (Problem(64, 64, 64, ab_dtype=dtype, family=space.family) for dtype in known)
    return [problem.ab_dtype for problem in problems if not space.explain(problem, {})]


def _by_dtype(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return, per type of the operands, how many pairs ended how, and how many repeated their bits."""
    table: dict[str, Counter[str]] = {}
    for record in records:
        row = table.setdefault(Problem.parse(record["problem"]).ab_dtype, Counter())
        row[record["outcome"]] += 1
        row["same_bits"] += bool(record.get("same_bits"))
    return {dtype: dict(row) for dtype, row in table.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    options = parse(arguments)
    return run_command(lambda: run(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=positive_int, default=300, help="pairs of each dtype")
    parser.add_argument("--dtypes", help="of the operands, with commas; default: all that the GPU has")
    parser.add_argument("--repeats", type=int, help="further runs that must give the same bits")
    parser.add_argument("--seed", type=int, default=1)
    add_cache_argument(parser, "compiled kernels", default="a temporary folder")
    add_out_argument(parser)
    add_commit_argument(parser)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Walk, print, write the file, and return the exit code.

    Raises:
        DeviceError: There is no GPU.
        UsageError: There is no such dtype, or not for this GPU.
    """
    device = present_device()
    space = find_space("gemm", device.arch)
    known = dtypes_of(space)
    dtypes = options.dtypes.split(",") if options.dtypes else known
    unknown = [dtype for dtype in dtypes if dtype not in known]
    if unknown:
        raise UsageError(f"--dtypes {','.join(unknown)}: not for {device.arch}; valid: {', '.join(known)}")
    records: list[dict[str, Any]] = []
    with kernel_store(options.cache_dir) as store, Builder(store) as builder, Bench() as bench:
        for dtype in dtypes:
            pairs = list(random_pairs(space, options.seed, options.pairs, dtypes=(dtype,)))
            found = check_pairs(pairs, device, builder, bench, options.repeats)
            _tell(dtype, found)
            records += found
            if options.out is not None:
                _write(options, device, records)
    return 0 if {record["outcome"] for record in records} == {"ok"} else 1


def _tell(dtype: str, records: Sequence[dict[str, Any]]) -> None:
    for record in records:
        if record["outcome"] != "ok":
            print(f"{record['outcome']}: {record['problem']} | {record['config']}: {record['error']}")
    outcomes = Counter(record["outcome"] for record in records)
    print(f"{dtype}: {len(records)} pairs: {dict(outcomes)}", flush=True)


def _write(options: argparse.Namespace, device: Device, records: Sequence[dict[str, Any]]) -> None:
    """Write what was walked so far: dtypes that are in the file are complete."""
    summary = {
        **check_facts("random walk", device, options.commit),
        "seed": options.seed,
        "repeats": options.repeats,
        "outcomes": _by_dtype(records),
        "pairs": list(records),
    }
    write_json(options.out, summary)


if __name__ == "__main__":
    raise SystemExit(main())
