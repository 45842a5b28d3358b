"""The analytic estimate for Blackwell's kernels: the same physics, with other tiles and other roles.

One warp multiplies; sums lie in tensor memory, twice, so that a tile is stored while the next is computed;
and two thread blocks may share an MMA, each reading half of B. Nothing was measured on such a GPU: see the
sources in :mod:`~cutegen.families.gemm.perf_model.gpu_params`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from math import ceil
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gemm.perf_model.estimator import Estimate, Estimator, KernelCost
from cutegen.families.gemm.perf_model.gpu_params import Machine
from cutegen.families.gemm.problem import Problem

__all__ = ["BlackwellEstimator", "estimator_of"]

#: Bytes of a tile along k: the span of the shared-memory swizzle.
_ROW_BYTES = 128
#: Rows of a thread block at which an MMA runs at its full rate; with half of them at half of it, whatever
#: its columns. Source: SemiAnalysisAI/microbench-blackwell, tcgen05.mma of 64 and 128 rows.
_FULL_ROWS = 128
#: Share of the writes of loads to shared memory that delays reads of it. Source: assumed.
_WRITES = 0.25


class BlackwellEstimator(Estimator):
    """Estimates configs of the Blackwell space; as :class:`Estimator`."""

    def estimate(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> Estimate:
        """Return the estimate for ``config``."""
        return super().estimate(_as_tiles(config), derived)

    def traffic(self, config: Mapping[str, Any], swizzle: int, along_m: bool) -> float:
        """Return the bytes that cross device memory when tiles are rasterized in this order."""
        return super().traffic(_as_tiles(config), swizzle, along_m)

    def fastest_split(
        self, config: Mapping[str, Any], derived: Mapping[str, Any], splits: Iterable[int], traffic: float
    ) -> tuple[float, int]:
        """Return the best of several values of ``split_k`` for one kernel: microseconds and the value."""
        return super().fastest_split(_as_tiles(config), derived, splits, traffic)

    def parts_per_round(self, config: Mapping[str, Any]) -> float:
        """Return the ``split_k`` at which all work units run at once, just filling the GPU."""
        return super().parts_per_round(_as_tiles(config))

    def shape_of(self, config: Mapping[str, Any]) -> Hashable:
        """Return what decides how tiles cover the output."""
        return super().shape_of(_as_tiles(config))

    def _kernel(self, config: Mapping[str, Any], derived: Mapping[str, Any]) -> KernelCost:
        machine, p = self._machine, self.problem
        (rows, columns), (cm, cn) = config["tile_shape_mn"], config["cluster_shape_mn"]
        pair = config["use_2cta_instrs"]
        swap = config["swap_ab"]
        all_rows, all_columns = self._tiling.sizes(swap)
        shape = self._tiling.geometry(config)
        own_columns = columns / 2 if pair else columns
        reads = (rows + own_columns) * _ROW_BYTES
        writes = reads * _WRITES
        slow_m, slow_n = (self._slow_b, self._slow_a) if swap else (self._slow_a, self._slow_b)
        side_m = min(rows, all_rows) / cn * _ROW_BYTES
        side_n = min(columns, all_columns) / cm * _ROW_BYTES
        area = rows * columns
        inside = p.m * p.n * p.batch / (shape.clusters * shape.blocks * area)
        elements = _ROW_BYTES // self._in_bytes
        flops_clk = self._arch.mma_flops_per_clk * 2 / self._in_bytes * min(1.0, rows / _FULL_ROWS)
        store = machine.store_bytes_clk * (1.0 if config["use_tma_store"] else machine.direct_share)
        moved = area * inside * self._out_bytes * (2 if p.epilogue.beta else 1)
        launch_us = machine.launch_us + machine.fill_us - (machine.pdl_us if config["use_pdl"] else 0.0)
        return KernelCost(
            shape=shape,
            steps=ceil(p.k / elements),
            mma=2 * area * elements / flops_clk / machine.mma_efficiency,
            smem=(reads + writes) / self._arch.smem_bytes_per_clk * machine.smem_overlap,
            step_bytes=side_m * slow_m + side_n * slow_n,
            step_heat=shape.blocks * ((side_m + side_n) * machine.l2_flops + reads * machine.smem_flops),
            latency_us=machine.latency_us / derived["stages"],
            sync=1.0 + machine.cluster_wait * (shape.blocks - 1),
            launch_us=launch_us + (0.15 if shape.blocks > 1 else 0.0),
            epilogue=machine.epilogue_clk + moved / store + self._epilogue_clocks(area),
            split_epilogue=machine.epilogue_clk + area * 4 / machine.store_bytes_clk,
            split_bytes=shape.clusters * shape.blocks * area * 4.0,
            pingpong=True,  # a tile is stored while the next is computed
            stream=False,
            arrival=False,
            hbm_rate=machine.hbm_bytes_us * machine.short_run,
            work=p.flops * self._in_bytes / 2 * (0.7 + 0.3 / inside),
        )


def _as_tiles(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the tile of a thread block under the name that the physics knows."""
    if "tile_shape_mn" in config:
        return config
    rows, columns = config["mma_tiler_mn"]
    return {**config, "tile_shape_mn": (rows // 2 if config["use_2cta_instrs"] else rows, columns)}


def estimator_of(problem: Problem, arch: Arch, sm_count: int, machine: Machine | None = None) -> Estimator:
    """Return what estimates configs of the general algorithm on ``arch``, by default as its machine says.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """
    kind = BlackwellEstimator if arch.family == "sm100" else Estimator
    return kind(problem, arch, sm_count, machine)
