"""Compare the GEMM performance model with a results file: how far predictions can be trusted.

For each measured shape: what the model predicts for the config that won on the GPU, and what for the best of
the candidates that a run without a GPU would compile. The summary ships with the package, so that tables of
predictions can say what their differences are worth.

    python tools/model_accuracy.py            # print
    python tools/model_accuracy.py --write    # write cutegen/families/gemm/perf_model/accuracy.json
    python tools/model_accuracy.py --check    # exit 1 if that file does not follow from the results file
    python tools/model_accuracy.py --check --every 3    # the same, looking at every third shape

The file also holds what was found of each shape, from which the rest follows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.cli.args import positive_int
from cutegen.families.gemm.perf_model.accuracy import FILE, Accuracy
from cutegen.families.registry import find_space
from cutegen.search.defaults import default_of_algorithm, predictor
from cutegen.search.strategies import rank
from cutegen.space import Config
from cutegen.tuning import Effort
from tools.benchmark.results import OWN, Results, ShapeResult

RESULTS = Path("docs/results/gemm_dev.json")
ARCH = "sm_90a"
#: Of a shape: what :func:`compare` returns.
_Row: TypeAlias = tuple[int, float, float]


def compare(row: ShapeResult, sm_count: int) -> _Row:
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


def measure(results: Results, every: int = 1) -> list[_Row]:
    """Return what :func:`compare` says of the measured shapes, or of one in so many."""
    facts: Any = results.conditions["gpu"]
    return [compare(row, facts["sm_count"]) for row in _measured(results)[::every]]


def summary(results: Results, rows: Sequence[_Row]) -> Accuracy:
    """Return what the shapes of a results file say about the model."""
    facts: Any = results.conditions["gpu"]
    return Accuracy(
        arch=ARCH,
        gpu=facts["name"],
        results=RESULTS.name,
        shapes=len(rows),
        first=sum(at == 1 for at, _, _ in rows),
        median_rank=statistics.median(at for at, _, _ in rows),
        worst_rank=max(at for at, _, _ in rows),
        slack=sorted(slack for _, slack, _ in rows)[int(0.9 * (len(rows) - 1))],
        error=statistics.median(abs(ratio - 1) for _, _, ratio in rows),
    )


def document(results: Results, rows: Sequence[_Row]) -> str:
    """Return the text of the file."""
    facts = asdict(summary(results, rows))
    return json.dumps({**facts, "rows": [list(row) for row in rows]}, indent=1) + "\n"


def follows(results: Results, every: int) -> bool:
    """Return whether the file is what the results say, as far as one in so many shapes shows."""
    text = FILE.read_text(encoding="utf-8")
    rows = [(at, slack, ratio) for at, slack, ratio in json.loads(text)["rows"]]
    complete = len(rows) == len(_measured(results)) and text == document(results, rows)
    return complete and rows[::every] == measure(results, every)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--every", type=positive_int, default=1, metavar="N", help="one shape in so many (1)")
    args = parser.parse_args(argv)
    results = Results.load(Path(__file__).parent.parent / RESULTS)
    if args.check:
        return int(not follows(results, args.every))
    rows = measure(results)
    print(summary(results, rows))
    if args.write:
        FILE.write_text(document(results, rows), encoding="utf-8")
    return 0


def _measured(results: Results) -> list[ShapeResult]:
    return [row for row in results.shapes if row.timing(OWN)]


if __name__ == "__main__":
    sys.exit(main())
