"""Times of GEMM kernels as fitted to measurements: a short roofline, corrected by boosted trees.

The roofline counts waves, k steps and bytes with round constants; the trees, which ``tools/fit_gemm.py`` fits
to a recorded sweep of one GPU, correct the logarithm of its time by features of kernel and shape. All kernels
of a set are predicted at once, in arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.arch import resident_clusters
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float32]

__all__ = ["FEATURES", "FILE", "Fit", "KernelColumns", "fitted_us", "is_fitted", "load_fit", "rooflines"]

FILE = Path(__file__).with_name("fit_sm_90a.json")
#: Types that the sweep's kernels multiply at the same rate and load with the same bytes.
_DTYPES = ("bf16", "fp16")
#: Round constants of the roofline; the trees correct what they get wrong. Source: NVIDIA H100 and H200
#: datasheets for rates and L2; the rest as :class:`~cutegen.families.gemm.perf_model.gpu_params.Machine`.
_CLOCK_MHZ = 1755.0
_FLOPS_CLK = 8192 * 0.94
_SMEM_BYTES_CLK = 128 / 0.6
_L2_BYTES_US, _L2_BYTES_US_SM = 17e6, 0.2e6
_HBM_BYTES_US = 4.4e6
_EPILOGUE_CLK, _STORE_BYTES_CLK = 600.0, 14.0
_FIXED_US, _REDUCE_US, _REDUCE_BYTES_US = 2.3, 1.0, 5e6
#: What the trees ask about, in the order of the rows of the array. Names ending in _log are logarithms.
FEATURES = (
    "tile_m_log", "tile_n_log", "tile_k", "cluster_m", "cluster_n", "mma_warpgroups", "pingpong", "swap_ab",
    "use_pdl", "split_log", "m_log", "n_log", "k_log", "waves_log", "last_wave", "compute_to_memory_log",
    "time_log", "reduce_part", "smem_to_mma_log", "l2_to_mma_log", "epilogue_part", "clusters_n", "inside_m",
    "inside_n", "steps_log", "sms_busy", "waves",
)  # fmt: skip
_STATIC = 9
_LOOKED_AT = (
    "tile_shape_mn", "cluster_shape_mn", "tile_k", "swap_ab", "pingpong", "mma_warpgroups", "use_pdl",
)  # fmt: skip
#: Trees that look at every kernel, and the best of these that all trees look at: the rest is far behind.
_FIRST_TREES, _KEPT = 32, 12
#: Larger than any difference of logarithms of times.
_LAST = 100.0


def is_fitted(problem: Problem, arch: str) -> bool:
    """Return whether the fit says anything of ``problem``: 16-bit operands, on the GPU that was measured."""
    return problem.ab_dtype in _DTYPES and arch == load_fit().arch


class KernelColumns:
    """Knobs of many kernels in arrays, one element for each.

    Args:
        configs: Kernels of the Hopper GEMM space, of 16-bit operands. ``split_k`` is not looked at.
        sm_count: SMs of the GPU.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], sm_count: int) -> None:
        import numpy as np

        def column(values: Sequence[float]) -> Array:
            return np.array(values, np.float32)

        tiles = [config["tile_shape_mn"] for config in configs]
        clusters = [config["cluster_shape_mn"] for config in configs]
        self.tile_m, self.tile_n = column([t[0] for t in tiles]), column([t[1] for t in tiles])
        self.cluster_m, self.cluster_n = column([c[0] for c in clusters]), column([c[1] for c in clusters])
        self.tile_k = column([config["tile_k"] for config in configs])
        self.swap_ab = np.array([config["swap_ab"] for config in configs], bool)
        self.blocks = self.cluster_m * self.cluster_n
        self.resident = column([resident_clusters(sm_count, int(blocks)) for blocks in self.blocks])
        self.side_m, self.side_n = self.tile_m * self.cluster_m, self.tile_n * self.cluster_n
        self.sm_count = sm_count
        area = self.tile_m * self.tile_n
        self.tile_bytes = area * 4
        self.mma_us = area * self.tile_k * (2 / _FLOPS_CLK / _CLOCK_MHZ)
        moved = self.tile_m + self.tile_m / 64 * self.tile_n + self.tile_m + self.tile_n
        self.smem_us = moved * self.tile_k * (2 / _SMEM_BYTES_CLK / _CLOCK_MHZ)
        self.inner_us = np.maximum(self.mma_us, self.smem_us)
        self.smem_to_mma_log = np.log(self.smem_us / self.mma_us)
        self.epilogue_us = (_EPILOGUE_CLK + area * (2 / _STORE_BYTES_CLK)) / _CLOCK_MHZ
        self.pingpong = np.array([config["pingpong"] for config in configs], bool)
        groups = column([config["mma_warpgroups"] for config in configs])
        pdl = column([config["use_pdl"] for config in configs])
        static = (np.log(self.tile_m), np.log(self.tile_n), self.tile_k, self.cluster_m, self.cluster_n)
        self.static = np.stack([*static, groups, column(self.pingpong), column(self.swap_ab), pdl])  # type: ignore[arg-type]
        assert len(self.static) == _STATIC


def rooflines(problem: Problem, kernels: KernelColumns, splits: Array) -> tuple[Array, Array]:
    """Return microseconds by the roofline alone, and the features of :data:`FEATURES`, one row for each.

    Args:
        problem: What is computed, in 16 bits.
        kernels: By which kernels.
        splits: ``split_k`` of each.
    """
    import numpy as np

    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    c, log = kernels, np.log
    rows, cols = np.where(c.swap_ab, n, m), np.where(c.swap_ab, m, n)
    clusters_m, clusters_n = np.ceil(rows / c.side_m), np.ceil(cols / c.side_n)
    units = clusters_m * clusters_n * splits * batch
    rounds = units / c.resident
    waves, steps = np.ceil(rounds), np.ceil(k / c.tile_k / splits)
    busy = np.minimum(units, c.resident) * c.blocks
    loads = np.minimum(c.tile_m, rows) / c.cluster_n + np.minimum(c.tile_n, cols) / c.cluster_m
    l2_us = loads * c.tile_k * 2 / np.minimum(_L2_BYTES_US_SM, _L2_BYTES_US / busy)
    main = steps * np.maximum(c.inner_us, l2_us)
    alternating = (
        np.where(waves > 1, np.maximum(0.0, (c.epilogue_us - main) / 2) * waves, 0.0) + c.epilogue_us
    )
    epilogue = np.where(c.pingpong, alternating, waves * c.epilogue_us)
    compute = waves * main + epilogue
    memory = problem.min_bytes / _HBM_BYTES_US
    reduce = np.where(splits > 1, _REDUCE_US + units * c.blocks * c.tile_bytes / _REDUCE_BYTES_US, 0.0)
    time = _FIXED_US + reduce + np.maximum(compute, memory)
    found = np.empty((len(FEATURES), len(splits)), np.float32)
    found[:_STATIC] = c.static
    found[_STATIC] = log(splits)
    found[_STATIC + 1 : _STATIC + 4] = log(np.array([[m * batch], [n], [k]], np.float32))
    found[_STATIC + 4 :] = (
        log(rounds), rounds / waves, log(compute / memory), log(time), reduce / time, c.smem_to_mma_log,
        log(l2_us / c.mma_us), epilogue / time, np.minimum(clusters_n, 12), rows / (clusters_m * c.side_m),
        cols / (clusters_n * c.side_n), log(steps), busy / c.sm_count, np.minimum(waves, 8),
    )  # fmt: skip
    return time.astype(np.float32), found


@dataclass(frozen=True)
class Fit:
    """Trees, and what they were fitted to.

    Attributes:
        arch: The target that was measured.
        provenance: GPU, driver, versions, number of points, range of sizes, regret: for people.
        trees: Corrections of the logarithm of the roofline's time.
    """

    arch: str
    provenance: Mapping[str, Any]
    trees: Trees

    def times_us(self, problem: Problem, kernels: KernelColumns, splits: Array) -> Array:
        """Return the microseconds of each kernel in a graph, operands in device memory."""
        import numpy as np

        time, features = rooflines(problem, kernels, splits)
        found: Array = time * np.exp(self.trees.sums(features) + self.trees.base)
        return found

    def fastest(
        self, problem: Problem, kernels: KernelColumns, splits: Array, likely: NDArray[numpy.bool_]
    ) -> list[tuple[float, int]]:
        """Return times with the places of their kernels, fastest first; those far behind are coarse.

        The ``likely`` ones come before all others.
        """
        import numpy as np

        _, features = rooflines(problem, kernels, splits)
        logs = features[FEATURES.index("time_log")] + self.trees.sums(features, 0, _FIRST_TREES)
        order = np.where(likely, logs, logs + _LAST).argsort()
        kept = order[:_KEPT]
        logs[kept] += self.trees.sums(features[:, kept], _FIRST_TREES)
        kept = kept[np.where(likely[kept], logs[kept], logs[kept] + _LAST).argsort()]
        places = np.concatenate((kept, order[_KEPT:]))
        return list(zip(np.exp(logs[places] + self.trees.base).tolist(), places.tolist(), strict=True))


@cache
def load_fit() -> Fit:
    """Return the fit that the package ships."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return Fit(found["arch"], found["provenance"], Trees.of(found))


def fitted_us(problem: Problem, config: Config, sm_count: int) -> float:
    """Return the microseconds of one config by the fit that the package ships."""
    import numpy as np

    shape = tuple(config[knob] for knob in _LOOKED_AT)
    split = np.array([config.integer("split_k")], np.float32)
    return float(load_fit().times_us(problem, _columns_of(shape, sm_count), split)[0])


@lru_cache(maxsize=1024)
def _columns_of(values: tuple[Any, ...], sm_count: int) -> KernelColumns:
    return KernelColumns([dict(zip(_LOOKED_AT, values, strict=True))], sm_count)
