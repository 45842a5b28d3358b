"""Estimate of the kernels for few rows: what memory, waiting and multiplying take, corrected by trees.

``tools/fit_few_rows.py`` fits constants and trees to measured times, and says where nothing was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from math import ceil, exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.arch import Arch
from cutegen.dtypes import DTYPE_BYTES
from cutegen.errors import ArchError
from cutegen.families.gemm.perf_model.fitted import fit_of
from cutegen.families.gemm.perf_model.gpu_params import find_machine
from cutegen.families.gemm.perf_model.native_model import SOURCE, NativeFewRows
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config

if TYPE_CHECKING:
    from cutegen.strategy import OpenLibrary

__all__ = [
    "FEATURES",
    "FILE",
    "Constants",
    "FewRowsEstimator",
    "FewRowsFit",
    "fitted",
    "is_fitted",
    "prepare",
]

FILE = Path(__file__).with_name("few_rows.json")
_LOAD_BYTES = 16
_WARP = 32
_THREADS_PER_SM = 2048
"""Source: CUDA C++ Programming Guide, technical specifications."""
_CTAS_PER_SM = 32
"""Source: as above."""
_BYTES_US = 4.6e6
"""Bytes of device memory per microsecond. Source: NVIDIA H200 datasheet, less what is never reached."""
_SM_BYTES_CLK = 64
"""Bytes per clock that reach an SM from L2. Source: assumed; the trees correct it."""
_LATENCY_US = 0.3
"""Until loads arrive while memory is busy. Source: least error of 0.3 and 0.45; the trees correct it."""
_OVERLAP = 3
"""How far memory, waiting and arithmetic hide each other: norm of their times. Source: as for the latency,
3 instead of 2."""
_PDL_US = 0.3
"""What programmatic dependent launch hides of a start. Source: fitted to 82 kernels back to back
(docs/results/few_rows.json); behind another kernel all were timed with it."""
_ELEMENTS, _ADDRESS = 8, 2
"""Instructions to widen what a thread loads at a time, 16 bytes, and for its address."""
FEATURES = 17
"""Numbers that :meth:`FewRowsEstimator.describe` returns."""


@dataclass(frozen=True)
class Constants:
    """What is believed of one GPU under these kernels; all fitted.

    Attributes:
        start_us: From one launch to the next without work.
        cta_us: What a CTA takes before its first load and after its last product.
        round_clk: Clocks that an instruction between two rounds of loads takes.
        load_clk: Clocks of an SM to widen what a warp loads of B.
        row_clk: Clocks of an SM for each such load and row of A.
        share_clk: Clocks of an SM to load and widen as much of a row of A; columns share it.
        tail: Share of a CTA's time for which the last ones leave others without work.
        cluster_us: Until CTAs of a cluster have met and exchanged their sums.
    """

    start_us: float
    cta_us: float
    round_clk: float
    load_clk: float
    row_clk: float
    share_clk: float
    tail: float
    cluster_us: float


class FewRowsFit(NamedTuple):
    """The model of one GPU.

    Attributes:
        constants: Of the rough estimate.
        trees: Corrections of its logarithm; None for none.
        memory: Rate of device memory over that of the GPU that was measured.
        clock: The same of clocks.
    """

    constants: Constants
    trees: Trees | None
    memory: float = 1.0
    clock: float = 1.0


@cache
def _facts() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@cache
def fitted(arch: str) -> FewRowsFit:
    """Return the model of the main GPU of ``arch``.

    Raises:
        ArchError: Nothing was measured there.
    """
    found = _facts()
    if found["arch"] != arch:
        raise ArchError(f"no times of few rows on {arch}; measured: {found['arch']}")
    return FewRowsFit(Constants(**found["constants"]), Trees.of(found, FEATURES))


@cache
def _believed(arch: Arch) -> FewRowsFit:
    """Return the model of the GPU that ``arch`` is calibrated for."""
    rates = fit_of(arch).rates
    return fitted(arch.name)._replace(memory=rates.memory, clock=rates.clock)


def _clock_mhz(arch: Arch, model: FewRowsFit) -> float:
    return find_machine(arch).boost_mhz * model.clock


def is_fitted(arch: Arch) -> bool:
    """Return whether such kernels were measured on ``arch``."""
    return bool(_facts()["arch"] == arch.name)


class _Kernel(NamedTuple):
    """How one kernel cuts up the work.

    Attributes:
        rows: Of A.
        threads: Of a CTA.
        columns: Of a warp.
        warps_along_k: Of a CTA, which share columns.
        unroll: Loads of a column that a thread issues before it multiplies.
        cluster: CTAs that share columns.
        of_cta: Columns of a CTA.
        ctas: In all.
        resident: That an SM has room for.
        busiest: That the SM with most of them has.
        loads: Of a column that a thread has in all.
        rounds: In so many turns.
    """

    rows: int
    threads: int
    columns: int
    warps_along_k: int
    unroll: int
    cluster: int
    of_cta: int
    ctas: int
    resident: int
    busiest: int
    loads: int
    rounds: int

    @property
    def waves(self) -> int:
        """Turns that the busiest SM takes."""
        return ceil(self.busiest / self.resident)


@lru_cache(maxsize=4096)
def _cuts(config: Config, registers: int) -> tuple[int, ...]:
    """Return what the model looks at of a config, in the order of the library's ``struct cuts``."""
    names = ("rows_per_cta", "threads_per_cta", "columns_per_warp", "warps_along_k", "unroll", "cluster_k")
    return *map(config.integer, names), registers, int(config.flag("use_pdl"))


#: The same in C, by GPU, where a library was opened.
_natives: dict[tuple[Arch, int], NativeFewRows] = {}


def prepare(arch: Arch, sm_count: int, library: OpenLibrary) -> None:
    """Leave estimates for a GPU to a library from now on, if it is there."""
    model = _believed(arch)
    if model.trees is None or (arch, sm_count) in _natives:
        return
    opened = library(SOURCE)
    if opened is None:
        return
    mhz = _clock_mhz(arch, model)
    numbers = {
        **asdict(model.constants),
        "pdl_us": _PDL_US,
        "latency_us": _LATENCY_US,
        "overlap": _OVERLAP,
        "bytes_us": _BYTES_US * model.memory,
        "sm_bytes_us": _SM_BYTES_CLK * mhz,
        "mhz": mhz,
        "base": model.trees.base,
    }
    counts = {
        "sms": sm_count,
        "registers": arch.registers,
        "threads": _THREADS_PER_SM,
        "ctas": _CTAS_PER_SM,
        "load_bytes": _LOAD_BYTES,
        "elements": _ELEMENTS,
        "address": _ADDRESS,
    }
    _natives[arch, sm_count] = NativeFewRows(opened, model.trees, numbers, counts)


class FewRowsEstimator:
    """Estimates configs of one problem.

    Args:
        problem: What is computed.
        arch: The target.
        sm_count: SMs of the GPU.
        model: Of the GPU; by default that fitted for ``arch``, scaled by its calibration.

    Raises:
        ArchError: Nothing is known of that architecture's speed.
    """

    def __init__(self, problem: Problem, arch: Arch, sm_count: int, model: FewRowsFit | None = None) -> None:
        self._problem, self._arch, self._sm_count = problem, arch, sm_count
        self._model = model or _believed(arch)
        self._native = _natives.get((arch, sm_count)) if model is None else None
        self._mhz = _clock_mhz(arch, self._model)
        self._vectors = problem.k * DTYPE_BYTES[problem.ab_dtype] // _LOAD_BYTES
        self._bytes = problem.min_bytes
        self._sizes = (problem.m, problem.n * problem.batch, problem.k, self._bytes)

    def times_us(self, kernels: Sequence[tuple[Config, int]]) -> list[float]:
        """Return the microseconds of one launch of each kernel in a graph, operands in device memory.

        Args:
            kernels: Configs of the space of these kernels, each with the registers of a thread.
        """
        if self._native is not None:
            cuts = [_cuts(config, registers) for config, registers in kernels]
            return self._native.times_us(cuts, self._problem, self._vectors, self._bytes)
        known = [self._kernel(config, registers) for config, registers in kernels]
        rough = [
            self._rough_us(kernel) - (_PDL_US if config.flag("use_pdl") else 0.0)
            for kernel, (config, _) in zip(known, kernels, strict=True)
        ]
        trees = self._model.trees
        if trees is None or not known:
            return rough
        import numpy as np

        features = np.array([self._features(kernel) for kernel in known], np.float32).T
        added = trees.sums(features).tolist()
        return [time * exp(more + trees.base) for time, more in zip(rough, added, strict=True)]

    def time_us(self, config: Config, registers: int) -> float:
        """Return what :meth:`times_us` says of one kernel."""
        return self.times_us([(config, registers)])[0]

    def describe(self, config: Config, registers: int) -> list[float]:
        """Return what the trees ask about: sizes, how the kernel cuts up the work, how that fits the SMs."""
        return self._features(self._kernel(config, registers))

    def _kernel(self, config: Config, registers: int) -> _Kernel:
        rows, threads, columns, along_k, most, cluster, registers, _ = _cuts(config, registers)
        of_cta = max(1, threads // _WARP // along_k) * columns  # 0 breaks a rule
        ctas = ceil(self._problem.n / of_cta) * cluster * self._problem.batch
        room = self._arch.registers // (-(-registers // 8) * 8 * threads)
        resident = max(1, min(room, _THREADS_PER_SM // threads, _CTAS_PER_SM))
        loads = ceil(self._vectors / (_WARP * along_k * cluster))
        unroll = min(most, loads)
        cuts = (rows, threads, columns, along_k, unroll, cluster, of_cta)
        return _Kernel(*cuts, ctas, resident, ceil(ctas / self._sm_count), loads, ceil(loads / unroll))

    def _features(self, kernel: _Kernel) -> list[float]:
        per_sm = kernel.ctas / self._sm_count
        turns = max(1.0, kernel.busiest / kernel.resident)
        return [
            *self._sizes,
            kernel.rows,
            kernel.threads,
            kernel.columns,
            kernel.warps_along_k,
            kernel.unroll,
            kernel.of_cta,
            per_sm,
            kernel.busiest / per_sm,
            kernel.resident,
            turns,
            kernel.waves / turns,
            kernel.rounds,
            kernel.loads / (kernel.rounds * kernel.unroll),
        ]

    def _rough_us(self, kernel: _Kernel) -> float:
        known, model = self._model.constants, self._model
        cta = self._cta_us(kernel)
        of_b = kernel.busiest * kernel.of_cta / kernel.cluster * self._vectors * _LOAD_BYTES
        memory = self._bytes / (_BYTES_US * model.memory)
        of_sm = of_b / (_SM_BYTES_CLK * self._mhz)
        waiting, arithmetic = kernel.waves * cta, self._arithmetic_us(kernel)
        # Added one after the other, as C does it: Python's own sum is more exact from 3.12 on.
        together = memory**_OVERLAP + of_sm**_OVERLAP + waiting**_OVERLAP + arithmetic**_OVERLAP
        busy = float(together ** (1 / _OVERLAP))
        met = known.cluster_us if kernel.cluster != 1 else 0.0
        return known.start_us + _PDL_US + busy + known.tail * cta + met

    def _cta_us(self, kernel: _Kernel) -> float:
        """How long a CTA takes on its own: rounds of loads, and the products of each."""
        per_load = kernel.columns * _ELEMENTS * (1 + kernel.rows) + (_ELEMENTS + _ADDRESS) * kernel.rows
        products = kernel.unroll * per_load * self._model.constants.round_clk / self._mhz
        return kernel.rounds * (_LATENCY_US + products) + self._model.constants.cta_us

    def _arithmetic_us(self, kernel: _Kernel) -> float:
        """How long the instructions of the busiest SM take; what a warp loads of B is the unit."""
        known = self._model.constants
        clocks = known.load_clk + kernel.rows * (known.row_clk + known.share_clk / kernel.columns)
        loads = kernel.busiest * kernel.of_cta / kernel.cluster * self._vectors / _WARP
        return loads * clocks / self._mhz
