"""Fit the times of GEMMs on another Hopper GPU to products recorded there, beside what the H200's fit has.

python tools/fit_hopper.py            # on (n, k) that were not fitted: regret of the choice
python tools/fit_hopper.py --write    # write the calibration that the package ships for that GPU as well

One GPU's products are too few to tell what every kernel takes, so the trees see the H200's points, too. They
are asked which GPU a point is of, and shipped with that question answered. Needs catboost, as
tools/fit_gemm.py does.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.families.gemm.perf_model.fitted import load_fit
from cutegen.families.gemm.perf_model.fitting import Measured, find_rates
from cutegen.families.gemm.perf_model.judging import (
    FOLDS,
    behind_best,
    folds,
    matrices,
    nearness,
    regret,
    regrets,
)
from cutegen.families.gemm.perf_model.packaged import packaged_path
from cutegen.families.gemm.perf_model.roofline import FEATURES, Rates, rooflines_of
from cutegen.families.gemm.perf_model.torch_mm import describe
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from tools import fit_gemm, fit_torch_mm
from tools.fit_gemm import Array, answered, as_arrays, boosted, lines, read_products

_RESULTS = fit_gemm.SWEEP.parent
#: Default kernels on products drawn at random; and others, most of which share what they load among four
#: thread blocks, on products of few and medium numbers of rows; and products with an operand that is not
#: contiguous along k. All by tools/sweep_products.py.
PRODUCTS = (
    _RESULTS / "gemm_products_h100.json.xz",
    _RESULTS / "gemm_wide_h100.json.xz",
    _RESULTS / "gemm_products_h100_mn.json.xz",
    _RESULTS / "gemm_products_h100_223.json.xz",
    _RESULTS / "gemm_products_h100_227.json.xz",
    _RESULTS / "gemm_products_h100_227_own.json.xz",
    _RESULTS / "gemm_products_h100_1001.json.xz",
    _RESULTS / "gemm_products_h100_1013.json.xz",
    _RESULTS / "gemm_products_h100_1307.json.xz",
)
#: How much a point counts beside one of the H200. Source: on matrices left out the choice is 1.1 % behind the
#: best with 10 and with 30, and 1.3 % with 4 and without the question about the GPU.
_WEIGHT = 10.0
#: Trees that say how long a shape takes, the same for all kernels, ask about these alone.
_OF_SHAPE = [at for at, name in enumerate(FEATURES) if name in ("m_log", "n_log", "k_log")]

Numbers = NDArray[np.intp]


@dataclass(frozen=True)
class Recorded:
    """Kernels and the library's call that took turns on products.

    Attributes:
        problems: The products.
        torch_us: Microseconds of the library's call.
        shape: Number of the product of each point.
        us: Microseconds of each point.
        roofline_us: By the roofline alone.
        features: One row for each point.
        moved: Whether a point's tiles were taken in another order, so that it counts nothing.
    """

    problems: list[Problem]
    torch_us: Array
    shape: Numbers
    us: Array
    roofline_us: Array
    features: Array
    moved: NDArray[np.bool_]


def recorded(rows: Sequence[dict[str, Any]], sm_count: int, rates: Rates) -> Recorded:
    """Return rows of :func:`tools.fit_gemm.read_products` as arrays."""
    times, features = [], []
    for row in rows:
        time, asked = rooflines_of(row["problem"], [c for c, _ in row["points"]], sm_count, rates)
        times.append(time)
        features.append(asked.T)
    counts = [len(row["points"]) for row in rows]
    return Recorded(
        [row["problem"] for row in rows],
        np.array([row["reference_us"] for row in rows]),
        np.repeat(np.arange(len(rows)), counts),
        np.array([us for row in rows for _, us in row["points"]]),
        np.concatenate(times).astype(float),
        np.concatenate(features).astype(float),
        np.array([moved for row in rows for moved in row["moved"]]),
    )


@dataclass(frozen=True)
class Samples:
    """What trees are fitted to: first the points of the GPU, then the H200's.

    Attributes:
        features: One row for each, which ends with whether it is of the GPU.
        wanted: Logarithms of what corrects the roofline.
        weight: How much each counts.
        group: Which are kernels of one product.
        fold: Its part of the matrices.
        own: How many are of the GPU.
    """

    features: Array
    wanted: Array
    weight: Array
    group: Numbers
    fold: Numbers
    own: int

    @classmethod
    def joined(
        cls, ours: Sequence[Array], theirs: Sequence[Array], groups: Numbers, fold: Numbers
    ) -> Samples:
        """Return the samples of both; each side is its features, what is wanted, and weights."""
        own = len(ours[1])
        features, wanted, weight = (np.concatenate(parts) for parts in zip(ours, theirs, strict=True))
        asked = np.column_stack([features, np.arange(len(wanted)) < own])
        return cls(asked, wanted, weight, groups, fold, own)

    def trees(self, settings: dict[str, Any], chosen: NDArray[np.bool_]) -> Any:
        """Return trees fitted to some, which say what sets kernels of a product apart."""
        features, wanted, weight = (part[chosen] for part in (self.features, self.wanted, self.weight))
        return boosted(settings, features, wanted, weight, self.group[chosen])

    def left_out(self, settings: dict[str, Any]) -> Array:
        """Return corrections of the GPU's points, each by trees that have not seen its matrix."""
        found = np.zeros(self.own)
        for number in range(FOLDS):
            there = np.flatnonzero(self.fold[: self.own] == number)
            trees = self.trees(settings, self.fold != number)
            found[there] = trees.predict(self.features[there])
        return found

    def shipped(self, settings: dict[str, Any]) -> tuple[Trees, Array]:
        """Return trees fitted to all, as asked about the GPU, and what they say of its points."""
        everything = np.full(len(self.wanted), True)
        model, asked = self.trees(settings, everything), self.features.shape[1] - 1
        trees = answered(as_arrays(model, int(settings["depth"])), asked)
        return Trees.of(trees, asked), np.asarray(model.predict(self.features[: self.own]))


def kernel_samples(own: Recorded, found: dict[str, Any], sweep: fit_gemm.Points) -> Samples:
    """Return what is known of kernels, on the GPU and on the H200."""
    others = fit_gemm.with_products(found, sweep, fit_gemm.read_others())
    shape = np.concatenate([own.shape, others.shape + len(own.problems)])
    matrix = matrices([*own.problems, *(Problem(*mnk) for mnk in others.sizes)])
    weight = _WEIGHT * nearness(behind_best(own.shape, own.us)) * ~own.moved
    return Samples.joined(
        (own.features, np.log(own.us / own.roofline_us), weight),
        (others.features, np.log(others.us / others.roofline_us), fit_gemm.weights(others)),
        shape,
        folds(matrix[shape]),
    )


def torch_mm(own: Recorded, sm_count: int) -> tuple[Trees, Array]:
    """Return trees of the library's time, and how far off those are that have not seen the matrix."""
    described = [describe(p.m, p.n, p.k, sm_count, p.layout) for p in own.problems]
    rough, features = (np.array(column) for column in zip(*described, strict=True))
    wanted, fold = np.log(own.torch_us / rough), folds(matrices(own.problems))
    off = wanted - fit_torch_mm.left_out_sums(features, wanted, fold)
    trees = as_arrays(boosted(fit_torch_mm.SETTINGS, features, wanted), fit_torch_mm.DEPTH)
    return Trees.of(trees, features.shape[1]), off


def level(own: Recorded, left: Array) -> Trees:
    """Return trees of what is left of each product's times, which no kernel decides."""
    features = own.features[:, _OF_SHAPE]
    model = boosted(fit_gemm.LEVEL, features, left, nearness(behind_best(own.shape, own.us)) * ~own.moved)
    trees = as_arrays(model, int(fit_gemm.LEVEL["depth"]))
    return Trees.of(
        {**trees, "asked": [[_OF_SHAPE[at] for at in row] for row in trees["asked"]]}, len(FEATURES)
    )


def _measured(row: dict[str, Any]) -> Measured:
    configs, us = zip(*row["points"], strict=True)
    return Measured(row["problem"], configs, us, row["reference_us"])


def judged(own: Recorded, as_h200: Recorded, kernels: Samples, torch_off: Array) -> dict[str, Any]:
    """Return the regret of the choice by the H200's fit and on matrices left out, and the library's error."""
    start = load_fit()
    sums = start.trees.sums(np.ascontiguousarray(as_h200.features.T, np.float32))
    ways: dict[str, Array] = {
        "shipped": np.log(as_h200.roofline_us) + sums,
        "trees": np.log(own.roofline_us) + kernels.left_out(fit_gemm.SETTINGS),
    }
    now = ~own.moved
    shape, us = own.shape[now], own.us[now]
    found = {name: regret(regrets(shape, us, np.exp(logs[now]))) for name, logs in ways.items()}
    return {**found, "taken": "trees", "torch_mm_error": round(float(torch_off.std()), 3)}


def main() -> int:
    """Fit; print how good it is, and write the calibration if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the fit of all points")
    args = parser.parse_args()
    document = json.loads(lzma.decompress(PRODUCTS[0].read_bytes()))
    gpu, rows = document["conditions"]["gpu"], read_products(PRODUCTS)
    sm_count = gpu["sm_count"]
    rates = find_rates([_measured(row) for row in rows], sm_count, load_fit())
    own = recorded(rows, sm_count, rates)
    kernels = kernel_samples(own, *fit_gemm.load(fit_gemm.SWEEP))
    of_torch, torch_off = torch_mm(own, sm_count)
    judgement = judged(own, recorded(rows, sm_count, load_fit().rates), kernels, torch_off)
    print(json.dumps({"rates": rates._asdict(), **judgement}, indent=1))
    if args.write:
        order, said = kernels.shipped(fit_gemm.SETTINGS)
        trees = order.joined(level(own, kernels.wanted[: kernels.own] - said))
        path = packaged_path(gpu["name"])
        assert path is not None
        path.write_text(lines(_document(document, own, rates, judgement, trees, of_torch)), encoding="utf-8")
    return 0


def _document(
    products: dict[str, Any],
    own: Recorded,
    rates: Rates,
    judgement: dict[str, Any],
    trees: Trees,
    torch: Trees,
) -> dict[str, Any]:
    """Return what :func:`cutegen.families.gemm.perf_model.fitted.read_fit` reads."""
    gpu = products["conditions"]["gpu"]
    provenance = {
        "gpu": gpu["name"],
        "driver": products["machine"]["driver"],
        "date": products["measured_at"][:10],
        "products": [path.name for path in PRODUCTS],
        "beside": load_fit().provenance["sweep"],
        "shapes": len(own.problems),
        "points": len(own.us),
        "regret": judgement,
    }
    return {
        "arch": load_fit().arch,
        "made_on": {**{name: gpu[name] for name in ("sm_count", "cuda_driver")}, "gpu": gpu["name"]},
        "provenance": provenance,
        "features": list(FEATURES),
        "rates": rates._asdict(),
        **trees.to_json(),
        "torch_mm": torch.to_json(),
    }


if __name__ == "__main__":
    sys.exit(main())
