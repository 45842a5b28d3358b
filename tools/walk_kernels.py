"""Check random (problem, config) pairs on the GPU: tails, dtypes, layouts, batches, epilogues, every knob.

Each pair is compiled, run on poisoned outputs, compared with an fp64 reference on the problem and on an odd
tail, and repeated for equal bits, as every candidate of a tuning run is, only more often.

    python tools/walk_kernels.py --pairs 300 --repeats 20 --seed 1 --out results/walk.json

exit codes: 0 all right; 1 some pair is wrong; 3 no usable GPU
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cutegen.build import Artifact, Builder
from cutegen.catalog import find_space
from cutegen.device import Device, present_device
from cutegen.errors import DeviceError
from cutegen.measure import Bench, Candidate
from cutegen.problem import Problem
from cutegen.render import render
from cutegen.space import Config
from cutegen.store import Store
from tests.walk import DTYPES, random_pairs
from tools.benchmark.environment import git_commit, session_facts, software

Pair = tuple[Problem, Config]


def check_pairs(
    pairs: Sequence[Pair], device: Device, folder: Path, repeats: int | None = None
) -> list[dict[str, Any]]:
    """Return one record per pair, in order: outcome, error, whether a tail was run, whether bits repeated."""
    space = find_space("gemm", device.arch)
    sources = [render(problem, config, device.arch) for problem, config in pairs]
    with Builder(Store(folder)) as builder:
        built = {source.digest: result for source, result in builder.build(list(dict.fromkeys(sources)))}
    records = []
    with Bench() as bench:
        for number, ((problem, config), source) in enumerate(zip(pairs, sources, strict=True)):
            record: dict[str, Any] = {"problem": str(problem), "config": str(config)}
            artifact = built[source.digest]
            if not isinstance(artifact, Artifact):
                record |= {"outcome": "build_failed", "error": artifact.message}
            else:
                bench.open(problem)
                candidate = Candidate.of(
                    f"pair{number}",
                    artifact.library,
                    artifact.symbol,
                    space,
                    config,
                    problem,
                    device.sm_count,
                )
                result = bench.check(candidate, repeats)
                verdicts = [verdict for verdict in (result.verdict, result.tail) if verdict is not None]
                record |= {
                    "outcome": result.outcome,
                    "error": result.error,
                    "tail": result.tail is not None,
                    "same_bits": all(verdict.deterministic for verdict in verdicts),
                }
            records.append(record)
    return records


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=300, help="pairs of each dtype")
    parser.add_argument("--dtypes", default=",".join(dict.fromkeys(DTYPES)), help="of the operands")
    parser.add_argument("--repeats", type=int, help="further runs that must give the same bits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--commit", default="", help="commit to record where git is not at hand")
    options = parser.parse_args(arguments)
    try:
        device = present_device()
    except DeviceError as error:
        print(f"walk_kernels: {error}", file=sys.stderr)
        return 3
    space = find_space("gemm", device.arch)
    pairs = [
        pair
        for dtype in options.dtypes.split(",")
        for pair in random_pairs(space, options.seed, options.pairs, dtypes=(dtype,))
    ]
    with tempfile.TemporaryDirectory() as folder:
        records = check_pairs(pairs, device, Path(folder), options.repeats)
    outcomes = Counter(record["outcome"] for record in records)
    for record in records:
        if record["outcome"] != "ok":
            print(f"{record['outcome']}: {record['problem']} | {record['config']}: {record['error']}")
    print(f"{len(records)} pairs: {dict(outcomes)}")
    if options.out is not None:
        summary = {
            "kind": "random walk",
            "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": options.commit or git_commit(),
            "gpu": device.name,
            "software": software(),
            "machine": session_facts(device),
            "seed": options.seed,
            "repeats": options.repeats,
            "outcomes": _by_dtype(records),
            "pairs": records,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0 if set(outcomes) == {"ok"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
