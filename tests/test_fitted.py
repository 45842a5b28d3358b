"""Times fitted to measurements: what the trees say, and what defaults they choose."""

from __future__ import annotations

import json
import lzma
import math
from itertools import islice, product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from fake_kernels import H200

from cutegen.arch import find_arch
from cutegen.build import Toolchain
from cutegen.families.gemm.perf_model.fitted import fitted_us, is_fitted, load_fit
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.judging import choices
from cutegen.families.gemm.perf_model.kernel_set import default_kernels, kernel_set
from cutegen.families.gemm.perf_model.roofline import FEATURES, KernelColumns, rooflines
from cutegen.families.gemm.perf_model.traffic import Tiling
from cutegen.families.gemm.perf_model.wave_order import least_loads
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.entry import Entry, Fingerprint
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import Answer, look_up
from cutegen.space import Config
from spaces.gemm.hopper_resources import loaded_columns
from tools import replay

SPACE = find_space("gemm", find_arch("sm_90a"))
SWEEP = Path(__file__).parents[1] / "docs" / "results" / "gemm_sweep_h200.json.xz"


def test_trees_add_up_one_by_one() -> None:
    """The arrays give what following each tree's questions gives."""
    fit, problem = load_fit(), Problem(100, 4096, 2048)
    kernels = default_kernels(SPACE, problem)[::7]
    columns, splits = KernelColumns(kernels, 132), np.ones(len(kernels), np.float32)
    times, features = rooflines(problem, columns, splits)
    assert features.shape == (len(FEATURES), len(kernels))
    got, trees = fit.times_us(problem, columns, splits), fit.trees
    for row in range(len(kernels)):
        total = trees.base
        for tree in range(len(trees)):
            answers = [
                features[trees.asked[q, tree], row] > trees.limits[q, tree] for q in range(trees.depth)
            ]
            total += trees.leaves[tree, sum(int(yes) << q for q, yes in enumerate(answers))]
        assert got[row] == pytest.approx(times[row] * np.exp(total), rel=1e-4)
        assert fitted_us(problem, kernels[row].replace(split_k=1), 132) == pytest.approx(got[row], rel=1e-5)


def test_what_was_measured_is_fitted() -> None:
    """16 bits on Hopper; nothing is said of other types and targets."""
    assert is_fitted(Problem(64, 64, 64), SPACE.arch) and is_fitted(
        Problem(64, 64, 64, ab_dtype="fp16"), SPACE.arch
    )
    assert not is_fitted(Problem(64, 64, 64, ab_dtype="e4m3"), SPACE.arch)
    assert not is_fitted(Problem(64, 64, 64), find_arch("sm_100a"))


def test_choices_come_fastest_first_and_valid() -> None:
    """The first few are the exact minimum; the coarse rest follows."""
    for mnk in ((1, 8192, 8192), (100, 4096, 14336), (700, 6144, 4096), (8000, 1024, 1024)):
        problem = Problem(*mnk)
        found = list(islice(kernel_set(SPACE, problem, 132).by_time(problem), 4))
        times = [time for time, _ in found]
        assert times == sorted(times) and len(found) == 4
        for time, config in found:
            SPACE.require(problem, config)
            assert fitted_us(problem, config, 132) == pytest.approx(time, rel=1e-4)


def test_kernels_side_by_side_are_kernels_alone() -> None:
    """Bit for bit: no kernel's prediction depends on what is predicted beside it."""
    fit, generator = load_fit(), np.random.default_rng(1)
    kernels = default_kernels(SPACE, Problem(64, 64, 64))
    together = KernelColumns(kernels, 132)
    for m, n, k in ((1, 8, 8), (77, 1024, 4096), (4097, 520, 72), (20000, 50000, 8192)):
        for problem in (Problem(m, n, k), Problem(m, n, k, batch=3)):
            splits = generator.integers(1, 34, len(kernels)).astype(np.float32)
            times, features = rooflines(problem, together, splits)
            sums = fit.trees.sums(features, 32)
            for at in range(0, len(kernels), 5):
                alone = KernelColumns([kernels[at]] * 2, 132)
                time, feature = rooflines(problem, alone, splits[[at, at]])
                assert time[0] == times[at] and (feature[:, 0] == features[:, at]).all()
                assert fit.trees.sums(feature, 32)[0] == sums[at]


def test_the_choice_is_that_of_a_plain_search() -> None:
    """Rules asked as users ask them, splits and orders counted in integers, and kernels sorted in Python."""
    generator = np.random.default_rng(2)
    for _ in range(60):
        m, n, k = (int(x) for x in 20000 ** generator.random(3))
        problem = Problem(m, 8 * n, 8 * k, any_order=bool(m % 2), out_dtype=("bf16", "fp32")[n % 2])
        found = kernel_set(SPACE, problem, 132).fastest(problem)
        assert (found.config if found else None) == _plain_choice(problem)


#: Rules that forbid most; who breaks one is asked last.
_STRICT = {
    "swap_ab_is_for_narrow_m", "cluster_is_no_larger_than_problem", "split_k_leaves_work",
    "split_k_is_for_few_tiles",
}  # fmt: skip


def _plain_choice(problem: Problem) -> Config | None:
    """The fastest default kernel: 48 trees choose sixteen, all trees order these."""
    fit, configs = load_fit(), []
    tiling = Tiling(problem, 132, find_machine(SPACE.arch))
    for kernel in default_kernels(SPACE, problem):
        shape, most = tiling.geometry(kernel), min(33, problem.k // (4 * kernel.integer("tile_k")))
        whole = kernel["split_k"] == 1
        filling = [1] if whole else [r * shape.resident // shape.clusters for r in (1, 2)]
        configs += [kernel.replace(split_k=s if whole else min(max(s, 2), max(most, 2))) for s in filling]
    splits = np.array([config["split_k"] for config in configs], np.float32)
    _, features = rooflines(problem, KernelColumns(configs, 132), splits)
    coarse = features[FEATURES.index("time_log")] + fit.trees.sums(features, 0, 48)
    fine = coarse + fit.trees.sums(features, 48)
    broken = [{violation.rule for violation in SPACE.explain(problem, config)} for config in configs]
    order = sorted(range(len(configs)), key=lambda i: (bool(broken[i] & _STRICT), coarse[i]))
    best = sorted(order[:16], key=lambda i: (bool(broken[i] & _STRICT), fine[i])) + order[16:]
    chosen = next((configs[i] for i in best if not broken[i]), None)
    if chosen is None:
        return None
    orders = [(s, along) for s in (1, 2, 4, 8) for along in (False, True)]
    split = chosen.integer("split_k")
    if not tiling.is_one_wave(chosen, split):
        traffic = [tiling.traffic(chosen, *order) for order in orders]
        orders = [
            order for order, bytes_ in zip(orders, traffic, strict=True) if bytes_ <= 1.01 * min(traffic)
        ]
    swizzle, along = least_loads(tiling.wave(chosen, split), orders)
    return chosen.replace(swizzle_size=swizzle, raster_along_m=along)


def test_c_is_not_read_along_columns_of_wide_tiles() -> None:
    """Products with beta, more than 32 rows and unaligned D get kernels that are not swapped; others are
    as without beta."""
    for m in (8, 32, 33, 136, 400, 3000):
        for n in (3584, 3588):
            plain, added = (
                Problem.parse(f"gemm {m}x{n}x4096 bf16 kk {words}".strip()) for words in ("", "beta")
            )
            found = [kernel_set(SPACE, p, 132).fastest(p) for p in (plain, added)]
            swapped = [each is not None and each.config["swap_ab"] for each in found]
            assert swapped[1] == (swapped[0] and (m <= 32 or n == 3584))


def test_operands_along_m_and_n_have_candidates_of_their_own() -> None:
    """More thread blocks share what their tiles load; other layouts and other families do without."""
    plain = default_kernels(SPACE, Problem(512, 4096, 4096))
    for layout in ("kn", "mn", "mk"):
        found = default_kernels(SPACE, Problem(512, 4096, 4096, layout=layout))
        own = found[len(plain) :]
        assert found[: len(plain)] == plain and len(set(found)) == len(found)
        assert len(own) > 30 and sum(math.prod(c.pair("cluster_shape_mn")) == 4 for c in own) > 15
        problem = Problem(456, 5120, 4096, layout=layout)
        likely = kernel_set(SPACE, problem, 132).by_time(problem, rest=False)
        widths = {config.pair("tile_shape_mn")[1] % 64 for _, config in likely}
        assert widths == {*range(0, 64, 8)}


@pytest.mark.parametrize(
    ("columns", "clusters", "loaded"),
    [
        *((32, 1, 32), (40, 1, 64), (72, 1, 128), (72, 2, 96), (88, 4, 96), (96, 1, 96), (104, 2, 128)),
        *((136, 1, 192), (136, 2, 192), (160, 1, 160), (200, 4, 256), (224, 2, 224), (256, 1, 256)),
    ],
)
def test_whole_lines_are_loaded(columns: int, clusters: int, loaded: int) -> None:
    """Where an operand is contiguous along columns of the tile; otherwise as many as it has."""
    for layout, swap in product(("kk", "kn", "mn", "mk"), (False, True)):
        problem = Problem(512, 4096, 4096, layout=layout)
        along = layout[0] == "m" if swap else layout[1] == "n"
        found = loaded_columns((128, columns), (clusters, 1), swap, problem)
        assert found == (loaded if along else columns)


def test_the_provenance_is_that_of_the_sweep() -> None:
    """People can see what the numbers come from."""
    sweep = json.loads(lzma.decompress(SWEEP.read_bytes()))
    said = load_fit().provenance
    assert said["gpu"] == sweep["gpu"] and said["driver"] == sweep["driver"] and said["sweep"] == SWEEP.name
    assert said["points"] == len(sweep["points"]["us"]) and said["shapes"] == len(sweep["shapes"])
    assert said["regret_on_matrices_left_out"]["defaults"]["first"] < 0.02


def test_replayed_defaults_are_near_the_best() -> None:
    """A fifth of the sweep: the first choice among timed defaults, against the best timed kernel."""
    found, points, configs = replay.read(SWEEP, 5)
    assert len({points.kernel[i] for i in np.flatnonzero(points.default)}) == 109  # of 174
    predicted = replay.by_fit(load_fit(), points, configs, found["sm_count"])
    places = np.flatnonzero(points.default)
    first = [places[order[0]] for order in choices(points.shape[places], predicted[places])]
    logs = np.log(points.behind_best[first])
    assert len(logs) > 150
    assert logs.mean() < 0.04 and logs.max() < 0.5


def test_a_table_of_some_sizes_makes_the_others_no_slower() -> None:
    """Matrices of the sweep, every third m tuned: the others, measured, with the table and without."""
    sweep = json.loads(lzma.decompress(SWEEP.read_bytes()))
    views, points, start = [Config.parse(text) for text in sweep["kernels"]], sweep["points"], 0
    rows: dict[Problem, dict[Config, float]] = {}
    for row in sweep["shapes"]:
        here, start = range(start, start + row["points"]), start + row["points"]
        if "judge" not in row and row["mnk"][0] > 4:
            chosen = (views[points["kernel"][i]].replace(split_k=points["split_k"][i]) for i in here)
            rows[Problem(*row["mnk"])] = dict(zip(chosen, (points["us"][i] for i in here), strict=True))
    logs = []
    for n, k in ((1536, 4096), (7168, 9216), (5120, 1024), (2048, 2048), (24576, 4096), (10240, 8192)):
        asked = sorted((p for p in rows if (p.n, p.k) == (n, k)), key=lambda p: p.m)
        tuned = [Entry(p, min(rows[p], key=lambda c, p=p: rows[p][c])) for p in asked[::3]]  # type: ignore[misc]
        fingerprint = Fingerprint.of(H200, Toolchain.current())
        table = Table(fingerprint, [e for e in tuned if e.config and not SPACE.explain(e.problem, e.config)])
        assert len(table) >= 3
        for problem in set(asked) - set(asked[::3]):
            taken = [_measured(rows[problem], look_up(t, problem, SPACE, 132, "none")) for t in (table, None)]
            if taken[0] is not None and taken[1] is not None:
                logs.append(np.log(taken[0] / taken[1]))
    assert len(logs) > 20 and fmean(logs) < 0.005 and max(logs) < 0.15


def _measured(times: dict[Config, float], answer: Answer) -> float | None:
    assert answer.config is not None
    return times.get(answer.config.replace(swizzle_size=1, raster_along_m=False))
