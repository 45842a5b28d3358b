"""Fit what gated GEMMs take beside plain ones of as many columns.

python tools/fit_gated.py            # on (n, k) that were left out, beside the plain GEMM's time
python tools/fit_gated.py --write    # write cutegen/families/gated_gemm/fit_sm_90a.json as well

Times are those that tools/bench_untuned_families.py and tools/bench_family.py wrote, of H200s and H100s.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.families.declared import DeclaredProblem
from cutegen.families.gated_gemm.gated_fit import FILE, describe
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.families.gated_gemm.strategy import GatedGemmStrategy
from cutegen.families.gemm.perf_model.packaged import arch_for
from cutegen.families.registry import find_space, parse_problem
from cutegen.space import Config
from tools.fit_groups import ARCH, BOOSTING, FOLDER, SM_COUNT, Point, fit

RESULTS = (
    "untuned_products_before",
    "untuned_products",
    "untuned_products_21",
    "gated_gemm",
    "untuned_products_141",
    "untuned_products_155",
    "untuned_products_167",
    "untuned_products_181",
    "untuned_products_193",
    "untuned_products_239",
    "untuned_products_269",
    "untuned_products_283",
    "untuned_products_347",
    "untuned_products_461",
    "untuned_products_491",
    "untuned_products_557",
    "untuned_products_617",
    "untuned_products_653",
    "untuned_products_683",
)


def points() -> list[Point]:
    """Return what was recorded of gated GEMMs with tensor cores."""
    return [point for name in RESULTS for point in _of_file(name)]


def _of_file(name: str) -> Iterator[Point]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    gpu = found.get("gpu") or found["conditions"]["gpu"]["name"]
    arch = arch_for(ARCH, gpu)
    space, strategy = find_space("gated_gemm", arch), GatedGemmStrategy.of(arch)
    assert strategy is not None
    for row in found["rows"]:
        timed = row.get("times") or row.get("tried")
        if not row["problem"].startswith("gated_gemm ") or not isinstance(timed, dict):
            continue
        problem = parse_problem(row["problem"])
        assert isinstance(problem, DeclaredProblem)
        times = {config: us for text, us in timed.items() if not (config := Config.parse(text)).algorithm}
        predict = strategy.predictor(space, problem, SM_COUNT, [*times])
        plain = {config: us for config in times if math.isfinite(us := predict(config) or math.inf)}
        if len(plain) > 1:
            features = describe(plain_gemm(problem), [*plain], arch, SM_COUNT).T.astype(float)
            took = np.array([times[config] for config in plain])
            yield Point(name, gpu, problem, took, np.array([*plain.values()]), features)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit; print how good it is, and write the fit if asked to."""
    return fit(argv, __doc__, points, FILE, BOOSTING)


if __name__ == "__main__":
    sys.exit(main())
