"""What the fit of GEMM times asks about kernels: a short roofline of their time, and features beside it.

Waves, k steps and bytes are counted with round constants, for all kernels of a set at once, in arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.arch import resident_clusters
from cutegen.families.gemm.problem import Problem

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Array = NDArray[numpy.float32]
    Doubles = NDArray[numpy.float64]

__all__ = [
    "FEATURES",
    "H200",
    "Cover",
    "KernelColumns",
    "Rates",
    "Scalars",
    "lying",
    "memory_bytes_us",
    "memory_us",
    "rooflines",
    "rooflines_of",
    "scalars",
]

#: Round constants of the roofline; the trees correct what they get wrong. Source: NVIDIA H100 and H200
#: datasheets for rates and L2; the rest as :class:`~cutegen.families.gemm.perf_model.gpu_params.Machine`.
_CLOCK_MHZ = 1755.0
_FLOPS_CLK = 4096 * 0.94
_SMEM_BYTES_CLK = 128 / 0.6
_L2_BYTES_US, _L2_BYTES_US_SM = 17e6, 0.2e6
_HBM_BYTES_US = 4.4e6
_EPILOGUE_CLK, _STORE_BYTES_CLK = 600.0, 14.0
#: Elements of a line of L2 and of its sectors; what :func:`lying` says of operands with ragged rows along k.
_LINE, _SECTOR, _RAGGED_K = 64, 16, -1.0
_FIXED_US, _REDUCE_US, _REDUCE_BYTES_US = 2.3, 1.0, 5e6
#: What the trees ask about, in the order of the rows of the array. Names ending in _log are logarithms.
FEATURES = (
    "tile_m_log", "tile_n_log", "tile_k", "cluster_m", "cluster_n", "mma_warpgroups", "pingpong", "swap_ab",
    "use_pdl", "split_log", "m_log", "n_log", "k_log", "waves_log", "last_wave", "compute_to_memory_log",
    "time_log", "reduce_part", "smem_to_mma_log", "l2_to_mma_log", "epilogue_part", "clusters_n", "inside_m",
    "inside_n", "steps_log", "sms_busy", "waves", "runs_along_m", "runs_along_n",
)  # fmt: skip
_STATIC = 9


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
            lines = np.where(along == _RAGGED_K, 1 + _LINE / self.tile_k, np.where(along >= 2, 2, 1))
            found = self._loads[sides] = self.load_bytes * lines
        return found

    def constant(self, sides: tuple[float, float]) -> Array:
        """Return the features with those rows that sizes do not decide but for ``sides``; others are zero."""
        import numpy as np

        found = np.zeros((len(FEATURES), len(self.tile_k)), np.float32)
        found[:_STATIC], found[18], found[27:29] = self.static, self.smem_to_mma_log, self.runs(sides)
        return found


def lying(m: int, n: int, k: int, layout: str) -> tuple[float, float]:
    """Return for A along m, and for B along n: 0 if it is contiguous along k, else 1; -1, 2 and 3 if ragged.

    Rows are ragged that do not all begin at multiples of 128 bytes: each piece that TMA fetches touches one
    line more. Along m and n, pieces are short: 3 says that rows begin within the 32 bytes of a sector, too.
    """
    along_k = _RAGGED_K if k % _LINE else 0.0
    return (
        _ragged(m) if layout[0] == "m" else along_k,
        _ragged(n) if layout[1] == "n" else along_k,
    )


def _ragged(size: int) -> float:
    return 1.0 + (size % _LINE != 0) + (size % _SECTOR != 0)


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
    """Return them, made once."""
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
    return problem.min_bytes / memory_bytes_us(rates)


def memory_bytes_us(rates: Rates) -> float:
    """Return the bytes of a microsecond that device memory moves at most."""
    return _HBM_BYTES_US * rates.memory


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


def rooflines_of(
    problem: Problem, configs: Sequence[Mapping[str, Any]], sm_count: int, rates: Rates
) -> tuple[Array, Array]:
    """Return what :func:`rooflines` says of complete configs, which split k as they say."""
    import numpy as np

    splits = np.array([config["split_k"] for config in configs], np.float32)
    return rooflines(problem, KernelColumns(configs, sm_count, rates), splits)
