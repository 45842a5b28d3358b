"""Fit what grouped GEMMs take beside the batched GEMM of equal groups, and say what the choice loses.

python tools/fit_groups.py            # on (n, k, groups) that were left out, beside the time of equal groups
python tools/fit_groups.py --write    # write cutegen/families/grouped_gemm/fit_sm_90a.json as well

Times are those that tools/bench_untuned_families.py and tools/bench_family.py wrote, of candidates that took
turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.cli.exit_codes import EXIT_OK, run_command
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.boosting import Boosting
from cutegen.families.gemm.perf_model.judging import choices
from cutegen.families.gemm.perf_model.packaged import arch_for
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.grouped_gemm.group_fit import FILE, describe
from cutegen.families.grouped_gemm.strategy import GatedGroupedStrategy, GroupedStrategy
from cutegen.families.registry import find_space, parse_problem
from cutegen.space import Config
from tools.fit_gemm import lines

__all__ = ["RESULTS", "Point", "fit", "left_out", "lost", "points"]

Doubles = NDArray[np.float64]

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
#: Recorded before outputs whose rows start anywhere were stored as they are now: these rows do not count.
_OLD_STORE = ("untuned_products_before", "untuned_products", "untuned_products_21", "untuned_grouped_71")
#: Of listed sizes, timed in more and longer rounds: each counts as so many others.
_LISTED, _LISTED_WEIGHT = ("grouped_gemm", "grouped_gemm_large", "grouped_gated_gemm"), 3.0
_SEEDS = (91, 101, 113, 127, 137, 139, 153, 165, 183, 251, 277, 293, 349, 463, 487, 547, 563, 613, 647, 677)
_DRAWN = tuple(f"untuned_grouped_{seed}" for seed in _SEEDS)
RESULTS = (*_OLD_STORE, *_DRAWN, *_LISTED)
ARCH, SM_COUNT = find_arch("sm_90a"), 132
#: Of each of the fits whose mean is taken: one alone chooses worse on what it has not seen.
BOOSTING = Boosting(trees=250, depth=6, rate=0.15, hold=4.0, borders=32, asked=0.4, sampled=0.7)
_FITS = 3
#: Parts of the matrices of which each is left out once, and in how many ways they are divided.
_FOLDS, _DIVISIONS = 10, 2


@dataclass(frozen=True)
class Point:
    """Candidates of one problem that were timed in the same rounds.

    Attributes:
        source: The results file.
        gpu: On which it was measured.
        problem: The problem.
        us: Microseconds of each candidate.
        equal_us: What the batched GEMM of equal groups is predicted to take with each.
        features: Of each candidate, a row for each.
    """

    source: str
    gpu: str
    problem: DeclaredProblem
    us: Doubles
    equal_us: Doubles
    features: Doubles

    @property
    def matrices(self) -> tuple[str, int, int, int]:
        """What sizes of one drawing share."""
        sizes = self.problem.sizes
        return (self.problem.family, sizes["n"], sizes["k"], sizes.get("g", 1))


def points(names: Sequence[str] = RESULTS) -> list[Point]:
    """Return what was recorded of problems of 16-bit grouped GEMMs."""
    return [point for name in names for point in _of_file(name)]


def _of_file(name: str) -> Iterator[Point]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    strategies = {"grouped_gemm": GroupedStrategy, "grouped_gated_gemm": GatedGroupedStrategy}
    arch = arch_for(ARCH, found["gpu"])
    for row in found["rows"]:
        strategy = strategies.get(row["problem"].split()[0])
        own = None if strategy is None else strategy.of(arch)
        if own is None:
            continue
        problem = parse_problem(row["problem"])
        assert isinstance(problem, DeclaredProblem)
        if problem.unaligned and name in _OLD_STORE:
            continue
        timed = row.get("times") or row["tried"]
        configs = [Config.parse(words) for words in timed]
        predict = own.predictor(find_space(problem.family, arch), problem, SM_COUNT, configs)
        equal = [predict(config) or math.inf for config in configs]
        known = [at for at, us in enumerate(equal) if math.isfinite(us)]
        if len(known) > 1:
            kept, equal_us = [configs[at] for at in known], [equal[at] for at in known]
            features = describe(problem, kept, equal_us, SM_COUNT).T.astype(float)
            times = np.array([*timed.values()])[known]
            yield Point(name, found["gpu"], problem, times, np.array(equal_us), features)


def wanted(point: Point) -> Doubles:
    """Return how much longer than predicted each candidate took, beside the mean of all, as a logarithm."""
    errors = np.log(point.us / point.equal_us)
    return np.asarray(errors - errors.mean())


def weights(point: Point) -> Doubles:
    """Return how much each candidate counts."""
    return np.full(len(point.us), _LISTED_WEIGHT if point.source in _LISTED else 1.0)


def lost(found: Sequence[Point], logs: Doubles) -> Doubles:
    """Return the fastest candidate's time over that of the one with the least of ``logs``, by problem."""
    number = np.repeat(np.arange(len(found)), [len(point.us) for point in found])
    times = [point.us[order - order.min()] for point, order in zip(found, choices(number, logs), strict=True)]
    return np.array([each.min() / each[0] for each in times])


def fitted(features: Doubles, want: Doubles, weight: Doubles, boosting: Boosting) -> Trees:
    """Return trees whose sum is near ``want``: the mean of a few fits, each of which draws anew."""
    settings = [replace(boosting, seed=seed) for seed in range(_FITS)]
    return reduce(Trees.joined, [each.fit(features, want, weight).scaled(1 / _FITS) for each in settings])


def _arrays(found: Sequence[Point]) -> tuple[Doubles, Doubles, Doubles]:
    """Return the features of all candidates, what is wanted of each, and how much it counts."""
    parts = ([p.features for p in found], [wanted(p) for p in found], [weights(p) for p in found])
    features, want, weight = map(np.concatenate, parts)
    return features, want, weight


def left_out(found: Sequence[Point], boosting: Boosting) -> Doubles:
    """Return corrections of all candidates by trees that have not seen their matrices."""
    names = list(dict.fromkeys(point.matrices for point in found))
    matrix = np.concatenate([np.full(len(p.us), names.index(p.matrices)) for p in found])
    features, want, weight = _arrays(found)
    sums = np.zeros(len(want))
    for seed in range(_DIVISIONS):
        fold = (np.random.default_rng(seed).permutation(len(names)) % _FOLDS)[matrix]
        for number in range(_FOLDS):
            there = fold == number
            if not there.any():
                continue
            trees = fitted(features[~there], want[~there], weight[~there], boosting)
            columns = np.ascontiguousarray(features[there].T.astype(np.float32))
            sums[there] += (trees.sums(columns) + trees.base) / _DIVISIONS
    return sums


def _summary(ratios: Doubles) -> dict[str, float]:
    return {
        "geometric_mean": round(float(np.exp(np.log(ratios).mean())), 4),
        "smallest": round(float(ratios.min()), 3),
        "at_least_0.85": round(float((ratios >= 0.85).mean()), 3),
    }


def judged(found: Sequence[Point], boosting: Boosting) -> dict[str, Any]:
    """Return how good the choice is by the time of equal groups alone, and with trees left out."""
    logs = np.log(np.concatenate([point.equal_us for point in found]))
    corrected = logs + left_out(found, boosting)
    ways = {"equal_groups": lost(found, logs), "trees_left_out": lost(found, corrected)}
    parts = {"all": np.full(len(found), True)}
    for family in dict.fromkeys(point.problem.family for point in found):
        parts[family] = np.array([point.problem.family == family for point in found])
    for source in dict.fromkeys(point.source for point in found):
        parts[f"{source}.json"] = np.array([point.source == source for point in found])
    return {name: {way: _summary(r[here]) for way, r in ways.items()} for name, here in parts.items()}


def document(found: Sequence[Point], judgement: dict[str, Any], boosting: Boosting) -> str:
    """Return the text of the file: the trees of all problems, and where they come from."""
    trees = fitted(*_arrays(found), boosting)
    provenance = {
        "gpu": list(dict.fromkeys(point.gpu for point in found)),
        "results": list(dict.fromkeys(point.source for point in found)),
        "problems": len(found),
        "candidates": sum(len(point.us) for point in found),
        "features": found[0].features.shape[1],
        "fastest_over_chosen": judgement,
    }
    return lines({"arch": ARCH.name, "provenance": provenance, **trees.to_json()})


def fit(
    argv: Sequence[str] | None,
    about: str | None,
    points: Callable[[], Sequence[Point]],
    file: Path,
    boosting: Boosting,
) -> int:
    """Run a command that fits ``points``: print how good that is, and write ``file`` if asked to."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the fit of all problems")
    args = parser.parse_args(argv)

    def run() -> int:
        found = points()
        judgement = judged(found, boosting)
        print(json.dumps(judgement, indent=1))
        if args.write:
            file.write_text(document(found, judgement, boosting), encoding="utf-8")
        return EXIT_OK

    return run_command(run)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit; print how good it is, and write the fit if asked to."""
    return fit(argv, __doc__, points, FILE, BOOSTING)


if __name__ == "__main__":
    sys.exit(main())
