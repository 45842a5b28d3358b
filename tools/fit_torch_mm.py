"""Fit the expected time of ``torch.mm`` to a recorded sweep, and say what leaving products to it gives.

python tools/fit_torch_mm.py            # on (n, k) that were not fitted: errors, and outcomes by margin
python tools/fit_torch_mm.py --write    # write cutegen/families/gemm/perf_model/torch_mm.json as well
python tools/fit_torch_mm.py --into docs/tuning.md    # what that file says of outcomes, as a table

Needs catboost, which only tools/fit_gemm.py needs beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.perf_model.judging import folds, matrices
from cutegen.families.gemm.perf_model.torch_mm import FILE, describe, load_torch_mm
from cutegen.families.gemm.problem import Problem
from tools.fit_gemm import (
    SWEEP,
    Array,
    Points,
    answered,
    as_arrays,
    boosted,
    left_out,
    lines,
    load,
    read_products,
    with_products,
)
from tools.results_table import insert

DEPTH = 5
#: More trees, deeper ones, more tiles or the kernel's own time as a feature decide no better.
SETTINGS = {"depth": DEPTH, "iterations": 200, "learning_rate": 0.12, "l2_leaf_reg": 3.0, "random_seed": 0}
#: Products of the sweep count so many times as much as others, of which there are three times as many.
#: Source: nine of ten of its shapes are predicted within 12.8 %, otherwise 13.1 %; what ran behind another
#: kernel as well as before.
_SWEEP_WEIGHT = 1.5
#: The last features say how a product was timed.
_CONDITIONS = (-1, -2)
#: So many times as long must torch be expected to take before a kernel runs.
MARGINS = (0.95, 1.0, 1.02, 1.03, 1.05, 1.08, 1.1, 1.12, 1.15, 1.23)
#: What the table shows, and calls products that were judged together.
_SHOWN = (0.0, 1.0, 1.03, 1.05, 1.1, 1.23)
_GROUPS = {
    "products": "products, A along k",
    "along_m": "products, A along m",
    "behind": "products behind another kernel",
    "sweep": "sweep",
    "judge": "few rows",
}


def times(rows: Sequence[dict[str, Any]]) -> Array:
    """Return the microseconds of ``torch.mm`` of shapes of a sweep, at the pace of its first run."""
    return np.array([np.median(row["torch_mm_us"]) / row.get("pace", 1.0) for row in rows])


def expected(found: dict[str, Any], timed: Sequence[dict[str, Any]]) -> tuple[Array, Array, dict[str, Any]]:
    """Return microseconds of all products, measured and by trees that have not seen their (n, k).

    Those of the sweep's shapes come first, then those of products without timed kernels, then those that were
    ``timed`` in the rounds of kernels. The third are trees of all, which predict what is timed so, and behind
    another kernel.
    """
    rows = found["shapes"] + found["products"]
    problems = [*(Problem(*row["mnk"]) for row in rows), *(row["problem"] for row in timed)]
    took = np.concatenate([times(rows), [row["reference_us"] for row in timed]])
    described = [describe(p.m, p.n, p.k, found["sm_count"], p.layout) for p in problems]
    rough, features = (np.array(column) for column in zip(*described, strict=True))
    behind = [False] * len(rows) + [row["behind"] for row in timed]
    features = np.column_stack([features, np.arange(len(took)) >= len(rows), behind])
    fold = folds(matrices(problems))
    wanted = np.log(took / rough)
    weight = np.where(np.arange(len(took)) < len(rows), _SWEEP_WEIGHT, 1.0)
    logs = np.log(rough) + left_out_sums(features, wanted, fold, weight)
    trees = as_arrays(boosted(SETTINGS, features, wanted, weight), DEPTH)
    for condition in _CONDITIONS:
        trees = answered(trees, features.shape[1] + condition)
    return took, np.exp(logs), trees


def left_out_sums(
    features: Array, wanted: Array, fold: NDArray[np.intp], weight: Array | None = None
) -> Array:
    """Return what trees say of ``wanted`` that have not seen its fold."""
    found, weight = np.zeros(len(wanted)), np.ones(len(wanted)) if weight is None else weight
    for number in range(fold.max() + 1):
        there = fold == number
        trees = boosted(SETTINGS, features[~there], wanted[~there], weight[~there])
        found[there] = trees.predict(features[there])
    return found


def defaults(points: Points) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return measured and expected microseconds of the default's choice at each shape, (n, k) left out.

    The third are the shapes that count: those whose kernels were all timed as they run today. The choice is
    made among the default kernels that were timed there, or what was default then; where the shape
    judged an earlier fit, among the three that this chose.
    """
    predicted, chosen, counts = left_out(points), [], []
    for number in range(len(points.sizes)):
        here = np.flatnonzero(points.shape == number)
        own = here[points.default[here]] if points.default[here].any() else here
        here = here[:3] if points.judge[here[0]] else own
        chosen.append(here[predicted[here].argmin()])
        counts.append(not points.moved[here].any())
    return points.us[chosen], predicted[chosen], np.array(counts)


def outcome(ratios: Array, margin: float, left: NDArray[np.bool_]) -> dict[str, float]:
    """Return what users get of ``torch.mm``'s speed, if it computes what is ``left`` to it."""
    got = np.where(left, 1.0, ratios)
    return {
        "margin": margin,
        "left_to_torch": round(float(left.mean()), 3),
        "geometric_mean": round(float(np.exp(np.log(got).mean())), 4),
        **{f"at_least_{least}": round(float((got >= least).mean()), 3) for least in (0.98, 0.95, 0.9, 0.85)},
        "smallest": round(float(got.min()), 3),
    }


def outcomes(ratios: Array, relation: Array) -> list[dict[str, float]]:
    """Return the outcome of each margin; ``relation`` is torch's expected time over the kernel's."""
    return [outcome(ratios, margin, relation < margin) for margin in (0.0, *MARGINS)]


def table(outcomes: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return outcomes as Markdown, those of no margin first in each group."""
    floors = (0.98, 0.95, 0.85)
    head = ["judged on", "factor", "left to `torch.mm`", "geometric mean", *(f">= {x}" for x in floors)]
    lines = ["| " + " | ".join([*head, "smallest"]) + " |", "|---|---|" + "---:|" * (len(floors) + 3)]
    for group, name in _GROUPS.items():
        for row in (row for row in outcomes[group] if row["margin"] in _SHOWN):
            cells = [name, "`none`" if not row["margin"] else f"{row['margin']:g}"]
            cells += [f"{100 * row['left_to_torch']:.0f} %", f"{row['geometric_mean']:.3f}"]
            cells += [f"{100 * row[f'at_least_{floor}']:.1f} %" for floor in floors]
            lines.append("| " + " | ".join([*cells, f"{row['smallest']:.3f}"]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit; print how good it is, and write the fit if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the fit of all shapes")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT.md", help="only put the fit's outcomes there")
    args = parser.parse_args(argv)
    if args.into is not None:
        judged = load_torch_mm().provenance["outcomes_on_matrices_left_out"]
        text = insert(args.into.read_text(encoding="utf-8"), "torch_mm", table(judged))
        args.into.write_text(text, encoding="utf-8")
        return 0
    found, sweep = load(SWEEP)
    timed = read_products()
    points = with_products(found, sweep, timed)
    first = np.unique(points.shape, return_index=True)[1]
    judge, settled = points.judge[first], points.settled[first]
    took, torch_us, trees = expected(found, timed)
    errors = np.log(torch_us / took)
    own_us, own_expected, counts = defaults(points)
    own_expected = own_expected + GEMM.hidden_us
    behind = points.behind[first]
    along_m = np.array([False] * len(sweep.sizes) + [row["problem"].layout[0] == "m" for row in timed])
    with_kernels = np.r_[: len(sweep.sizes), len(took) - len(timed) : len(took)]
    took, torch_us = took[with_kernels], torch_us[with_kernels]
    provenance = {
        **{name: found[name] for name in ("gpu", "sm_count", "driver", "torch")},
        "sweep": SWEEP.name,
        "products": len(errors),
        "judged": int(counts.sum()),
        "error_on_matrices_left_out": round(float(errors.std()), 3),
        "outcomes_on_matrices_left_out": {
            name: outcomes((took / own_us)[here & counts], (torch_us / own_expected)[here & counts])
            for name, here in (
                ("sweep", ~judge & ~settled),
                ("judge", judge),
                ("products", settled & ~along_m & ~behind),
                ("along_m", along_m & ~behind),
                ("behind", behind),
            )
        },
    }
    print(json.dumps(provenance, indent=1))
    if args.write:
        document = {"arch": "sm_90a", "provenance": provenance, **trees}
        FILE.write_text(lines(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
