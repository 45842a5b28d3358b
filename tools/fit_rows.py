"""Fit what kernels over rows are expected to take to measured times, and say how good their choices are.

    python tools/fit_rows.py softmax                 # the terms, and what is chosen with them
    python tools/fit_rows.py softmax --leave-out 5   # and for problems that were left out of the fit

Times are those of ``tests/data/tried_on_h200.json.xz`` and of what tools/bench_untuned_families.py wrote, in
``docs/results/untuned_rows*.json``. The terms that are printed belong into ``spaces/FAMILY/space.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import lzma
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.cli.args import positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.errors import UsageError
from cutegen.families.registry import find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure.statistics import geometric_mean
from cutegen.space import Config, Space
from cutegen.space.space import Derived
from spaces.row.defaults import loaded
from spaces.row.expected import Terms, expected_us

ROOT = Path(__file__).resolve().parent.parent
ARCH = find_arch("sm_90a")
TRIED = ROOT / "tests" / "data" / "tried_on_h200.json.xz"
FAMILIES = ("cross_entropy", "layernorm", "rmsnorm_quantized", "softmax")
#: Where the search begins: a latency of memory, and tenths of a microsecond.
START = Terms(0.4, 0.8, 0.5, 0.3, 0.05, 0.1, 0.1, 0.8, 0.03, 2.5, 17.0, 1.15, 0.5, 3.0)
#: Registers are not searched: without values, for each, for weights, and where CTAs share a row. Source:
#: ptxas, the kernels of which the times are.
_REGISTERS = {
    "softmax": (13.0, 1.14, 0.5, 3.0),
    "rmsnorm_quantized": (17.2, 1.18, 0.5, 2.8),
    "layernorm": (17.0, 1.6, 1.0, 6.0),
    "cross_entropy": (26.0, 1.24, 0.5, 4.0),
}
_STEPS = 3000
_LEVEL = 0.02
"""Weight of an error that all configs of a problem share, which does not change the choice."""
_CHOICE = 2.0
"""Weight of what the choices lose."""
_LEAST_OVERLAP = 1.3
"""Below it times would add up, which they do not."""


class Kernel(NamedTuple):
    """A config, what follows from it, and its microseconds."""

    config: Config
    derived: Derived
    loaded: tuple[int, int, int]
    us: float


class Timed(NamedTuple):
    """A problem and its kernels."""

    problem: Problem
    kernels: tuple[Kernel, ...]


@cache
def measured(family: str) -> tuple[Timed, ...]:
    """Return the times of a family, of configs that are valid today.

    Records without all times are older than kernels of rows of two warps that take few barriers: those are
    left out.
    """
    rows = [
        {**row, "before": True} for row in json.loads(lzma.decompress(TRIED.read_bytes()))[family]["rows"]
    ]
    for path in sorted((ROOT / "docs" / "results").glob("untuned_rows*.json")):
        rows += [
            {**row, "before": "times" not in row, "tried": row.get("times") or _pair(row)}
            for row in json.loads(path.read_text())["rows"]
        ]
    space, found = find_space(family, ARCH), []
    for row in rows:
        if row["problem"].split()[0] != family:
            continue
        problem = parse_problem(row["problem"])
        times = {Config.parse(text): us for text, us in row["tried"].items()}
        times = {config: us for config, us in times.items() if _is_legal(space, problem, config)}
        if row["before"]:
            times = {config: us for config, us in times.items() if config["threads_per_row"] != 64}
        # Launches overlap as the default has them; the others differ from it in that alone.
        starts = [config["pdl"] for config in times]
        usual = max(set(starts), key=starts.count, default="early")
        times = {config: us for config, us in times.items() if config["pdl"] == usual}
        kernels = tuple(
            Kernel(config, space.derive(config, problem, ARCH), loaded(problem, config), us)
            for config, us in times.items()
        )
        if len(kernels) > 1:
            found.append(Timed(problem, kernels))
    return tuple(found)


def _is_legal(space: Space, problem: Problem, config: Config) -> bool:
    """Return whether a config is one of today; those whose rows come through a ring follow from no terms."""
    known = all(value in space.domains.get(knob, ()) for knob, value in config.items())
    return known and config["row_in"] != "ring" and not space.explain(problem, config)


def _pair(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of the two configs that an older record names."""
    return {row["best"]: row["best_us"], row["default"]: row["default_us"]}


def expected(terms: Terms, problem: Problem, kernel: Kernel) -> float:
    """Return the microseconds that a kernel is expected to take."""
    return expected_us(kernel.config, problem, kernel.derived, kernel.loaded, ARCH, terms)


def error(terms: Terms, timed: Sequence[Timed]) -> float:
    """Return how far expectations are from times, and how much longer the choices take than the best."""
    total = 0.0
    for problem, kernels in timed:
        logs = [math.log(expected(terms, problem, kernel) / kernel.us) for kernel in kernels]
        mean = sum(logs) / len(logs)
        total += sum((one - mean) ** 2 for one in logs) / len(logs) + _LEVEL * mean**2
    return total / len(timed) + _CHOICE * (1 - geometric_mean(ratios(terms, timed)))


def ratios(terms: Terms, timed: Sequence[Timed]) -> list[float]:
    """Return for each problem the best time over that of the config that ``terms`` choose."""
    found = []
    for problem, kernels in timed:
        choice = min(kernels, key=lambda kernel: expected(terms, problem, kernel))
        found.append(min(kernel.us for kernel in kernels) / choice.us)
    return found


def fitted(timed: Sequence[Timed], steps: int = _STEPS) -> Terms:
    """Return the terms of a family that a random walk finds, the same for the same times."""
    chance = random.Random(7)
    known = _REGISTERS[timed[0].problem.family]
    best = Terms(*[*astuple(START)[: -len(known)], *known])
    least = error(best, timed)
    for step in range(steps):
        width = 0.35 * 0.6 ** (5 * step // steps)
        free = astuple(best)[: -len(known)]
        some = [v * math.exp(chance.gauss(0, width)) if chance.random() < 0.4 else v for v in free]
        terms = Terms(*[*some, *known])
        if terms.overlap < _LEAST_OVERLAP or (now := error(terms, timed)) >= least:
            continue
        best, least = terms, now
    return best


def shipped(family: str) -> Terms:
    """Return the terms that the space of a family has."""
    module = importlib.import_module(f"spaces.{family}.space")
    found: Terms = module.TERMS
    return found


def _says(timed: Sequence[Timed], found: Sequence[float]) -> str:
    worst = sorted(zip(found, (str(each.problem) for each in timed), strict=True))[:4]
    return f"{geometric_mean(found):.4f} of the best in {len(found)}; worst " + ", ".join(
        f"{ratio:.3f} {problem}" for ratio, problem in worst
    )


def run(args: argparse.Namespace) -> int:
    """Fit and print."""
    if args.family not in FAMILIES:
        raise UsageError(f"family {args.family!r} has no such terms; valid: {', '.join(FAMILIES)}")
    timed = measured(args.family)
    print(f"now {args.family}: {_says(timed, ratios(shipped(args.family), timed))}")
    terms = fitted(timed, args.steps)
    print(", ".join(f"{field.name}={getattr(terms, field.name):.3g}" for field in fields(Terms)))
    print(f"{args.family}: {_says(timed, ratios(terms, timed))}")
    if args.leave_out:
        order = list(timed)
        random.Random(1).shuffle(order)
        parts = [order[at :: args.leave_out] for at in range(args.leave_out)]
        left = [
            ratio
            for part in parts
            for ratio in ratios(fitted([each for each in order if each not in part], args.steps), part)
        ]
        print(f"left out of the fit: {_says([each for part in parts for each in part], left)}")
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", help=f"one of {', '.join(FAMILIES)}")
    parser.add_argument("--leave-out", type=positive_int, metavar="PARTS")
    parser.add_argument("--steps", type=positive_int, default=_STEPS, help="of the search (%(default)s)")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
