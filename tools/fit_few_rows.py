"""Fit the model of the kernels for few rows to measured times, and say how far it is from them.

python tools/fit_few_rows.py            # fit and print, with the error on each problem left out of the fit
python tools/fit_few_rows.py --write    # write cutegen/families/gemm/perf_model/few_rows.json
python tools/fit_few_rows.py --check    # exit 1 if that file does not follow from the results file

Measured are 1, 4 and 8 rows; 2 rows, k below 2048, fp16, batches, clusters and epilogues are not.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.families.gemm.perf_model.few_rows import FILE, Constants, FewRowsEstimator
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_spaces
from cutegen.space import Config, as_integer

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "few_rows.json"
ARCH, SM_COUNT = find_arch("sm_90a"), 132
#: Where the search begins: device memory's rate, counted instructions, a few tenths of a microsecond each.
_START = Constants(2.0, 0.5, 4.6e6, 0.5, 0.5, 2.0, 4.0, 4.0, 4.0, 1e7, 0.5, 0.1, 3.0)
_STEPS = 2500
_FAST = 3
"""Weight of a kernel: its share of the fastest one's speed, to this power; what is slow may be far off."""
_MOST_ROWS = 4
_BEYOND = 0.15
"""Weight of what has more rows than the space allows: it only shows what rows cost."""


class Time(NamedTuple):
    """A kernel's time.

    Attributes:
        problem: What it computed.
        config: Its knobs.
        us: Microseconds of a launch.
        weight: In the fit.
        registers: Of one thread.
    """

    problem: Problem
    config: Config
    us: float
    weight: float
    registers: int


def measured() -> list[Time]:
    """Return the times of the kernels for few rows."""
    found, space = [], find_spaces("gemm", ARCH)[1]
    for row in _rows():
        problem = Problem.parse(row["problem"])
        weight = _BEYOND if problem.m > _MOST_ROWS else 1.0
        fastest = min(row["few_rows"].values())
        for words, us in row["few_rows"].items():
            config = Config.parse(f"algorithm=few_rows {words}")
            registers = as_integer(space.derive(config, problem, ARCH)["registers"])
            found.append(Time(problem, config, us, weight * (fastest / us) ** _FAST, registers))
    return found


def predicted(constants: Constants, time: Time) -> float:
    """Return what the model says of a kernel."""
    return FewRowsEstimator(time.problem, ARCH, SM_COUNT, constants).time_us(time.config, time.registers)


def error(constants: Constants, times: Sequence[Time]) -> float:
    """Return the weighted root mean square of the logarithms of predicted over measured."""
    squares = [t.weight * math.log(predicted(constants, t) / t.us) ** 2 for t in times]
    return math.sqrt(math.fsum(squares) / math.fsum(t.weight for t in times))


def fit(times: Sequence[Time], steps: int = _STEPS) -> Constants:
    """Return the constants of least error that a random walk with ever smaller steps comes to."""
    rng, best, step = random.Random(0), _START, 0.3
    least = error(best, times)
    for _ in range(steps):
        changed = {
            name: value * math.exp(rng.gauss(0, step)) if rng.random() < 0.35 else value
            for name, value in asdict(best).items()
        }
        found = error(replace(best, **changed), times)
        if found < least:
            best, least = replace(best, **changed), found
        else:
            step = max(0.01, step * 0.99)
    return replace(best, **{name: float(f"{value:.3g}") for name, value in asdict(best).items()})


def left_out(times: Sequence[Time]) -> dict[str, float]:
    """Return the error on each problem when the others alone are fitted."""
    found = {}
    for problem in dict.fromkeys(t.problem for t in times if t.weight > _BEYOND):
        rest = fit([t for t in times if t.problem != problem], _STEPS // 2)
        found[str(problem)] = round(error(rest, [t for t in times if t.problem == problem]), 3)
    return found


def document() -> str:
    """Return the text of the file."""
    times = measured()
    constants = fit(times)
    found = {
        "arch": ARCH.name,
        "gpu": "NVIDIA H200",
        "results": RESULTS.name,
        "kernels": len(times),
        "error": round(error(constants, times), 3),
        "error_left_out": left_out(times),
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


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["problems"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
