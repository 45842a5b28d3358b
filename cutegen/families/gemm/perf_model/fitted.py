"""Times of GEMM kernels as fitted to measurements: a short roofline, corrected by boosted trees.

The roofline counts waves, k steps and bytes with round constants; the trees, which ``tools/fit_gemm.py`` fits
to a recorded sweep of one GPU, correct the logarithm of its time by features of kernel and shape. All kernels
of a set are predicted at once, in arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.arch import Arch, Calibration, resident_clusters
from cutegen.errors import StoreError
from cutegen.families.gemm.perf_model.calibration_file import read_calibration
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config
from cutegen.text import shown

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float32]
    Doubles = NDArray[numpy.float64]

__all__ = [
    "FEATURES",
    "FILE",
    "FIRST_TREES",
    "H200",
    "KEPT",
    "LAST",
    "Cover",
    "Fit",
    "Found",
    "KernelColumns",
    "Look",
    "Rates",
    "Scalars",
    "fit_of",
    "fitted_times_us",
    "fitted_us",
    "is_fitted",
    "load_fit",
    "lying",
    "memory_us",
    "read_fit",
    "rooflines",
    "scalars",
]

FILE = Path(__file__).with_name("fit_sm_90a.json")
#: Types that the sweep's kernels multiply at the same rate and load with the same bytes.
_DTYPES = ("bf16", "fp16")
#: Round constants of the roofline; the trees correct what they get wrong. Source: NVIDIA H100 and H200
#: datasheets for rates and L2; the rest as :class:`~cutegen.families.gemm.perf_model.gpu_params.Machine`.
_CLOCK_MHZ = 1755.0
_FLOPS_CLK = 4096 * 0.94
_SMEM_BYTES_CLK = 128 / 0.6
_L2_BYTES_US, _L2_BYTES_US_SM = 17e6, 0.2e6
_HBM_BYTES_US = 4.4e6
_EPILOGUE_CLK, _STORE_BYTES_CLK = 600.0, 14.0
#: Elements of a line of L2; what :func:`lying` says of operands with ragged rows along k.
_LINE, _RAGGED_K = 64, -1.0
_FIXED_US, _REDUCE_US, _REDUCE_BYTES_US = 2.3, 1.0, 5e6
#: What the trees ask about, in the order of the rows of the array. Names ending in _log are logarithms.
FEATURES = (
    "tile_m_log", "tile_n_log", "tile_k", "cluster_m", "cluster_n", "mma_warpgroups", "pingpong", "swap_ab",
    "use_pdl", "split_log", "m_log", "n_log", "k_log", "waves_log", "last_wave", "compute_to_memory_log",
    "time_log", "reduce_part", "smem_to_mma_log", "l2_to_mma_log", "epilogue_part", "clusters_n", "inside_m",
    "inside_n", "steps_log", "sms_busy", "waves", "runs_along_m", "runs_along_n",
)  # fmt: skip
_STATIC = 9
_LOOKED_AT = (
    "tile_shape_mn", "cluster_shape_mn", "tile_k", "swap_ab", "pingpong", "mma_warpgroups", "use_pdl",
)  # fmt: skip
#: Trees that look at every kernel, and the best of these that all trees look at: the rest is far behind. Of
#: 1,800 random products seven get another kernel than all trees would choose, predicted to take 2 % longer at
#: most. With 32 trees of the fit before one got a kernel that they predict to take 9 % longer
#: (163x64640x7168, measured at 0.83 of torch.mm).
FIRST_TREES, KEPT = 48, 8
#: Larger than any difference of logarithms of times.
LAST = 100.0
_TIME_LOG = FEATURES.index("time_log")


def is_fitted(problem: Problem, arch: Arch) -> bool:
    """Return whether a fit says anything of ``problem``: 16-bit operands, and a target that was measured."""
    return problem.ab_dtype in _DTYPES and arch.name == load_fit().arch


class Rates(NamedTuple):
    """How fast a GPU is beside the H200 that the round constants are of.

    Attributes:
        clock: Of the SMs and of L2.
        memory: Bandwidth of device memory.
    """

    clock: float = 1.0
    memory: float = 1.0


H200 = Rates()


class KernelColumns:
    """Knobs of many kernels in arrays, one element for each.

    They are worked out in single precision, as the trees compare, and held in double precision, in which
    sizes of any problem are exact: numpy multiplies arrays of one type without a detour.

    Args:
        configs: Kernels of the Hopper GEMM space, of 16-bit operands. ``split_k`` is not looked at.
        sm_count: SMs of the GPU.
        rates: How fast it is.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], sm_count: int, rates: Rates = H200) -> None:
        import numpy as np

        def column(values: Sequence[Any]) -> Array:
            return np.array(values, np.float32)

        #: By axis of the kernel, m and then n.
        tiles = np.ascontiguousarray(column([config["tile_shape_mn"] for config in configs]).T)
        cluster = np.ascontiguousarray(column([config["cluster_shape_mn"] for config in configs]).T)
        self.tiles, self.sides = tiles.astype(float), (tiles * cluster).astype(float)
        #: Thread blocks that share what each loads along an axis.
        self.sharing = cluster[::-1].astype(float, "C")
        self.tile_k = column([config["tile_k"] for config in configs])
        self.swap_ab = np.array([config["swap_ab"] for config in configs], bool)
        #: Which of a problem's m and n the kernel's are.
        self.axes = np.stack([self.swap_ab, ~self.swap_ab]).astype(np.intp)
        blocks = cluster[0] * cluster[1]
        self.blocks = blocks.astype(float)
        self.resident = np.array([resident_clusters(sm_count, int(count)) for count in blocks], float)
        self.sms = np.array(float(sm_count))
        self.pingpong = np.array([config["pingpong"] for config in configs], bool)
        groups = column([config["mma_warpgroups"] for config in configs])
        pdl = column([config["use_pdl"] for config in configs])
        self.rates = rates
        self._runs: dict[tuple[float, float], Array] = {}
        self._loads: dict[tuple[float, float], Doubles] = {}
        self._time_tiles(*tiles)
        static = (*np.log(tiles), self.tile_k, *cluster)
        switches = (groups, self.pingpong, self.swap_ab, pdl)
        self.static = np.stack([*static, *(np.asarray(row, np.float32) for row in switches)])
        assert len(self.static) == _STATIC

    def _time_tiles(self, tile_m: Array, tile_n: Array) -> None:
        """Work out what a k step and an epilogue of each kernel take, and what its partial sums do."""
        import numpy as np

        area = tile_m * tile_n
        self.sum_us = self.blocks * area * 4 / _REDUCE_BYTES_US
        #: What a thread block itself loads for each row of its tile of an operand.
        self.load_bytes = self.tile_k.astype(float) * 2 / self.sharing
        mhz = _CLOCK_MHZ * self.rates.clock
        mma_us = area * self.tile_k * (2 / _FLOPS_CLK / mhz)
        moved = tile_m + tile_m / 64 * tile_n + tile_m + tile_n
        smem_us = moved * self.tile_k * (2 / _SMEM_BYTES_CLK / mhz)
        self.smem_to_mma_log = np.log(smem_us / mma_us)
        self.mma_us, self.inner_us = mma_us.astype(float), np.maximum(mma_us, smem_us).astype(float)
        self.epilogue_us = ((_EPILOGUE_CLK + area * (2 / _STORE_BYTES_CLK)) / mhz).astype(float)
        self.l2_us = np.array(_L2_BYTES_US * self.rates.clock)
        self.l2_us_sm = np.array(_L2_BYTES_US_SM * self.rates.clock)

    def runs(self, sides: tuple[float, float]) -> Array:
        """Return how each kernel's operands lie along its m and n; ``sides`` is what :func:`lying` says."""
        import numpy as np

        found = self._runs.get(sides)
        if found is None:
            along = np.array(sides, np.float32)[:, None]
            found = self._runs[sides] = np.where(self.swap_ab, along[::-1], along)
        return found

    def loads(self, sides: tuple[float, float]) -> Doubles:
        """Return the bytes that L2 reads for what a thread block loads for each row of its tiles."""
        import numpy as np

        found = self._loads.get(sides)
        if found is None:
            along = self.runs(sides)
            # A piece of a ragged row lies in one line more than its bytes fill: one, or two of a wide k tile.
            lines = np.where(along == _RAGGED_K, 1 + _LINE / self.tile_k, np.where(along == 2, 2, 1))
            found = self._loads[sides] = self.load_bytes * lines
        return found

    def constant(self, sides: tuple[float, float]) -> Array:
        """Return the features with those rows that sizes do not decide but for ``sides``; others are zero."""
        import numpy as np

        found = np.zeros((len(FEATURES), len(self.tile_k)), np.float32)
        found[:_STATIC], found[18], found[27:29] = self.static, self.smem_to_mma_log, self.runs(sides)
        return found


def lying(m: int, n: int, k: int, layout: str) -> tuple[float, float]:
    """Return for A along m, and for B along n: 0 if it is contiguous along k, else 1; -1 and 2 if ragged.

    Rows are ragged that do not all begin at multiples of 128 bytes: each piece that TMA fetches touches one
    line more.
    """
    along_k = _RAGGED_K if k % _LINE else 0.0
    return (
        1.0 + (m % _LINE != 0) if layout[0] == "m" else along_k,
        1.0 + (n % _LINE != 0) if layout[1] == "n" else along_k,
    )


class Found(NamedTuple):
    """A kernel that was looked at.

    Attributes:
        time_us: Its time.
        at: Its place among all.
        split: Its ``split_k``.
        likely: Whether it suits the problem.
    """

    time_us: float
    at: int
    split: int
    likely: bool


class Look(NamedTuple):
    """A first look at kernels, one element for each.

    Attributes:
        logs: Logarithms of times by the first trees.
        likely: Whether it suits the problem.
        splits: Its ``split_k``.
        more: What the other trees add, for some of the kernels by their places.
    """

    logs: Array
    likely: NDArray[numpy.bool_]
    splits: Array
    more: Callable[[NDArray[numpy.intp]], Array]


class Scalars(NamedTuple):
    """Numbers as arrays without axes, which numpy takes in half the time that it needs for Python's."""

    none: Doubles
    half: Doubles
    one: Doubles
    most_waves: Doubles
    most_clusters: Doubles
    fixed_us: Doubles
    reduce_us: Doubles


@cache
def scalars() -> Scalars:
    import numpy as np

    return Scalars(*(np.array(number) for number in (0.0, 0.5, 1.0, 8.0, 12.0, _FIXED_US, _REDUCE_US)))


class Cover(NamedTuple):
    """How kernels cover a problem: by axis of the kernel, m and then n, and for each kernel.

    Attributes:
        extents: Sizes along the kernel's m and n.
        clusters: Clusters of tiles along these.
        total: Clusters of all batches.
    """

    extents: Doubles
    clusters: Doubles
    total: Doubles

    @classmethod
    def of(cls, problem: Problem, kernels: KernelColumns) -> Cover:
        """Return how each of the kernels covers ``problem``."""
        import numpy as np

        extents = np.array((problem.m, problem.n), float).take(kernels.axes)
        clusters = np.ceil(extents / kernels.sides)
        return cls(extents, clusters, clusters[0] * clusters[1] * problem.batch)


def memory_us(problem: Problem, rates: Rates) -> float:
    """Return the microseconds that device memory needs at least."""
    return problem.min_bytes / (_HBM_BYTES_US * rates.memory)


def rooflines(
    problem: Problem,
    kernels: KernelColumns,
    splits: Array,
    cover: Cover | None = None,
) -> tuple[Array, Array]:
    """Return microseconds by the roofline alone, and the features of :data:`FEATURES`, one row for each.

    Args:
        problem: What is computed, in 16 bits.
        kernels: By which kernels.
        splits: ``split_k`` of each.
        cover: How they cover it, where that is known already.
    """
    import numpy as np

    c, one = kernels, scalars()
    extents, clusters, total = cover or Cover.of(problem, kernels)
    k = np.array(problem.k, np.float32)
    parts = splits.astype(float)
    units = total * parts
    rounds = units / c.resident
    waves, steps = np.ceil(rounds), np.ceil(k / c.tile_k / splits)
    busy = np.minimum(units, c.resident)
    busy *= c.blocks
    inside = np.minimum(c.tiles, extents)
    sides = lying(problem.m, problem.n, problem.k, problem.layout)
    loads = inside * c.loads(sides)
    l2_us = loads[0] + loads[1]
    l2_us /= np.minimum(c.l2_us_sm, c.l2_us / busy)
    main = steps.astype(float)
    main *= np.maximum(c.inner_us, l2_us)
    # Two groups take turns: one's epilogue hides behind the other's main loop, if there is another tile.
    turns = c.epilogue_us - main
    turns *= one.half
    np.maximum(turns, one.none, out=turns)
    turns *= waves
    np.putmask(turns, waves <= one.one, one.none)
    turns += c.epilogue_us
    epilogue = waves * c.epilogue_us
    np.putmask(epilogue, c.pingpong, turns)
    compute = waves * main
    compute += epilogue
    memory = np.array(memory_us(problem, c.rates))
    reduce = units * c.sum_us
    reduce += one.reduce_us
    np.putmask(reduce, parts <= one.one, one.none)
    time = one.fixed_us + reduce
    time += np.maximum(compute, memory)
    found = np.empty((len(FEATURES), len(splits)), np.float32)
    found[:_STATIC] = c.static
    found[_STATIC] = np.log(splits)
    sizes = np.log(np.array((problem.m * problem.batch, problem.n, problem.k), np.float32))
    found[_STATIC + 1 : _STATIC + 4] = sizes[:, None]
    # The last tiles end with D and take as long as others, unless D is smaller than a tile.
    inside /= c.tiles
    found[13], found[14], found[15] = np.log(rounds), rounds / waves, np.log(compute / memory)
    found[16], found[17], found[18] = np.log(time), reduce / time, c.smem_to_mma_log
    found[19], found[20] = np.log(l2_us / c.mma_us), epilogue / time
    found[21], found[22:24] = np.minimum(clusters[1], one.most_clusters), inside
    found[24], found[25], found[26] = np.log(steps), busy / c.sms, np.minimum(waves, one.most_waves)
    found[27:29] = c.runs(sides)
    return time.astype(np.float32), found


@dataclass(frozen=True)
class Fit:
    """Trees, and what they were fitted to.

    Attributes:
        arch: The target that was measured.
        provenance: GPU, driver, versions, number of points, range of sizes, regret: for people.
        trees: Corrections of the logarithm of the roofline's time.
        rates: How fast the GPU is beside the H200.
    """

    arch: str
    provenance: Mapping[str, Any]
    trees: Trees
    rates: Rates = H200

    def times_us(self, problem: Problem, kernels: KernelColumns, splits: Array) -> Array:
        """Return the microseconds of each kernel in a graph, operands in device memory."""
        import numpy as np

        time, features = rooflines(problem, kernels, splits)
        found: Array = time * np.exp(self.trees.sums(features) + self.trees.base)
        return found

    def look(
        self,
        problem: Problem,
        kernels: KernelColumns,
        splits: Array,
        likely: NDArray[numpy.bool_],
        cover: Cover | None = None,
    ) -> Look:
        """Return what the first trees say of each kernel."""
        _, features = rooflines(problem, kernels, splits, cover)
        logs = features[_TIME_LOG] + self.trees.sums(features, 0, FIRST_TREES)
        return Look(logs, likely, splits, lambda kept: self.trees.sums(features.take(kept, 1), FIRST_TREES))

    def fastest(self, look: Look, most: int = KEPT) -> Iterator[Found]:
        """Yield kernels, fastest first; the times of those behind the ``most`` are coarse.

        The likely ones come before all others, and equals in the order in which they are given.
        """
        import numpy as np

        logs = look.logs
        last = ~look.likely * np.float32(LAST)
        order = (logs + last).argsort(kind="stable")
        kept = order[:most]
        best = logs.take(kept) + look.more(kept)
        again = (best + last.take(kept)).argsort(kind="stable")
        for found, places in ((best.take(again), kept.take(again)), (None, order[most:])):
            found = logs.take(places) if found is None else found
            times = np.exp(found + self.trees.base).tolist()
            for time_us, at in zip(times, places.tolist(), strict=True):
                yield Found(time_us, at, int(look.splits[at]), bool(look.likely[at]))


@cache
def load_fit() -> Fit:
    """Return the fit that the package ships."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return Fit(found["arch"], found["provenance"], Trees.of(found, len(FEATURES), FIRST_TREES))


def fit_of(arch: Arch) -> Fit:
    """Return the fit that predictions for ``arch`` follow from: that of its calibration, else the shipped.

    Raises:
        StoreError: The file of its calibration cannot be read, or is none.
    """
    return load_fit() if arch.calibration is None else _calibrated(arch.calibration)


@lru_cache(maxsize=8)
def _calibrated(calibration: Calibration) -> Fit:
    return read_fit(Path(calibration.path), calibration.digest)


def read_fit(path: Path, digest: str = "") -> Fit:
    """Return the fit in a file that a calibration wrote.

    Args:
        path: The file.
        digest: Of the content that is meant; empty for any.

    Raises:
        StoreError: There is no such file, or it is no fit that this version of cutegen understands.
    """
    found = read_calibration(path, digest)
    if found.get("arch") != load_fit().arch:
        raise StoreError(
            f"calibration {path} is for {shown(found.get('arch'))}; "
            f"times are fitted for {load_fit().arch} alone"
        )
    try:
        if found["features"] != list(FEATURES):
            raise StoreError(f"calibration {path} was made by another version of cutegen; calibrate again")
        rates = Rates(**found["rates"])
        if not all(0.01 < rate < 100 for rate in rates):
            raise StoreError(
                f"calibration {path} says that the GPU is {max(rates):g} times as fast as an H200"
            )
        trees = Trees.of(found, len(FEATURES), FIRST_TREES)
        return Fit(str(found["arch"]), found["provenance"], trees, rates)
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise StoreError(f"calibration {path} is malformed: {type(error).__name__}: {error}") from error


def fitted_us(problem: Problem, config: Config, sm_count: int, fit: Fit | None = None) -> float:
    """Return the microseconds of one config by a fit, the one that the package ships by default."""
    import numpy as np

    fit = fit or load_fit()
    shape = tuple(config[knob] for knob in _LOOKED_AT)
    split = np.array([config.integer("split_k")], np.float32)
    return float(fit.times_us(problem, _columns_of(shape, sm_count, fit.rates), split)[0])


def fitted_times_us(problem: Problem, configs: Sequence[Config], sm_count: int, fit: Fit) -> list[float]:
    """Return the microseconds of many configs by a fit."""
    if not configs:
        return []
    columns, splits = _columns_of_all(tuple(configs), sm_count, fit.rates)
    return [float(time) for time in fit.times_us(problem, columns, splits)]


@lru_cache(maxsize=4)
def _columns_of_all(configs: tuple[Config, ...], sm_count: int, rates: Rates) -> tuple[KernelColumns, Array]:
    import numpy as np

    splits = np.array([config["split_k"] for config in configs], np.float32)
    return KernelColumns(configs, sm_count, rates), splits


@lru_cache(maxsize=1024)
def _columns_of(values: tuple[Any, ...], sm_count: int, rates: Rates) -> KernelColumns:
    return KernelColumns([dict(zip(_LOOKED_AT, values, strict=True))], sm_count, rates)
