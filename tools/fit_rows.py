"""Fit what kernels over rows are expected to take to measured times, and say how good their choices are.

    python tools/fit_rows.py softmax                 # the terms, and what is chosen with them
    python tools/fit_rows.py softmax --leave-out 5   # and for widths that were left out of the fit

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.cli.args import positive_int
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.errors import UsageError
from cutegen.families.registry import find_space, parse_problem
from cutegen.families.shapes import read_shapes
from cutegen.family import Problem
from cutegen.measure.statistics import geometric_mean
from cutegen.space import Config, Space
from spaces.row.defaults import is_usual, kernel_of, of_small_group
from spaces.row.expected import Counts, Terms, counts_of, microseconds
from spaces.row.registers import RegistersTaken
from spaces.row.sizes import ELEMENT_BYTES, PEELED_ROW, is_peeled
from tools.benchmark.drawn import ran_behind
from tools.benchmark.random_walk import Doubles, RandomWalk

ROOT = Path(__file__).resolve().parent.parent
ARCH = find_arch("sm_90a")
TRIED = ROOT / "tests" / "data" / "tried_on_h200.json.xz"
LATER = ROOT / "tests" / "data" / "tried_later_on_h200.json"
SHAPES = ROOT / "tools" / "shapes"
FAMILIES = ("cross_entropy", "layernorm", "rmsnorm_quantized", "softmax")
#: Where the search begins: a latency of memory, and tenths of a microsecond.
START = Terms(0.4, 0.8, 0.5, 0.3, 0.1, 0.05, 0.1, 0.1, 0.8, 0.1, 0.03, 2.5)
_WALK, _WALKS = RandomWalk(steps=30_000, moved=0.3, width=0.35, narrower=0.08), 8
_LEVEL = 0.02
"""Weight of an error that all configs of a problem share, which does not change the choice."""
_CHOICE = 2.0
"""Weight of what the choices lose."""
_WORST = 8.0
"""Weight of the square of what a choice loses: much in one place weighs more than little in several."""
_LISTED = 4.0
"""Weight of the problems of tools/shapes, beside 1 of those that were drawn at random."""
_BEHIND = 2.0
"""Weight of those that were timed behind another kernel, as winners are."""
_OVERLAPPED, _SHORT_US = 0.3, 8.0
"""Weight of kernels that take less than so many microseconds and were timed back to back: how they overlap
the next launch of themselves is not what programs see. Source: an H200, behind another kernel, on widths left
out: so cross-entropy is chosen at 0.969 of the fastest, and at 0.962 if all weigh as much; softmax and
LayerNorm at 0.988 and 0.984 either way."""
_PEELED_SINCE, _PEELED_THEN = "2026-11-24T02", ("softmax", "cross_entropy")
"""Rows that start anywhere were read as vectors in results since then, of these families."""
_BY_EIGHT_SINCE = "2026-11-27T12:20"
"""Rows of fp8 that start at multiples of 8 bytes, not of 16, are written as vectors in results since then."""
_LEAST_OVERLAP = 1.3
"""Below it times would add up, which they do not."""


class Kernel(NamedTuple):
    """A config, what is counted of it, its microseconds, and whether it may be a default."""

    config: Config
    counts: Counts
    us: float
    usual: bool


class Timed(NamedTuple):
    """A problem, its kernels, how much it weighs, and whether launches were behind another kernel."""

    problem: Problem
    kernels: tuple[Kernel, ...]
    weight: float
    behind: bool


class _Record(NamedTuple):
    """A row of a record, and what was so when it was measured.

    Attributes:
        row: As it was written.
        before: Whether it is older than kernels of rows of two warps that take few barriers.
        peeled: Whether rows that start anywhere were read as vectors.
        by_eight: Whether rows of fp8 that start at multiples of 8 bytes were written as vectors.
        behind: Whether launches were behind another kernel, not back to back.
    """

    row: Mapping[str, Any]
    before: bool
    peeled: bool
    by_eight: bool
    behind: bool = False


def _records(family: str) -> Iterator[_Record]:
    for row in json.loads(lzma.decompress(TRIED.read_bytes()))[family]["rows"]:
        yield _Record(row, True, False, False)
    for row in json.loads(LATER.read_text()).get(family, {"rows": []})["rows"]:
        yield _Record(row, False, True, False)
    for path in sorted((ROOT / "docs" / "results").glob("untuned_rows*.json")):
        record = json.loads(path.read_text())
        peeled = record["measured_at"] > _PEELED_SINCE and family in _PEELED_THEN
        by_eight = record["measured_at"] > _BY_EIGHT_SINCE
        behind = ran_behind(record)
        for row in record["rows"]:
            if row["problem"].split()[0] == family:
                yield _Record(row, "times" not in row, peeled, by_eight, behind)


def _might_be_peeled(problem: Any) -> bool:
    long = problem.n * ELEMENT_BYTES[problem.signature.dtype] >= PEELED_ROW
    return bool(problem.signature.unaligned and long)


def _starts_at_eights(problem: Any) -> bool:
    """Return whether rows of fp8 start at multiples of 8 bytes, not of 16, which no line says."""
    return bool(problem.family == "rmsnorm_quantized" and problem.n % 16 == 8)


@cache
def measured(family: str) -> tuple[Timed, ...]:
    """Return the times of a family, of configs that are valid today.

    Records without all times are older than kernels of rows of two warps that take few barriers: those are
    left out. So are rows that start anywhere, or at multiples of 8 bytes, if they were timed as they are not
    read or written today.
    """
    listed = {shape.problem for shape in read_shapes(SHAPES / f"{family}.toml", family)}
    space, found = find_space(family, ARCH), []
    for row, before, peeled, by_eight, behind in _records(family):
        problem = parse_problem(row["problem"])
        if _might_be_peeled(problem) and peeled != is_peeled(problem):
            continue
        if _starts_at_eights(problem) and not by_eight:
            continue
        tried = row.get("tried") if "times" not in row else row["times"]
        times = {
            Config.parse(text): us for text, us in (tried if isinstance(tried, dict) else _pair(row)).items()
        }
        times = {config: us for config, us in times.items() if _is_legal(space, problem, config)}
        if before:
            times = {config: us for config, us in times.items() if config["threads_per_row"] != 64}
        # Launches overlap as the default has them; the others differ from it in that alone.
        starts = [config["pdl"] for config in times]
        usual = max(set(starts), key=starts.count, default="early")
        times = {config: us for config, us in times.items() if config["pdl"] == usual}
        kernels = tuple(
            Kernel(config, counted(space, problem, config), us, _may_be_default(problem, config))
            for config, us in times.items()
        )
        if len(kernels) > 1:
            weight = _LISTED if problem in listed else 1.0
            found.append(Timed(problem, kernels, weight * _trust(kernels, behind), behind))
    return tuple(found)


def _trust(kernels: Sequence[Kernel], behind: bool) -> float:
    """Return how much times count beside those of long kernels back to back."""
    is_short = min(kernel.us for kernel in kernels) < _SHORT_US
    return _BEHIND if behind else _OVERLAPPED if is_short else 1.0


def _is_legal(space: Space, problem: Problem, config: Config) -> bool:
    """Return whether a config is one of today; those whose rows come through a ring follow from no terms."""
    known = all(value in space.domains.get(knob, ()) for knob, value in config.items())
    return known and config["row_in"] != "ring" and not space.explain(problem, config)


def _may_be_default(problem: Problem, config: Config) -> bool:
    """Return whether a config is chosen where it is expected to take least."""
    lane_values = getattr(_module_of(problem.family), "LANE_VALUES", None)
    return is_usual(problem, config, ARCH.nominal_sm_count, lane_values)


def _pair(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of the two configs that an older record names."""
    return {row["best"]: row["best_us"], row["default"]: row["default_us"]}


def counted(space: Space, problem: Problem, config: Config) -> Counts:
    """Return what a kernel is counted to have."""
    kernel = kernel_of(space, problem, config, registers_of(space.family))
    return counts_of(kernel, problem.sizes["m"], problem.min_bytes, ARCH)


class Table(NamedTuple):
    """The kernels of some problems, those of a problem behind one another, as arrays of a number for each.

    Attributes:
        counts: What is counted of them.
        logs: Logarithms of their microseconds.
        small: Of how much longer those with parts of a warp take.
        may: Whether each may be a default; all of a problem that has no such kernel.
        first: Of each problem, where its kernels begin.
        problem: The problem of each kernel.
        kernels: Of each problem, how many.
        weight: Of each problem.
    """

    counts: Counts
    logs: Doubles
    small: Doubles
    may: NDArray[np.bool_]
    first: NDArray[np.intp]
    problem: NDArray[np.intp]
    kernels: Doubles
    weight: Doubles


def table(timed: Sequence[Timed]) -> Table:
    """Return the kernels of ``timed`` as arrays."""
    kernels = [kernel for each in timed for kernel in each.kernels]
    many = np.array([len(each.kernels) for each in timed])
    first, problem = np.cumsum(many) - many, np.repeat(np.arange(len(many)), many)
    usual = np.array([kernel.usual for kernel in kernels])
    return Table(
        counts=Counts(*np.array([kernel.counts for kernel in kernels], float).T),
        logs=np.log([kernel.us for kernel in kernels]),
        small=np.log([of_small_group(kernel.config) for kernel in kernels]),
        may=usual | ~np.logical_or.reduceat(usual, first)[problem],
        first=first,
        problem=problem,
        kernels=many.astype(float),
        weight=np.array([each.weight for each in timed]),
    )


def error(terms: Terms, known: Table) -> float:
    """Return how far expectations are from times, and how much longer the choices take than the best."""
    expected = np.log(microseconds(known.counts, terms))
    off = expected - known.logs
    mean = np.add.reduceat(off, known.first) / known.kernels
    apart = np.add.reduceat((off - mean[known.problem]) ** 2, known.first) / known.kernels
    lost = np.log(_ratios(expected, known))
    found = apart + _LEVEL * mean**2 - _CHOICE * lost + _WORST * lost**2
    return float((known.weight * found).sum() / known.weight.sum())


def ratios(terms: Terms, known: Table) -> Doubles:
    """Return for each problem the best time over that of the config that ``terms`` choose, of usual ones."""
    return _ratios(np.log(microseconds(known.counts, terms)), known)


def _ratios(expected: Doubles, known: Table) -> Doubles:
    times = np.where(known.may, expected + known.small, np.inf)
    least = times == np.minimum.reduceat(times, known.first)[known.problem]
    choice = np.minimum.reduceat(np.where(least, np.arange(len(times)), len(times)), known.first)
    best = np.minimum.reduceat(np.where(known.may, known.logs, np.inf), known.first)
    return np.asarray(np.exp(best - known.logs[choice]))


def fitted(timed: Sequence[Timed], steps: int = _WALK.steps, walks: int = _WALKS) -> Terms:
    """Return the terms of a family that the best of some random walks finds, the same for the same times."""
    known = table(timed)

    def off(numbers: Doubles) -> float:
        terms = _rounded(numbers)
        return error(terms, known) if terms.overlap >= _LEAST_OVERLAP else math.inf

    walk = replace(_WALK, steps=steps)
    found = [_rounded(walk.end(astuple(START), off, seed)) for seed in range(walks)]
    return min(found, key=lambda terms: error(terms, known))


def _rounded(numbers: Doubles) -> Terms:
    """Return terms as they are printed: these must choose as what was judged, and kernels are often level."""
    return Terms(*(float(f"{number:.3g}") for number in numbers))


def _module_of(family: str) -> Any:
    return importlib.import_module(f"spaces.{family}.space")


def shipped(family: str) -> Terms:
    """Return the terms that the space of a family has."""
    found: Terms = _module_of(family).TERMS
    return found


def registers_of(family: str) -> RegistersTaken:
    """Return the registers that the space of a family expects."""
    found: RegistersTaken = _module_of(family).REGISTERS
    return found


def _says(timed: Sequence[Timed], found: Sequence[float] | Doubles) -> str:
    worst = sorted(zip(found, (str(each.problem) for each in timed), strict=True))[:4]
    return f"{geometric_mean([*found]):.4f} of the best in {len(found)}; worst " + ", ".join(
        f"{ratio:.3f} {problem}" for ratio, problem in worst
    )


def run(args: argparse.Namespace) -> int:
    """Fit and print."""
    if args.family not in FAMILIES:
        raise UsageError(f"family {args.family!r} has no such terms; valid: {', '.join(FAMILIES)}")
    timed = measured(args.family)
    print(f"now {args.family}: {_says(timed, ratios(shipped(args.family), table(timed)))}")
    terms = fitted(timed, args.steps)
    print(", ".join(f"{field.name}={getattr(terms, field.name):.3g}" for field in fields(Terms)))
    print(f"{args.family}: {_says(timed, ratios(terms, table(timed)))}")
    if args.leave_out:
        widths = sorted({each.problem.sizes["n"] for each in timed})
        random.Random(1).shuffle(widths)
        parts = [
            [each for each in timed if each.problem.sizes["n"] in widths[at :: args.leave_out]]
            for at in range(args.leave_out)
        ]
        left = [
            ratio
            for part in parts
            for ratio in ratios(fitted([each for each in timed if each not in part], args.steps), table(part))
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
    parser.add_argument("--steps", type=positive_int, default=_WALK.steps, help="of the search (%(default)s)")
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
