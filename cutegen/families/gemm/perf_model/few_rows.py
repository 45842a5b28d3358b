"""Estimate of the kernels for few rows: the longest of reading B, of waiting for it, and of multiplying.

``tools/fit_few_rows.py`` fits the constants to measured times, and says where nothing was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, sqrt
from pathlib import Path

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.errors import ArchError
from cutegen.families.gemm.perf_model.fitted import fit_of
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config

__all__ = ["FILE", "Constants", "FewRowsEstimator", "fitted", "is_fitted"]

FILE = Path(__file__).with_name("few_rows.json")
_LOAD_BYTES = 16
_WARP = 32
_THREADS_PER_SM = 2048
"""Source: CUDA C++ Programming Guide, technical specifications."""
_CTAS_PER_SM = 32
"""Source: as above."""
_CLUSTER_US = 1.0
"""Until CTAs of a cluster have met and exchanged their sums. Source: assumed."""


@dataclass(frozen=True)
class Constants:
    """What is believed of one GPU under these kernels; all fitted.

    Attributes:
        start_us: From one launch to the next without work.
        pdl_us: What programmatic dependent launch hides of it.
        bytes_us: Bytes of device memory per microsecond.
        latency_us: From a thread's loads to their arrival.
        cta_us: What a CTA takes before its first load and after its last product.
        round_clk: Clocks that an instruction between two rounds of loads takes.
        load_clk: Clocks of an SM to widen what a warp loads of B.
        row_clk: Clocks of an SM for each such load and row of A.
        share_clk: Clocks of an SM to load and widen as much of a row of A; columns share it.
        l2_bytes_us: Bytes per microsecond from L2.
        uneven: Share by which SMs with one CTA more than others delay the end.
        tail: Share of a CTA's time for which the last ones leave others without work.
        overlap: How far memory, latency and arithmetic hide each other: norm of their times.
    """

    start_us: float
    pdl_us: float
    bytes_us: float
    latency_us: float
    cta_us: float
    round_clk: float
    load_clk: float
    row_clk: float
    share_clk: float
    l2_bytes_us: float
    uneven: float
    tail: float
    overlap: float


@cache
def fitted(arch: str) -> Constants:
    """Return the constants of the main GPU of ``arch``.

    Raises:
        ArchError: Nothing was measured there.
    """
    found = json.loads(FILE.read_text(encoding="utf-8"))
    if found["arch"] != arch:
        raise ArchError(f"no times of few rows on {arch}; measured: {found['arch']}")
    return Constants(**found["constants"])


@cache
def _believed(arch: Arch) -> Constants:
    """Return the constants of the GPU that ``arch`` is calibrated for."""
    known, rates = fitted(arch.name), fit_of(arch).rates
    return replace(known, bytes_us=known.bytes_us * rates.memory, l2_bytes_us=known.l2_bytes_us * rates.clock)


@cache
def is_fitted(arch: Arch) -> bool:
    """Return whether such kernels were measured on ``arch``."""
    return bool(json.loads(FILE.read_text(encoding="utf-8"))["arch"] == arch.name)


class FewRowsEstimator:
    """Estimates configs of one problem.

    Args:
        problem: What is computed.
        arch: The target.
        sm_count: SMs of the GPU.
        constants: Of the GPU; by default those fitted for ``arch``, scaled by its calibration.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """

    def __init__(
        self, problem: Problem, arch: Arch, sm_count: int, constants: Constants | None = None
    ) -> None:
        self._problem, self._arch, self._sm_count = problem, arch, sm_count
        self._believed = constants or _believed(arch)
        self._mhz = find_machine(arch).boost_mhz * fit_of(arch).rates.clock
        self._vectors = problem.k * DTYPE_BYTES[problem.ab_dtype] // _LOAD_BYTES
        self._bytes = problem.min_bytes
        self._elements = _LOAD_BYTES // DTYPE_BYTES[problem.ab_dtype]

    def time_us(self, config: Config, registers: int) -> float:
        """Return the microseconds of one launch in a graph, operands in device memory.

        Args:
            config: A config of the space of these kernels.
            registers: Of one thread.
        """
        believed = self._believed
        ctas = self._ctas(config)
        per_sm, resident = ctas / self._sm_count, self._resident(config, registers)
        waves = max(1.0, per_sm / resident)
        memory = self._bytes / believed.bytes_us
        # CTAs that all run at once cannot even out what some SMs have more than others.
        uneven = believed.uneven * (ceil(per_sm) / per_sm - 1) if per_sm <= resident else 0.0
        parts = (
            memory * (1 + uneven),
            waves * self._cta_us(config),
            self._arithmetic_us(config),
            self._l2_us(config, ctas),
        )
        busy = float(sum(part**believed.overlap for part in parts) ** (1 / believed.overlap))
        # Warps that share columns make shorter work of them, so that all end at about the same time.
        tail = believed.tail * memory / waves / sqrt(config.integer("warps_along_k"))
        fixed = believed.start_us - (believed.pdl_us if config.flag("use_pdl") else 0.0)
        return fixed + busy + tail + (_CLUSTER_US if config["cluster_k"] != 1 else 0.0)

    def _ctas(self, config: Config) -> int:
        warps = config.integer("threads_per_cta") // _WARP // config.integer("warps_along_k")
        columns = warps * config.integer("columns_per_warp")
        return ceil(self._problem.n / columns) * config.integer("cluster_k") * self._problem.batch

    def _resident(self, config: Config, registers: int) -> int:
        """CTAs that an SM has room for."""
        threads = config.integer("threads_per_cta")
        per_cta = -(-registers // 8) * 8 * threads
        return max(1, min(self._arch.registers // per_cta, _THREADS_PER_SM // threads, _CTAS_PER_SM))

    def _cta_us(self, config: Config) -> float:
        """How long a CTA takes on its own: rounds of loads, and the products of each."""
        rows, columns = config.integer("rows_per_cta"), config.integer("columns_per_warp")
        loads = ceil(self._vectors / (_WARP * config.integer("warps_along_k") * config.integer("cluster_k")))
        unroll = min(config.integer("unroll"), loads)
        # Each element is widened, and multiplied with each row; a load of A also has an address.
        instructions = unroll * (columns * self._elements * (1 + rows) + (self._elements + 2) * rows)
        products = instructions * self._believed.round_clk / self._mhz
        return ceil(loads / unroll) * (self._believed.latency_us + products) + self._believed.cta_us

    def _arithmetic_us(self, config: Config) -> float:
        """How long an SM's instructions take; what a warp loads of B is the unit."""
        rows, columns = config.integer("rows_per_cta"), config.integer("columns_per_warp")
        believed = self._believed
        clocks = believed.load_clk + rows * (believed.row_clk + believed.share_clk / columns)
        loads = self._problem.n * self._vectors * self._problem.batch / (_WARP * self._sm_count)
        return loads * clocks / self._mhz

    def _l2_us(self, config: Config, ctas: int) -> float:
        """B comes through L2 once, and all rows of A for each CTA, or cluster."""
        of_a = config.integer("rows_per_cta") * self._vectors * _LOAD_BYTES / config.integer("cluster_k")
        return (ctas * of_a + self._bytes) / self._believed.l2_bytes_us
