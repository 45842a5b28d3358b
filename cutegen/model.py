"""Analytic estimate of how long one config takes on one problem, without a GPU.

The estimate follows one thread block through its work units: per k step the slowest of tensor cores,
shared memory, L2 and load latency; per tile the epilogue, hidden or not; per launch the rounds of a
persistent grid. Device memory bounds it from the other side, and the clock falls when the power that
the work would draw at full clock exceeds the limit.

What is calibrated: the constants of :class:`cutegen.machine.Machine`, by hand, against 29 shapes timed on
one H200 with cuBLAS, QuACK and NVIDIA's example kernel; with that kernel's tiles the estimates are within
12 % for 26 of them and up to 30 % too optimistic where few rows stream large weights. What is not: split-k
contention, direct stores, fused epilogues, programmatic launch, layouts other than tn and every other GPU
follow from reasoning alone. Trust the order of configs more than the microseconds, and neither as much as
a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from cutegen.arch import Arch
from cutegen.machine import Machine, find_machine
from cutegen.problem import DTYPE_BYTES, Epilogue, Problem

__all__ = ["Estimate", "Estimator", "Prediction", "predict", "resident_clusters"]


#: fp32 operations per output element. Source: instruction counts of the usual expansions, assumed.
_ACTIVATION_OPS = {"": 0, "relu": 1, "silu": 10, "gelu_tanh": 14, "gelu": 28}
_LANES = 128  # fp32 lanes of one SM


@dataclass(frozen=True)
class Prediction:
    """An estimate; never a measurement.

    Attributes:
        time_us: Microseconds of one launch in a graph, inputs in device memory.
        waves: Work units that the busiest thread block takes in turn.
        bound: What costs most: ``mma``, ``smem``, ``l2``, ``latency``, ``hbm``, ``epilogue`` or ``launch``.
        terms: The parts in microseconds, plus ``clock_mhz`` and ``hbm_mb``. They overlap: no sum.
    """

    time_us: float
    waves: int
    bound: str
    terms: Mapping[str, float]


class _Geometry(NamedTuple):
    """How tiles of one shape cover the output."""

    clusters_m: int
    clusters_n: int
    clusters: int
    resident: int
    blocks: int


class _Kernel(NamedTuple):
    """What one compiled kernel costs, in clocks unless named otherwise, whatever its run-time arguments."""

    shape: _Geometry
    steps: int
    mma: float
    smem: float
    step_bytes: float
    step_heat: float
    latency_us: float
    sync: float
    launch_us: float
    epilogue: float
    split_epilogue: float
    split_bytes: float
    pingpong: bool
    hbm_rate: float
    work: float


class Estimate(NamedTuple):
    """The numbers behind a :class:`Prediction`, cheap enough to make by the thousand."""

    time_us: float
    waves: int
    steps: int
    sm_us: float
    hbm_us: float
    fixed_us: float
    reduce_us: float
    mhz: float
    traffic: float
    mma_us: float
    smem_us: float
    l2_us: float
    latency_us: float
    epilogue_us: float


class Estimator:
    """Estimates many configs of one problem, sharing what they have in common.

    Args:
        problem: What is computed.
        arch: The target; it must have a machine or be given one.
        sm_count: Multiprocessors of the GPU.
        machine: Beliefs about the GPU; the architecture's by default.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """

    def __init__(self, problem: Problem, arch: Arch, sm_count: int, machine: Machine | None = None) -> None:
        machine = machine or find_machine(arch)
        self.problem = problem
        self._arch = arch
        self._sm_count = sm_count
        self._machine = machine
        self._in_bytes = DTYPE_BYTES[problem.ab_dtype]
        self._out_bytes = DTYPE_BYTES[problem.out_dtype]
        self._epilogue_ops = _epilogue_ops(problem.epilogue)
        self._shapes: dict[Any, _Geometry] = {}
        self._traffic: dict[Any, float] = {}

    def predict(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> Prediction:
        """Return the estimate for ``config`` with its parts by name."""
        return _explain(self.estimate(config, derived))

    def estimate(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> Estimate:
        """Return the estimate for ``config``; ``derived`` is what its space derives from it."""
        traffic = self.traffic(config, config.get("swizzle_size", 1), config.get("raster_along_m", False))
        return self._launch(self._kernel(config, derived), config.get("split_k", 1), traffic)

    def estimates(
        self, config: Mapping[str, Any], derived: Mapping[str, Any], splits: Iterable[int]
    ) -> list[tuple[Estimate, int]]:
        """Return the estimates of one kernel for several values of ``split_k``, each with its value."""
        kernel = self._kernel(config, derived)
        traffic = self.traffic(config, config.get("swizzle_size", 1), config.get("raster_along_m", False))
        return [(self._launch(kernel, split, traffic), split) for split in splits]

    def parts_per_round(self, config: Mapping[str, Any]) -> float:
        """Return the ``split_k`` at which all work units run at once, just filling the GPU."""
        shape = self._geometry(config)
        return shape.resident / shape.clusters

    def traffic(self, config: Mapping[str, Any], swizzle: int, along_m: bool) -> float:
        """Return the bytes that cross device memory when tiles are walked in this order."""
        key = (
            config["tile_shape_mn"],
            config["cluster_shape_mn"],
            config.get("swap_ab", False),
            swizzle,
            along_m,
        )
        known = self._traffic.get(key)
        if known is None:
            known = self._traffic[key] = self._walk(config, swizzle, along_m)
        return known

    def _extents(self, swap: bool) -> tuple[int, int]:
        p = self.problem
        return (p.n, p.m) if swap else (p.m, p.n)

    def _geometry(self, config: Mapping[str, Any]) -> _Geometry:
        key = (config["tile_shape_mn"], config["cluster_shape_mn"], config.get("swap_ab", False))
        known = self._shapes.get(key)
        if known is None:
            (tile_m, tile_n), (cm, cn), swap = key
            rows, cols = self._extents(swap)
            clusters_m, clusters_n = ceil(rows / (tile_m * cm)), ceil(cols / (tile_n * cn))
            clusters = clusters_m * clusters_n * self.problem.batch
            known = _Geometry(
                clusters_m, clusters_n, clusters, resident_clusters(self._sm_count, cm * cn), cm * cn
            )
            self._shapes[key] = known
        return known

    def _walk(self, config: Mapping[str, Any], swizzle: int, along_m: bool) -> float:
        """Device memory traffic: each round of resident clusters covers a patch and loads its two sides."""
        p, shape = self.problem, self._geometry(config)
        (tile_m, tile_n), (cm, cn) = config["tile_shape_mn"], config["cluster_shape_mn"]
        rows, cols = self._extents(config.get("swap_ab", False))
        major, minor = shape.clusters_n, shape.clusters_m
        if along_m:
            major, minor = minor, major
        band = min(swizzle, minor)
        resident = min(shape.resident, shape.clusters_m * shape.clusters_n)
        deep = min(major, resident / band)
        wide = min(minor, max(band, resident / major))
        patch_m, patch_n = (deep, wide) if along_m else (wide, deep)
        rounds = max(1.0, shape.clusters_m * shape.clusters_n / resident)
        line = p.k * self._in_bytes
        loads = 0.0
        for extent, loaded in ((rows, patch_m * tile_m * cm), (cols, patch_n * tile_n * cn)):
            once = extent * line * p.batch
            again = max(0.0, rounds * min(loaded, extent) * line * p.batch - once)
            loads += once + again * self._miss(once / p.batch)
        out = p.m * p.n * self._out_bytes * p.batch * (2 if p.epilogue.beta else 1)
        return loads + out

    def _miss(self, operand_bytes: float) -> float:
        """Share of an operand's re-reads that L2 no longer holds: none when small, all when large."""
        return min(1.0, max(0.0, (operand_bytes / self._machine.l2_bytes - 0.3) / 0.5))

    def _kernel(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> _Kernel:
        machine, p = self._machine, self.problem
        tile_m, tile_n = config["tile_shape_mn"]
        cm, cn = config["cluster_shape_mn"]
        tile_k = config.get("tile_k", 64)
        pingpong = config.get("pingpong", False)
        rows, cols = self._extents(config.get("swap_ab", False))
        line = tile_k * self._in_bytes
        # Each 64-row slab reads its rows of A and the whole of B; loads write every row, outside ones too.
        smem_bytes = (tile_m + tile_m // 64 * tile_n + tile_m + tile_n) * line
        step_bytes = (min(tile_m, rows) / cn + min(tile_n, cols) / cm) * line
        shape = self._geometry(config)
        groups = 1 if pingpong else config.get("mma_warpgroups", 1)
        inside = p.m * p.n * p.batch / (shape.clusters * shape.blocks * tile_m * tile_n)
        area = tile_m * tile_n
        store = machine.store_bytes_clk * min(groups, 3)
        rate = store * (1.0 if config.get("use_tma_store", True) else machine.direct_share)
        math = area * self._epilogue_ops / _LANES
        moved = area * inside * self._out_bytes * (2 if p.epilogue.beta else 1)
        launch_us = machine.launch_us + machine.fill_us - (machine.pdl_us if config.get("use_pdl") else 0.0)
        return _Kernel(
            shape=shape,
            steps=ceil(p.k / tile_k),
            mma=2 * area * tile_k / self._arch.mma_flops_per_clk / machine.mma_efficiency,
            smem=smem_bytes / self._arch.smem_bytes_per_clk * machine.smem_overlap,
            step_bytes=step_bytes,
            step_heat=shape.blocks * (step_bytes * machine.l2_flops + smem_bytes * machine.smem_flops),
            latency_us=machine.latency_us / derived["stages"],
            sync=1.0 + machine.cluster_wait * (shape.blocks - 1),
            launch_us=launch_us + (0.15 if shape.blocks > 1 else 0.0),
            epilogue=machine.epilogue_clk + moved / rate + math,
            split_epilogue=machine.epilogue_clk + area * 4 / store,
            split_bytes=shape.clusters * shape.blocks * area * 4.0,
            pingpong=pingpong,
            hbm_rate=machine.hbm_bytes_us * (1.0 if line >= 256 else machine.short_run),
            work=p.flops * (0.7 + 0.3 / inside),  # products with the zeros outside burn less
        )

    def _launch(self, kernel: _Kernel, split: int, traffic: float) -> Estimate:
        machine, shape = self._machine, kernel.shape
        units = shape.clusters * split
        waves = -(-units // shape.resident)
        steps = -(-kernel.steps // split)
        active = min(units, shape.resident) * shape.blocks
        l2_us = kernel.step_bytes / min(machine.l2_bytes_us_sm, machine.l2_bytes_us / active)
        spill, reduce_us = self._reduction(kernel, split)
        hbm_us = (traffic + spill) / kernel.hbm_rate
        fixed = kernel.launch_us + reduce_us
        heat = kernel.work + traffic * machine.hbm_flops + units * steps * kernel.step_heat
        mhz = machine.boost_mhz
        sm_us, epilogue_us = self._block(kernel, waves, steps, split, l2_us, mhz)
        busy = _longer(sm_us, hbm_us)
        settled = self._clock(heat / (busy + fixed))
        if settled < mhz:
            mhz = settled
            sm_us, epilogue_us = self._block(kernel, waves, steps, split, l2_us, mhz)
            busy = _longer(sm_us, hbm_us)
        return Estimate(
            fixed + busy,
            waves,
            waves * steps,
            sm_us,
            hbm_us,
            fixed,
            reduce_us,
            mhz,
            traffic + spill,
            kernel.mma / mhz,
            kernel.smem / mhz,
            l2_us,
            kernel.latency_us,
            epilogue_us,
        )

    def _block(
        self, kernel: _Kernel, waves: int, steps: int, split: int, l2_us: float, mhz: float
    ) -> tuple[float, float]:
        """Microseconds of the busiest thread block, and what of it no main loop hides."""
        step = _soft_max(kernel.mma / mhz, kernel.smem / mhz, l2_us, kernel.latency_us)
        main = steps * max(step * kernel.sync, self._machine.step_clk / mhz)
        epilogue = (kernel.split_epilogue if split > 1 else kernel.epilogue) / mhz
        if not kernel.pingpong or waves == 1:
            return waves * (main + epilogue), waves * epilogue
        # Two groups take turns: one's epilogue hides behind the other's main loop.
        total = waves * max(main, (main + epilogue) / 2) + epilogue
        return total, total - waves * main

    def _clock(self, flops_us: float) -> float:
        """SM clock in MHz under work that would draw so many flop equivalents per microsecond at boost."""
        machine = self._machine
        above = flops_us - machine.power_flops
        if above <= 0.0:
            return machine.boost_mhz
        span = machine.settled_flops - machine.power_flops
        if above < span:
            return machine.boost_mhz - (machine.boost_mhz - machine.settled_mhz) * above / span
        return float(machine.settled_mhz * (machine.settled_flops / flops_us) ** machine.settled_exponent)

    def _reduction(self, kernel: _Kernel, split: int) -> tuple[float, float]:
        """Bytes of partial sums that leave L2, and microseconds of the kernel that adds them up."""
        if split == 1:
            return 0.0, 0.0
        machine = self._machine
        partial = kernel.split_bytes * split
        spill = max(0.0, 2 * (partial - 0.5 * machine.l2_bytes))
        return spill, machine.reduce_us + 0.02 * split + partial / machine.reduce_bytes_us


def predict(
    problem: Problem, config: Mapping[str, Any], derived: Mapping[str, Any], arch: Arch, sm_count: int
) -> Prediction:
    """Return how long ``config`` should take on ``problem``; use :class:`Estimator` for many configs.

    Args:
        problem: What is computed.
        config: All knobs of the kernel.
        derived: What the space derives from them; ``stages`` is used.
        arch: The target.
        sm_count: Multiprocessors of the GPU.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """
    return Estimator(problem, arch, sm_count).predict(config, derived)


def resident_clusters(sm_count: int, blocks: int) -> int:
    """Return how many clusters of ``blocks`` thread blocks run at once, one block per multiprocessor.

    Clusters do not cross GPCs of 16 or 18 multiprocessors, so those of four leave two of each 18 idle.
    Source: derived from 132 = 6 x 16 + 2 x 18; ask the driver for the truth.
    """
    if blocks <= 2:
        return max(1, sm_count // blocks)
    return max(1, (sm_count - sm_count % 16) // blocks)


def _epilogue_ops(epilogue: Epilogue) -> int:
    parts = (epilogue.alpha, epilogue.beta, bool(epilogue.bias))
    return 2 + 2 * sum(parts) + _ACTIVATION_OPS[epilogue.activation]


def _soft_max(a: float, b: float, c: float, d: float) -> float:
    """The largest, a little more when others are close (a 6-norm): resources do not overlap perfectly."""
    top = max(a, b, c, d)
    a, b, c, d = a / top, b / top, c / top, d / top
    a, b, c, d = a * a, b * b, c * c, d * d
    return float(top * (a * a * a + b * b * b + c * c * c + d * d * d) ** (1.0 / 6.0))


def _longer(a: float, b: float) -> float:
    """The larger of two times, a little more when they are close."""
    if a < b:
        a, b = b, a
    ratio = (b / a) ** 3
    return float(a * (1.0 + ratio * ratio) ** (1.0 / 6.0))


def _explain(e: Estimate) -> Prediction:
    parts = {
        "mma": e.steps * e.mma_us,
        "smem": e.steps * e.smem_us,
        "l2": e.steps * e.l2_us,
        "latency": e.steps * e.latency_us,
        "epilogue": e.epilogue_us,
    }
    bound = "hbm" if e.hbm_us > e.sm_us else max(parts, key=parts.__getitem__)
    if e.fixed_us > e.time_us / 2:
        bound = "launch"
    terms = {f"{name}_us": value for name, value in parts.items()}
    terms |= {"sm_us": e.sm_us, "hbm_us": e.hbm_us, "reduce_us": e.reduce_us}
    terms |= {"launch_us": e.fixed_us - e.reduce_us, "clock_mhz": e.mhz, "hbm_mb": e.traffic / 1e6}
    return Prediction(e.time_us, e.waves, bound, terms)
