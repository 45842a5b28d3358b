"""Compare the GEMM performance model with a results file: how far predictions can be trusted.

For each measured shape: what the model predicts for the config that won on the GPU, and what for the best of
the candidates that a run without a GPU would compile. The summary ships with the package, so that tables of
predictions can say what their differences are worth.

    python tools/model_accuracy.py            # print
    python tools/model_accuracy.py --write    # write cutegen/families/gemm/perf_model/accuracy.json
    python tools/model_accuracy.py --check    # exit 1 if that file does not follow from the results file
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.accuracy import FILE, Accuracy
from cutegen.families.registry import find_space
from cutegen.search.defaults import default_of_algorithm, predictor
from cutegen.search.strategies import rank
from cutegen.space import Config
from cutegen.tuning import Effort
from tools.benchmark.results import OWN, Results, ShapeResult

RESULTS = Path("docs/results/gemm_dev.json")
ARCH = "sm_90a"


def compare(row: ShapeResult, sm_count: int) -> tuple[int, float, float]:
    """Return the rank of the measured winner, how much slower it is predicted, and predicted by measured."""
    problem, space = row.problem, find_space("gemm", find_arch(ARCH))
    predict = predictor(space, problem, sm_count)
    entry, timing = row.entries[OWN], row.timing(OWN)
    assert predict is not None and timing is not None
    winner = Config.from_json({knob: entry.choice[knob] for knob in space.domains})
    default = default_of_algorithm(space, problem, sm_count)
    tried = rank(space, problem, sm_count, Effort().classes, default=default)
    times = sorted(found for config in tried if (found := predict(config)) is not None)
    own = predict(winner)
    assert own is not None
    return 1 + sum(time < own for time in times), own / times[0] - 1, own / timing.median_us


def measure(path: Path) -> Accuracy:
    """Return what the shapes of a results file say about the model."""
    results = Results.load(path)
    facts: Any = results.conditions["gpu"]
    rows = [compare(row, facts["sm_count"]) for row in results.shapes if row.timing(OWN)]
    return Accuracy(
        arch=ARCH,
        gpu=facts["name"],
        results=path.name,
        shapes=len(rows),
        first=sum(at == 1 for at, _, _ in rows),
        median_rank=statistics.median(at for at, _, _ in rows),
        worst_rank=max(at for at, _, _ in rows),
        slack=sorted(slack for _, slack, _ in rows)[int(0.9 * (len(rows) - 1))],
        error=statistics.median(abs(ratio - 1) for _, _, ratio in rows),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    found = measure(Path(__file__).parent.parent / RESULTS)
    text = json.dumps(asdict(found), indent=1) + "\n"
    print(f"{found}\n{text}", end="")
    if args.write:
        FILE.write_text(text, encoding="utf-8")
    return int(args.check and text != FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
