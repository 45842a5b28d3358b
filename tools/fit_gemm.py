"""Fit the times of GEMM kernels to a recorded sweep, and say how well they choose on matrices left out.

python tools/fit_gemm.py            # the regret of the choice, on (n, k) that were not fitted
python tools/fit_gemm.py --write    # write cutegen/families/gemm/perf_model/fit_sm_90a.json as well

Needs catboost, which nothing else does.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cutegen.arch import find_arch
from cutegen.errors import CutegenError, StoreError
from cutegen.families.gemm.perf_model import judging
from cutegen.families.gemm.perf_model.fitted import FILE
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.judging import FOLDS, behind_best, folds, nearness
from cutegen.families.gemm.perf_model.kernel_set import kernel_set
from cutegen.families.gemm.perf_model.roofline import FEATURES, H200, KernelColumns, rooflines, rooflines_of
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import LAYOUTS, Problem
from cutegen.families.registry import find_space
from cutegen.space import Config, Value
from spaces.gemm.hopper_resources import lies_along_columns, loaded_columns
from tools.benchmark.drawn import ran_behind

_RESULTS = Path(__file__).parent.parent / "docs" / "results"
_MACHINE = find_machine(find_arch("sm_90a"))
SWEEP = _RESULTS / "gemm_sweep_h200.json.xz"
#: Products of all layouts, timed in the rounds of the library's call: of each the kernel that answered then,
#: by tools/bench_untuned.py (runs at 441a21f, d346310, 6ec03b4, 45a6942 and 58be366, by seed), or some that
#: the fit of that time put first, by tools/sweep_products.py.
PRODUCTS = (
    *(_RESULTS / f"untuned_seed{seed}.json.xz" for seed in (11, 20261123, 20261122, 12, 13)),
    _RESULTS / "gemm_products_h200.json.xz",
    _RESULTS / "gemm_products_h200_171.json.xz",
    _RESULTS / "gemm_products_h200_197.json.xz",
    _RESULTS / "gemm_products_h200_mn.json.xz",
    _RESULTS / "gemm_products_h200_223.json.xz",
    _RESULTS / "gemm_products_h200_257.json.xz",
    _RESULTS / "gemm_products_h200_401.json.xz",
    _RESULTS / "gemm_products_h200_419.json.xz",
    _RESULTS / "gemm_products_h200_521.json.xz",
    _RESULTS / "gemm_products_h200_701.json.xz",
    _RESULTS / "gemm_products_h200_711.json.xz",
    _RESULTS / "gemm_products_h200_801.json.xz",
    _RESULTS / "gemm_products_h200_811.json.xz",
    _RESULTS / "gemm_products_h200_911.json.xz",
    _RESULTS / "gemm_products_h200_921.json.xz",
    _RESULTS / "gemm_products_h200_931.json.xz",
    _RESULTS / "gemm_products_h200_1001.json.xz",
    _RESULTS / "gemm_products_h200_1013.json.xz",
    _RESULTS / "gemm_products_h200_1301.json.xz",
    _RESULTS / "gemm_products_h200_1701.json.xz",
)
#: Of older files, of which so many columns a tile's were loaded a multiple, unless it is one of 32, where an
#: operand is contiguous along them; 8 are what tiles have anyway. Kernels that load other columns today are
#: left out.
_LOADED_THEN = {
    **dict.fromkeys((f"untuned_seed{seed}" for seed in (11, 12, 13, 20261122, 20261123)), 8),
    **dict.fromkeys(("gemm_products_h200", "gemm_products_h200_171", "gemm_products_h200_197"), 8),
    **dict.fromkeys(("gemm_products_h100", "gemm_wide_h100"), 8),
    **dict.fromkeys(("gemm_products_h200_mn", "gemm_products_h100_mn"), 32),
    **dict.fromkeys(("gemm_products_h200_223", "gemm_products_h100_223"), 64),
}
#: Files whose kernels gave clusters of a GPC work units that follow each other. In other files of products
#: kernels with several clusters along both axes count nothing, since they load less today. Source: on
#: matrices left out the choice among kernels of the first of these is 0.96 % behind the best, and 1.08 % if
#: all count.
_BY_GPC = ("gemm_products_h200_1301", "gemm_products_h200_1701", "gemm_products_h100_1307")
#: Kernels behind one that writes A, some of them no default candidates. Of the runs there these two had
#: kernels with the cache policies of today.
MIDDLE = _RESULTS / "middle_m.json"
_MIDDLE_RUNS = ("b0f4563", "9bf4ec7")
#: More of them, of tiles that fit more numbers of rows, timed in brief rounds.
WIDE = _RESULTS / "wide_tiles.json.xz"
#: Words in the former of kernels that are no configs, and the largest value of ``swizzle_size``.
_BY_HAND, _MOST_SWIZZLE = ("rot", "3x1"), 8
#: Trees; deeper ones hardly choose better, and a first call waits for each. Source: on matrices left out the
#: choice among kernels of tools/sweep_products.py is 0.82 % behind the best; of 1,000 trees that learn at
#: 0.12, 0.81 %; of 500 at 0.2, 0.83 %.
DEPTH = 6
SETTINGS = {"depth": DEPTH, "iterations": 600, "learning_rate": 0.18, "l2_leaf_reg": 3.0, "random_seed": 0}
#: These order the kernels of a shape: what all of them are off by counts for nothing. Source: on matrices
#: left out the choice among all kernels is 1.4 % behind the best; of trees that fit times, 1.8 %.
ORDER = "QueryRMSE"
#: Trees that then say how long a shape takes, the same for all of its kernels.
LEVEL = {"depth": 5, "iterations": 80, "learning_rate": 0.15, "l2_leaf_reg": 3.0, "random_seed": 0}
_OF_SHAPE = ("m_log", "n_log", "k_log")
#: Kernels that answer by default count more. Source: on matrices left out their choice is 1.8 % behind the
#: best of all kernels, and 1.9 % with 4.
_DEFAULT_WEIGHT = 2.5
#: So do points that were timed beside the library, with younger kernels. Source: on matrices left out the
#: choice among kernels of tools/sweep_products.py is 1.0 % behind the best; 1.2 % if they count as others,
#: and 0.9 % with 8, while the choice among those of the sweep falls from 1.2 to 1.4 % behind, with either.
_SETTLED_WEIGHT = 4.0
#: And those that were timed behind another kernel, as winners are. Source: on matrices left out, with 2278
#: products timed so, the choice among their kernels is 1.0 % behind the best, and 1.0 % on those timed back
#: to back; 1.0 and 1.1 % if they count half as much again, 0.9 and 1.3 % twice as much (before 259 more
#: back to back), 1.1 and 1.0 % a third less.
_BEHIND_WEIGHT = 1.0
_UNIT = 1e-4
#: More than any feature is.
_NEVER = 1e30
#: Of the GPU that was measured.
_SM_COUNT = 132
#: Run-time knobs as sweeps name kernels, which they say nothing of.
_RUN_TIME: dict[str, Value] = {"swizzle_size": 1, "raster_along_m": False}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Points:
    """A sweep as arrays, one element for each timed config.

    Attributes:
        shape: Number of its shape.
        kernel: Number of its kernel.
        weights: Number of its (n, k).
        us: Measured microseconds; where timed twice, the geometric mean.
        roofline_us: By the roofline alone.
        features: One row for each point.
        default: Whether its kernel may answer by default.
        judge: Whether its shape was drawn to judge an earlier fit, so that few kernels were timed.
        settled: Whether it was timed in the rounds of the library's call, behind a burn-in: what times are
            predicted for. In the sweep each kernel ran on its own, at clocks of its own.
        behind: Whether it was timed behind another kernel: this says which kernel is faster, not what either
            takes back to back.
        moved: Whether its tiles were taken in another order, so that it counts nothing.
        sizes: m, n and k by number of shape.
    """

    shape: NDArray[np.intp]
    kernel: NDArray[np.intp]
    weights: NDArray[np.intp]
    us: Array
    roofline_us: Array
    features: Array
    default: NDArray[np.bool_]
    judge: NDArray[np.bool_]
    settled: NDArray[np.bool_]
    behind: NDArray[np.bool_]
    moved: NDArray[np.bool_]
    sizes: Sequence[tuple[int, int, int]]

    def only(self, chosen: NDArray[np.bool_]) -> Points:
        """Return some of the points; shapes, kernels and matrices keep their numbers."""
        parts = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name != "sizes"}
        return Points(**parts, sizes=self.sizes)

    @property
    def behind_best(self) -> Array:
        """Each time over the best of its shape."""
        return behind_best(self.shape, self.us)


def load(path: Path) -> tuple[dict[str, Any], Points]:
    """Return a sweep's file and its points.

    Raises:
        StoreError: The file cannot be read, or holds no sweep.
    """
    try:
        found = json.loads(lzma.decompress(path.read_bytes()))
        configs = [Config.parse(text) for text in found["kernels"]]
        kernel, split, us = (np.array(found["points"][name]) for name in ("kernel", "split_k", "us"))
    except (OSError, EOFError, LookupError, TypeError, ValueError, lzma.LZMAError, CutegenError) as error:
        raise StoreError(f"{path} holds no recorded sweep: {error}") from error
    us = us.astype(float)
    shapes = found["shapes"]
    counts = [row["points"] for row in shapes]
    starts = np.cumsum([0, *counts])
    times, features = [], []
    for row, start, end in zip(shapes, starts, starts[1:], strict=False):
        for place, again in row["again"]:
            us[start + place] = (us[start + place] * again) ** 0.5
        us[start:end] /= row.get("pace", 1.0)
        columns = KernelColumns([configs[i] for i in kernel[start:end]], found["sm_count"])
        problem = Problem(*row["mnk"])
        time, asked = rooflines(problem, columns, split[start:end].astype(np.float32))
        times.append(time)
        features.append(asked.T)
    pairs: dict[tuple[int, int], int] = {}
    numbers = [pairs.setdefault((row["mnk"][1], row["mnk"][2]), len(pairs)) for row in shapes]
    views = default_views()
    default = np.array([str(config) in views for config in configs])
    shape = np.repeat(np.arange(len(shapes)), counts)
    sizes = [tuple(row["mnk"]) for row in shapes]
    return found, Points(
        shape, kernel, np.array(numbers)[shape], us, np.concatenate(times), np.concatenate(features),
        default[kernel], np.array(["judge" in row for row in shapes])[shape], np.zeros(len(us), bool),
        np.zeros(len(us), bool), np.zeros(len(us), bool), sizes,
    )  # fmt: skip


def read_products(paths: Sequence[Path] = PRODUCTS) -> list[dict[str, Any]]:
    """Return the rows of files of products: of each its ``problem``, ``reference_us`` and ``points``.

    Times are what the library takes by the ratio. What has an epilogue, whose cost is no part of the fit, or
    rows of D that are not aligned, is left out, and so are kernels of another algorithm.
    """
    found = []
    for path in paths:
        data = path.read_bytes()
        document = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
        behind = ran_behind(document)
        for row in document["rows"]:
            problem = Problem.parse(row["problem"])
            alone = {"config": row.get("config"), "us": row["reference_us"] / row.get("ratio", 1.0)}
            points = [
                (config, point["us"])
                for point in row.get("points", [alone])
                for config in [Config.parse(point["config"])]
                if not config.algorithm
            ]
            name = path.name.partition(".")[0]
            line, tiling = _LOADED_THEN.get(name), Tiling(problem, _SM_COUNT, _MACHINE)
            points = [(config, us) for config, us in points if _loads_as_then(problem, config, line)]
            if points and problem.epilogue == Problem(8, 8, 8).epilogue and not problem.unaligned_out:
                points = in_order(problem, points)
                reference_us = row["reference_us"]
                moved = [name not in _BY_GPC and tiling.geometry(config).has_orders for config, _ in points]
                found.append(
                    {
                        "problem": problem, "reference_us": reference_us, "points": points,
                        "behind": behind, "moved": moved,
                    }
                )  # fmt: skip
    return found


def _loads_as_then(problem: Problem, config: Config, line: int | None) -> bool:
    """Return whether a kernel loads as many columns as when they were a multiple of ``line``."""
    tile, cluster = config.pair("tile_shape_mn"), config.pair("cluster_shape_mn")
    width, swap = tile[1], config.flag("swap_ab")
    if line is None or width % 32 == 0 or width < 32 or not lies_along_columns(swap, problem):
        return True
    return loaded_columns(tile, cluster, swap, problem) == -(-width // line) * line


def read_middle(path: Path = MIDDLE) -> list[dict[str, Any]]:
    """Return the rows of :data:`MIDDLE` as :func:`read_products` does, with what today's spaces have.

    Of a kernel that ran with tiles in several orders the best counts: a tuning tries both.
    """
    found = []
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for row in (row for run in runs if run["commit"][:7] in _MIDDLE_RUNS for row in run["rows"]):
        best: dict[Config, tuple[Config, float]] = {}
        for point in row["points"]:
            config = Config.parse(point["config"])
            changed = set(_BY_HAND) & set(point["words"].split())
            if config.algorithm or changed or config.integer("swizzle_size") > _MOST_SWIZZLE:
                continue
            kernel = config.replace(**_RUN_TIME)
            best[kernel] = min(best.get(kernel, (config, point["us"])), (config, point["us"]), key=_time)
        problem = Problem(row["m"], row["n"], row["k"])
        points = list(best.values())
        found.append({"problem": problem, "reference_us": row["torch_us"], "points": points, "behind": True})
    return found


def _time(point: tuple[Config, float]) -> float:
    return point[1]


def read_wide(path: Path = WIDE) -> list[dict[str, Any]]:
    """Return the rows of :data:`WIDE` as :func:`read_products` does."""
    found = []
    for row in json.loads(lzma.decompress(path.read_bytes()))["rows"]:
        problem, brief = Problem.parse(row["problem"]), row["brief"]
        points = in_order(problem, [(Config.parse(point["config"]), point["us"]) for point in brief])
        reference_us = brief[0]["us"] * brief[0]["ratio"]
        found.append({"problem": problem, "reference_us": reference_us, "points": points, "behind": True})
    return found


def read_others() -> list[dict[str, Any]]:
    """Return what was timed on the H200 beside the sweep."""
    return [*read_products(), *read_middle(), *read_wide()]


def in_order(problem: Problem, points: Sequence[tuple[Config, float]]) -> list[tuple[Config, float]]:
    """Return each kernel once; of those that were timed in several orders of tiles, what is chosen today."""
    kernels = kernel_set(find_space("gemm", find_arch("sm_90a")), problem, _SM_COUNT)
    found: dict[Config, tuple[Config, float]] = {}
    for config, us in points:
        kernel = config.replace(**_RUN_TIME)
        today = kernels.ordered(problem, config, config.integer("split_k"))
        if kernel not in found or config == today:
            found[kernel] = config, us
    return list(found.values())


def with_products(found: dict[str, Any], points: Points, rows: Sequence[dict[str, Any]]) -> Points:
    """Return the points of a sweep and those of products, whose shapes, kernels and matrices follow."""
    views = default_views()
    kernels = {text: at for at, text in enumerate(found["kernels"])}
    pairs = {(n, k): w for (_, n, k), w in zip(points.sizes, _matrix_of_shapes(points), strict=True)}
    parts: dict[str, list[Any]] = {f.name: [] for f in fields(Points) if f.name != "sizes"}
    sizes = list(points.sizes)
    for row in rows:
        problem, configs = row["problem"], [config for config, _ in row["points"]]
        names = [str(c.replace(split_k=2 if c["split_k"] != 1 else 1, **_RUN_TIME)) for c in configs]
        time, features = rooflines_of(problem, configs, found["sm_count"], H200)
        matrix = pairs.setdefault((problem.n, problem.k), len(pairs))
        own = {
            "shape": [len(sizes)] * len(configs), "weights": [matrix] * len(configs),
            "kernel": [kernels.setdefault(name, len(kernels)) for name in names],
            "us": [us for _, us in row["points"]], "roofline_us": time, "features": features.T,
            "default": [name in views for name in names], "judge": [False] * len(configs),
            "settled": [True] * len(configs), "behind": [row["behind"]] * len(configs),
            "moved": row.get("moved", [False] * len(configs)),
        }  # fmt: skip
        for name, values in own.items():
            parts[name].append(values)
        sizes.append((problem.m, problem.n, problem.k))
    joined = {name: np.concatenate([getattr(points, name), *values]) for name, values in parts.items()}
    return Points(**joined, sizes=sizes)


def _matrix_of_shapes(points: Points) -> list[int]:
    first = np.unique(points.shape, return_index=True)[1]
    return [int(number) for number in points.weights[first]]


def default_views() -> set[str]:
    """Return the kernels among which defaults are chosen, as sweeps name them."""
    space = find_space("gemm", find_arch("sm_90a"))
    problems = [Problem(4096, 4096, 4096, layout=layout) for layout in LAYOUTS]
    safe = space.default(problems[0])
    return {
        str(safe.replace(**knobs, **_RUN_TIME))
        for problem in problems
        for knobs in space.default_candidates(problem)
    }


def weights(points: Points) -> Array:
    """Return how much each point counts in a fit."""
    counts = np.where(points.default, _DEFAULT_WEIGHT, 1.0) * np.where(points.settled, _SETTLED_WEIGHT, 1.0)
    counts *= np.where(points.behind, _BEHIND_WEIGHT, 1.0) * ~points.moved
    return np.asarray(nearness(points.behind_best) * counts)


def train(points: Points, chosen: NDArray[np.bool_]) -> Trees:
    """Return trees fitted to some of the points: first those that order kernels, then those of the level."""
    weight = weights(points)[chosen]
    features, wanted = points.features[chosen], np.log(points.us / points.roofline_us)[chosen]
    order = boosted(SETTINGS, features, wanted, weight, points.shape[chosen])
    left = wanted - order.predict(features)
    asked = np.column_stack([features, points.settled[chosen]])
    others = [at for at, name in enumerate(FEATURES) if name not in _OF_SHAPE]
    weight = np.where(points.behind[chosen], 0.0, weight)
    level = boosted({**LEVEL, "ignored_features": others}, asked, left, weight)
    parts = (as_arrays(order, DEPTH), answered(as_arrays(level, int(LEVEL["depth"])), len(FEATURES)))
    return Trees.of(parts[0], len(FEATURES)).joined(Trees.of(parts[1], len(FEATURES)))


def answered(trees: dict[str, Any], feature: int) -> dict[str, Any]:
    """Return trees of which each question about ``feature`` is answered by yes; it is not asked any more."""
    pairs = [list(zip(*rows, strict=True)) for rows in zip(trees["asked"], trees["limits"], strict=True)]
    told = [[(0, -_NEVER) if at == feature else (at, limit) for at, limit in row] for row in pairs]
    return {
        **trees,
        "asked": [[at for at, _ in row] for row in told],
        "limits": [[limit for _, limit in row] for row in told],
    }


def boosted(
    settings: dict[str, Any],
    features: Array,
    wanted: Array,
    weight: Array | None = None,
    group: NDArray[np.intp] | None = None,
) -> Any:
    """Return trees fitted to ``wanted``, one row of ``features`` each.

    With a ``group`` of each row, groups side by side, they fit what sets its rows apart.
    """
    from catboost import CatBoost, Pool

    loss = "RMSE" if group is None else ORDER
    model = CatBoost(
        {"loss_function": loss, "thread_count": 2, "verbose": 0, "allow_writing_files": False, **settings}
    )
    return model.fit(Pool(features, wanted, weight=weight, group_id=group))


def left_out(points: Points) -> Array:
    """Return predicted microseconds, each by trees that have not seen its (n, k)."""
    fold = folds(points.weights)
    logs = np.log(points.roofline_us)
    for number in range(FOLDS):
        there = fold == number
        trees = train(points, ~there)
        rows = np.ascontiguousarray(points.features[there].T, np.float32)
        logs[there] += trees.sums(rows) + trees.base
    return np.asarray(np.exp(logs))


def regret(points: Points, predicted: Array, among: NDArray[np.bool_]) -> dict[str, float]:
    """Return how far the choice among some points is behind the best of them, and of all of the shape."""
    shape, us, predicted = points.shape[among], points.us[among], predicted[among]
    found = judging.regret(judging.regrets(shape, us, predicted))
    first = [places[0] for places in judging.choices(shape, predicted)]
    of_all = np.exp(np.log(points.behind_best[among][first]).mean()) - 1
    return {**found, "first_of_all": round(float(of_all), 4)}


def as_arrays(model: Any, depth: int) -> dict[str, Any]:
    """Return the trees in the arrays that the package evaluates."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trees.json"
        model.save_model(str(path), format="json")
        found = json.loads(path.read_text(encoding="utf-8"))
    scale, bias = found["scale_and_bias"]
    trees = found["oblivious_trees"]
    asked = [
        [tree["splits"][q]["float_feature_index"] if q < len(tree["splits"]) else 0 for tree in trees]
        for q in range(depth)
    ]
    limits = [
        [tree["splits"][q]["border"] if q < len(tree["splits"]) else _NEVER for tree in trees]
        for q in range(depth)
    ]
    leaves = [[round(scale * leaf / _UNIT) for leaf in tree["leaf_values"]] for tree in trees]
    leaves = [row + [0] * (2**depth - len(row)) for row in leaves]
    limits = [[float(f"{limit:.7g}") for limit in row] for row in limits]
    return {"unit": _UNIT, "base": round(bias[0], 6), "asked": asked, "limits": limits, "leaves": leaves}


def main() -> int:
    """Fit; print the regret, and write the fit if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the fit of all points")
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="file of a sweep")
    args = parser.parse_args()
    found, sweep = load(args.sweep)
    points = with_products(found, sweep, read_others())
    predicted = left_out(points)
    several = np.bincount(points.shape)[points.shape] > 1
    judged = {
        f"{among}{where}": regret(points, predicted, chosen & timed & several & ~points.judge & ~points.moved)
        for among, chosen in (("defaults", points.default), ("all", points.shape >= 0))
        for where, timed in (("", ~points.settled), (" of products", points.settled))
        if (timed & several).any()
    }
    print(json.dumps(judged, indent=1))
    if args.write:
        sizes = np.array(points.sizes)
        provenance = {
            **{name: found[name] for name in ("gpu", "sm_count", "driver", "torch", "cutegen")},
            "sweep": args.sweep.name, "points": len(sweep.us), "shapes": len(sweep.sizes),
            "products": len(sizes) - len(sweep.sizes), "points_of_products": int(points.settled.sum()),
            "shapes_that_judged_an_earlier_fit": sum("judge" in row for row in found["shapes"]),
            "kernels": len(found["kernels"]), "layout": "kk", "dtype": "bf16",
            "smallest": sizes.min(0).tolist(), "largest": sizes.max(0).tolist(),
            "regret_on_matrices_left_out": judged,
        }  # fmt: skip
        fit = {
            "arch": "sm_90a",
            "provenance": provenance,
            "features": FEATURES,
            **train(points, np.ones(len(points.us), bool)).to_json(),
        }
        FILE.write_text(lines(fit), encoding="utf-8")
    return 0


def lines(fit: dict[str, Any]) -> str:
    """JSON with one line for each tree or question."""
    parts = []
    for name, value in fit.items():
        if name in ("asked", "limits", "leaves"):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f'"{name}":[\n{rows}]')
        else:
            parts.append(f'"{name}":{json.dumps(value, indent=1)}')
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    sys.exit(main())
