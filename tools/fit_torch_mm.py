"""Fit the expected time of ``torch.mm`` to results files, and say how far it is from them.

python tools/fit_torch_mm.py            # fit and print, with the error on widths left out of the fit
python tools/fit_torch_mm.py --write    # write cutegen/families/gemm/perf_model/torch_mm.json
python tools/fit_torch_mm.py --check    # exit 1 if that file does not follow from the results files
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.families.gemm.perf_model.torch_mm import FILE, Constants
from cutegen.families.gemm.problem import Problem
from tools.benchmark.results import Results

FOLDER = Path(__file__).parent.parent / "docs" / "results"
CONTESTS = ("gemm_dev.json",)
SWEEPS = ("unseen_m.json",)
ARCH, SM_COUNT = "sm_90a", 132
#: Where the search begins: an H200's datasheet, less a fifth, and a few microseconds.
_START = Constants(3.0, 3.9e6, 7.9e8, 0.5, 0.1, 4.0, 2.0)
_STEPS = 600

Times = Mapping[tuple[int, int, int], float]


def measured() -> Times:
    """Return microseconds by m, n and k of every bf16 product of the results files."""
    found: dict[tuple[int, int, int], float] = {}
    for name in CONTESTS:
        for row in Results.load(FOLDER / name).shapes:
            problem = row.problem
            if isinstance(problem, Problem) and problem.ab_dtype == problem.out_dtype and problem.batch == 1:
                found[problem.m, problem.n, problem.k] = row.reference.median_us
    for name in SWEEPS:
        for row in json.loads((FOLDER / name).read_text(encoding="utf-8"))["rows"]:
            found[row["m"], row["n"], row["k"]] = row["torch_mm_us"]
    return found


def error(constants: Constants, times: Times) -> float:
    """Return the root mean square of the logarithms of predicted over measured."""
    logs = [math.log(constants.time_us(*size, SM_COUNT) / took) for size, took in times.items()]
    return math.sqrt(math.fsum(x * x for x in logs) / len(logs))


def fit(times: Times) -> Constants:
    """Return the constants of least error that a random walk with ever smaller steps comes to."""
    rng, best, step = random.Random(0), _START, 0.3
    least = error(best, times)
    for _ in range(_STEPS):
        changed = {
            name: value * math.exp(rng.gauss(0, step)) if rng.random() < 0.4 else value
            for name, value in asdict(best).items()
        }
        found = error(replace(best, **changed), times)
        if found < least:
            best, least = replace(best, **changed), found
        else:
            step = max(0.02, step * 0.99)
    return replace(best, **{name: float(f"{value:.4g}") for name, value in asdict(best).items()})


def error_elsewhere(times: Times) -> float:
    """Return the error at the (n, k) of the sweeps, each predicted from all others."""
    kinds = {size[1:] for size in times if sum(size[1:] == other[1:] for other in times) > 1}
    squares = []
    for kind in sorted(kinds):
        inside = {size: took for size, took in times.items() if size[1:] == kind}
        rest = {size: took for size, took in times.items() if size[1:] != kind}
        squares += [error(fit(rest), inside) ** 2] * len(inside)
    return math.sqrt(math.fsum(squares) / len(squares))


def document() -> str:
    """Return the text of the file."""
    times = measured()
    constants = fit(times)
    found = {
        "arch": ARCH,
        "gpu": "NVIDIA H200",
        "results": [*CONTESTS, *SWEEPS],
        "products": len(times),
        "error": round(error(constants, times), 3),
        "error_elsewhere": round(error_elsewhere(times), 3),
        "constants": asdict(constants),
    }
    return json.dumps(found, indent=1) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    text = document()
    print(text, end="")
    if args.write:
        FILE.write_text(text, encoding="utf-8")
    return int(args.check and text != FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
