"""Analytic estimate of how long one config takes on one problem, without a GPU.

The estimate follows one thread block through its work units: per k step the slowest of tensor cores,
shared memory, L2 and load latency; per tile the epilogue, hidden or not; per launch the rounds of a
persistent grid. Device memory bounds it from the other side, and the clock falls when the power that
the work would draw at full clock exceeds the limit.

What is calibrated: the constants of :class:`~cutegen.families.gemm.perf_model.gpu_params.Machine`, by hand,
against 29 shapes timed on one H200 with cuBLAS, QuACK and NVIDIA's example kernel; with that kernel's tiles
the estimates are within 12 % for 26 of them and up to 30 % too optimistic where few rows stream large
weights. What is not: split-k contention, direct stores, fused epilogues, programmatic launch, layouts other
than kk and every other GPU follow from reasoning alone. Trust the order of configs more than the
microseconds, and neither as much as a measurement.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.perf_model.gpu_params import Machine, find_machine, is_measured
from cutegen.families.gemm.perf_model.traffic import Geometry, Tiling
from cutegen.families.gemm.perf_model.wave_order import Order
from cutegen.families.gemm.problem import FACTOR_BLOCK, LAYOUTS, Epilogue, Problem

__all__ = ["Estimate", "Estimator", "KernelCost", "Prediction", "predict"]


#: fp32 operations per output element. Source: instruction counts of the usual expansions, assumed.
_ACTIVATION_OPS = {"": 0, "relu": 1, "silu": 10, "gelu_tanh": 14, "gelu": 28}
_LINE_BYTES = 128  # of L2
_LANES = 128  # fp32 lanes of one SM
_FEW_ROWS = 16384  # with more rows in flight their addresses spread over the channels by themselves
_STREAM_PARTS = 32  # more are not worth adding up
#: Least clocks of a block of k whose sums leave the tensor cores, to be multiplied by factors. Source: tiles
#: of 64x32 on an H200, 13.3 us for 56 blocks one after another at 1980 MHz, less launch and first loads.
_FACTORS_CLK = 300
#: Clocks in which a warpgroup waits for the sums of 64 rows and a block of k and adds them up, for each of
#: their columns, and for each factor of a column of its own; and the share of them in which no other
#: warpgroup multiplies, by how many there are. Source: an H200 on 6 shapes of 4096 rows, tiles of 96 and 128
#: columns (docs/results/gemm_blocks.json), within 6 %; factors of columns by counting instructions.
_GAP_CLK, _GAP_CLK_COLUMN, _GAP_CLK_FACTOR = 170, 1.4, 2
_GAP_SHARE = {1: 1.0, 2: 0.45, 3: 0.3}
_GAP_SHARE_AHEAD = {1: 0.4, 2: 0.2, 3: 0.2}


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


class KernelCost(NamedTuple):
    """What one compiled kernel costs, in clocks unless named otherwise, whatever its run-time arguments."""

    shape: Geometry
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
    stream: bool
    arrival: bool
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
        sm_count: SMs of the GPU.
        machine: Beliefs about the GPU; the architecture's by default.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """

    def __init__(self, problem: Problem, arch: Arch, sm_count: int, machine: Machine | None = None) -> None:
        machine = machine or find_machine(arch)
        self.problem = problem
        self._arch = arch
        self._tiling = Tiling(problem, sm_count, machine)
        self._machine = machine
        self._in_bytes = DTYPE_BYTES[problem.ab_dtype]
        self._out_bytes = DTYPE_BYTES[problem.out_dtype]
        self._slow_a, self._slow_b = (self._slowdown(axis) for axis in LAYOUTS[problem.layout])
        few_rows = problem.m + problem.n <= _FEW_ROWS and problem.layout == "kk"
        self._row_bytes = problem.k * self._in_bytes if few_rows else 0
        self._epilogue_ops = _epilogue_ops(problem.epilogue)

    def predict(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> Prediction:
        """Return the estimate for ``config`` with its parts by name."""
        return _explain(self.estimate(config, derived))

    def estimate(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> Estimate:
        """Return the estimate for ``config``; ``derived`` is what its space derives from it."""
        traffic = self.traffic(config, config.get("swizzle_size", 1), config.get("raster_along_m", False))
        return self._launch(self._kernel(config, derived), config.get("split_k", 1), traffic)

    def traffic(self, config: Mapping[str, Any], swizzle: int, along_m: bool) -> float:
        """Return the bytes that cross device memory when tiles are rasterized in this order."""
        return self._tiling.traffic(config, swizzle, along_m)

    def least_loads(self, config: Mapping[str, Any], orders: Sequence[Order]) -> Order | None:
        """Return that of the orders of least traffic with which GPCs load least.

        None on GPUs of which it is not known how GPCs take turns.
        """
        if not is_measured(self._arch) or not self._tiling.knows_turns:
            return None
        return self._tiling.best_order(config, 1, orders)

    def fastest_split(
        self, config: Mapping[str, Any], derived: Mapping[str, Any], splits: Iterable[int], traffic: float
    ) -> tuple[float, int]:
        """Return the best of several values of ``split_k`` for one kernel: microseconds and the value.

        ``traffic`` is what :meth:`traffic` says of the rasterization; its own is not looked at.
        """
        kernel = self._kernel(config, derived)
        return min((self._launch(kernel, split, traffic).time_us, split) for split in splits)

    def parts_per_round(self, config: Mapping[str, Any]) -> float:
        """Return the ``split_k`` at which all work units run at once, just filling the GPU."""
        shape = self._tiling.geometry(config)
        return shape.resident / shape.clusters

    def _kernel(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> KernelCost:
        machine, p = self._machine, self.problem
        tile_m, tile_n = config["tile_shape_mn"]
        cm, cn = config["cluster_shape_mn"]
        tile_k = config.get("tile_k", 64)
        pingpong = config.get("pingpong", False)
        swap = config.get("swap_ab", False)
        rows, cols = self._tiling.sizes(swap)
        line = tile_k * self._in_bytes
        # Each 64-row slab reads its rows of A and the whole of B; loads write every row, outside ones too.
        loaded = derived.get("loaded_n", tile_n)
        smem_bytes = (tile_m + tile_m // 64 * tile_n + tile_m + loaded) * line
        slow_m, slow_n = (self._slow_b, self._slow_a) if swap else (self._slow_a, self._slow_b)
        side_m, side_n = min(tile_m, rows) / cn * line, min(loaded, cols) / cm * line
        step_bytes = side_m + side_n
        shape = self._tiling.geometry(config)
        groups = 1 if pingpong else config.get("mma_warpgroups", 1)
        inside = p.m * p.n * p.batch / (shape.clusters * shape.blocks * tile_m * tile_n)
        area = tile_m * tile_n
        store = machine.store_bytes_clk * min(groups, 3)
        rate = store * (1.0 if config.get("use_tma_store", True) else machine.direct_share)
        moved = area * inside * self._out_bytes * (2 if p.epilogue.beta else 1)
        launch_us = machine.launch_us + machine.fill_us - (machine.pdl_us if config.get("use_pdl") else 0.0)
        return KernelCost(
            shape=shape,
            steps=ceil(p.k / tile_k),
            mma=self._multiply(area, tile_k, overlaps=groups > 1)
            + self._gaps(config, groups, ahead=bool(derived.get("ahead"))),
            smem=smem_bytes / self._arch.smem_bytes_per_clk * machine.smem_overlap,
            step_bytes=side_m * slow_m + side_n * slow_n,
            step_heat=shape.blocks * (step_bytes * machine.l2_flops + smem_bytes * machine.smem_flops),
            latency_us=machine.latency_us / derived["stages"],
            sync=1.0 + machine.cluster_wait * (shape.blocks - 1),
            launch_us=launch_us + (0.15 if shape.blocks > 1 else 0.0),
            epilogue=machine.epilogue_clk + moved / rate + self._epilogue_clocks(area),
            split_epilogue=machine.epilogue_clk + area * 4 / store,
            split_bytes=shape.clusters * shape.blocks * area * 4.0,
            pingpong=pingpong,
            stream=config.get("stream_k", False),
            arrival=config.get("reduction", "fixed") == "arrival",
            hbm_rate=machine.hbm_bytes_us * (1.0 if line >= 256 else machine.short_run),
            work=p.flops
            * self._in_bytes
            / 2
            * (0.7 + 0.3 / inside),  # products with the zeros outside burn less
        )

    def _epilogue_clocks(self, area: int) -> float:
        """Clocks that the operations of the epilogue take on a tile of so many elements."""
        return area * self._epilogue_ops / _LANES

    def shape_of(self, config: Mapping[str, Any]) -> Hashable:
        """Return what decides how tiles cover the output, and so how good each order of them is."""
        return config["tile_shape_mn"], config["cluster_shape_mn"], config.get("swap_ab", False)

    def _slowdown(self, axis: str) -> float:
        """By how much an operand that is contiguous along ``axis`` loads more slowly from L2."""
        pitch = getattr(self.problem, axis) * self._in_bytes
        return 1.0 if pitch % _LINE_BYTES == 0 else self._machine.split_line

    def _multiply(self, area: int, tile_k: int, overlaps: bool) -> float:
        """Clocks of the tensor cores for one k step; 8-bit operands go twice as fast.

        Promotion waits for the products of the step and adds them up outside. Warpgroups that share a tile
        hide half of that behind each other's products; one that multiplies alone hides nothing.
        """
        flops_clk = self._arch.mma_flops_per_clk * 2 / self._in_bytes
        clocks = 2 * area * tile_k / flops_clk / self._machine.mma_efficiency
        if self.problem.promote and not self.problem.has_factors:
            additions = area / _LANES
            clocks += 0.5 * additions if overlaps else additions + self._machine.drain_clk
        return clocks

    def _gaps(self, config: Mapping[str, Any], warpgroups: int, *, ahead: bool) -> float:
        """Clocks of one k step in which sums with factors are added up and nobody multiplies.

        ``warpgroups`` take turns at multiplying; who runs ahead multiplies meanwhile.
        """
        if not self.problem.has_factors:
            return 0.0
        tile_m, tile_n = config["tile_shape_mn"]
        gap = _GAP_CLK + _GAP_CLK_COLUMN * tile_n
        if config.get("swap_ab", False):
            gap += _GAP_CLK_FACTOR * tile_n / 4
        share = (_GAP_SHARE_AHEAD if ahead else _GAP_SHARE)[warpgroups]
        steps = tile_m // 64 * -(-config.get("tile_k", 64) // FACTOR_BLOCK)
        return float(share * gap * steps)

    def _launch(self, kernel: KernelCost, split: int, traffic: float) -> Estimate:
        machine, shape = self._machine, kernel.shape
        units = shape.clusters * split
        steps = -(-kernel.steps // split)
        waves, parts = self._schedule(kernel, units, steps)
        active = min(units, shape.resident) * shape.blocks
        l2_us = kernel.step_bytes / min(machine.l2_bytes_us_sm, machine.l2_bytes_us / active)
        spill, reduce_us = self._reduction(kernel, split, parts)
        hbm_us = (traffic + spill) / (kernel.hbm_rate * self._channel_share(split))
        fixed = kernel.launch_us + reduce_us
        heat = kernel.work + traffic * machine.hbm_flops + units * steps * kernel.step_heat
        mhz = machine.boost_mhz
        sm_us, epilogue_us = self._block(kernel, waves, steps, split, parts, l2_us, mhz)
        busy = _longer(sm_us, hbm_us)
        settled = self._clock(heat / (busy + fixed))
        if settled < mhz:
            mhz = settled
            sm_us, epilogue_us = self._block(kernel, waves, steps, split, parts, l2_us, mhz)
            busy = _longer(sm_us, hbm_us)
        return Estimate(
            fixed + busy,
            waves,
            waves * steps if parts == 1 else (waves - 1) * steps - (-steps // parts),
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

    def _schedule(self, kernel: KernelCost, units: int, steps: int) -> tuple[int, int]:
        """Rounds of work, and into how many parts along k stream-k cuts each tile of the last one."""
        whole, rest = divmod(units, kernel.shape.resident)
        if not kernel.stream or not rest:
            return whole + (rest > 0), 1
        return whole + 1, max(1, min(kernel.shape.resident // rest, steps // 4, _STREAM_PARTS))

    def _block(
        self, kernel: KernelCost, waves: int, steps: int, split: int, parts: int, l2_us: float, mhz: float
    ) -> tuple[float, float]:
        """Microseconds of the busiest thread block, and what of it no main loop hides."""
        step = _soft_max(kernel.mma / mhz, kernel.smem / mhz, l2_us, kernel.latency_us)
        least = self._machine.step_clk
        if self.problem.has_factors:
            least = _FACTORS_CLK * -(-self.problem.k // FACTOR_BLOCK) / kernel.steps
        step = max(step * kernel.sync, least / mhz)
        main = steps * step
        epilogue = (kernel.split_epilogue if split > 1 else kernel.epilogue) / mhz
        if parts > 1:
            exposed = (waves - 1) * epilogue + kernel.split_epilogue / mhz
            return (waves - 1) * main - (-steps // parts) * step + exposed, exposed
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

    def _channel_share(self, split: int) -> float:
        """Share of memory bandwidth left when all rows and parts start at the same memory channel."""
        aligned = self._row_bytes and self._row_bytes % (self._machine.channel_period * split) == 0
        return self._machine.same_channel if aligned else 1.0

    def _reduction(self, kernel: KernelCost, split: int, parts: int) -> tuple[float, float]:
        """Bytes of partial sums that leave L2, and microseconds that adding them up takes."""
        machine, shape = self._machine, kernel.shape
        if parts > 1:
            partial = kernel.split_bytes * min(1.0, shape.resident / shape.clusters)
            return 0.0, machine.reduce_us + partial / machine.reduce_bytes_us
        if split == 1:
            return 0.0, 0.0
        partial = kernel.split_bytes * split
        if kernel.arrival:  # no second kernel, but every sum is a read and a write in L2
            return 0.0, 0.3 * machine.reduce_us + 2 * partial / machine.reduce_bytes_us
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
        sm_count: SMs of the GPU.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """
    return Estimator(problem, arch, sm_count).predict(config, derived)


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
