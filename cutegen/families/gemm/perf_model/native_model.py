"""The fit's look at many kernels in C: what numpy computes, to the last bit, in a third of the time.

Where the library is not, :class:`~cutegen.families.gemm.perf_model.kernel_set.KernelSet` does it with numpy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from ctypes import PyDLL, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from itertools import chain
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.families.gemm.perf_model.fitted import FIRST_TREES, LAST, Fit, Found
from cutegen.families.gemm.perf_model.roofline import FEATURES, KernelColumns, lying
from cutegen.families.gemm.perf_model.wave_order import Order, Wave, knows_turns, least_loads
from cutegen.families.gemm.problem import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cutegen.families.gemm.perf_model.trees import Trees

__all__ = ["SOURCE", "NativeFewRows", "NativeModel", "NativeTorch"]

SOURCE = Path(__file__).with_name("native_model.c")
#: Features that sizes decide, in the order of the library.
_ROWS = (
    "split_log", "m_log", "n_log", "k_log", "waves_log", "last_wave", "compute_to_memory_log", "time_log",
    "reduce_part", "l2_to_mma_log", "epilogue_part", "clusters_n", "inside_m", "inside_n", "steps_log",
    "sms_busy", "waves",
)  # fmt: skip
#: Columns that the library works on at a time.
_LANES = 8
#: Most clusters along a side, parts included, of which it counts loads.
_MOST_PLACES = 4096


_ARRAYS = (
    "tiles", "sides", "blocks", "resident", "sum_us", "inner_us", "mma_us", "epilogue_us",
    "least", "filling", "tile_k", "part", "swap_ab", "pingpong", "rows",
)  # fmt: skip
_NUMBERS = (
    "sms", "l2_us", "l2_us_sm", "fixed_us", "reduce_us", "most_waves", "most_clusters", "split_tiles",
    "in_bytes", "out_bytes", "l2_bytes", "kept", "near", "memory_bytes_us",
)  # fmt: skip


_FEW_ROWS_NUMBERS = (
    "start_us", "cta_us", "round_clk", "load_clk", "row_clk", "share_clk", "tail", "cluster_us", "pdl_us",
    "latency_us", "overlap", "bytes_us", "sm_bytes_us", "mhz", "base",
)  # fmt: skip
_FEW_ROWS_COUNTS = ("sms", "registers", "threads", "ctas", "load_bytes", "elements", "address")


class _Kernels(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("count", "whole", "stride", "features")),
        *((name, c_void_p) for name in _ARRAYS),
        *((name, c_double) for name in _NUMBERS),
        ("most_split", c_float),
        ("last", c_float),
    ]


class _Trees(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("depth", "count")),
        *((name, c_void_p) for name in ("asked", "limits", "leaves")),
    ]


_WRITTEN = (
    "splits", "features", "logs", "found", "keys", "columns", "sums", "times", "raw", "likely", "suits",
    "kept", "kernels", "parts",
)  # fmt: skip


class _Pointers(Structure):
    _fields_: ClassVar = [(name, c_void_p) for name in (*_WRITTEN, "loads")]


class _Forest:
    """Trees as the library takes them, at an address."""

    def __init__(self, trees: Trees) -> None:
        import numpy as np

        self._asked = np.ascontiguousarray(trees.asked.T, np.int32)
        self._limits = np.ascontiguousarray(trees.limits.T, np.float32)
        self._leaves = np.ascontiguousarray(trees.leaves, np.float32)
        arrays = (array.ctypes.data for array in (self._asked, self._limits, self._leaves))
        self._trees = _Trees(trees.depth, len(trees), *arrays)
        self.at = ctypes.addressof(self._trees)


class _Library(Structure):
    _fields_: ClassVar = [
        ("count", c_int64),
        ("tiles", c_void_p),
        *((name, c_double) for name in ("bytes_us", "flops_us", "start_us", "most_waves", "base")),
    ]


class NativeTorch:
    """What ``torch.mm`` takes by a roofline and trees.

    Args:
        library: What :data:`SOURCE` was compiled to.
        trees: The trees.
        tiles: Of the vendor's kernels: rows and columns.
        numbers: What else the library's ``struct library`` holds, by name.
    """

    def __init__(
        self, library: PyDLL, trees: Trees, tiles: Sequence[tuple[int, int]], numbers: dict[str, float]
    ) -> None:
        import numpy as np

        self._tiles = np.array(tiles, np.int64)
        self._library = _Library(count=len(tiles), tiles=self._tiles.ctypes.data, **numbers)
        self._forest = _Forest(trees)
        self._at = self._forest.at, ctypes.addressof(self._library)
        self._time = library.time_torch
        self._time.restype = c_double
        self._time.argtypes = [c_void_p] * 2 + [c_int64] * 4 + [c_double] * 2

    def time_us(self, m: int, n: int, k: int, sm_count: int, sides: tuple[float, float]) -> float:
        """Return what :meth:`~cutegen.families.gemm.perf_model.torch_mm.TorchMm.time_us` returns."""
        found: float = self._time(*self._at, m, n, k, sm_count, *sides)
        return found


class _FewRows(Structure):
    _fields_: ClassVar = [
        *((name, c_double) for name in _FEW_ROWS_NUMBERS),
        *((name, c_int64) for name in _FEW_ROWS_COUNTS),
    ]


class NativeFewRows:
    """What kernels for few rows take, as :meth:`FewRowsEstimator.times_us` says.

    Args:
        library: What :data:`SOURCE` was compiled to.
        trees: Corrections of the rough estimate.
        numbers: What the library's ``struct few_rows`` holds, by name.
        counts: The integers that it holds.
    """

    def __init__(
        self, library: PyDLL, trees: Trees, numbers: Mapping[str, float], counts: Mapping[str, int]
    ) -> None:
        self._model, self._forest = _FewRows(**numbers, **counts), _Forest(trees)
        self._at = ctypes.addressof(self._model), self._forest.at
        self._times = library.time_few_rows
        self._times.restype = None
        self._times.argtypes = [c_void_p] * 3 + [c_int64] * 6 + [c_double, c_void_p]

    def times_us(
        self, cuts: Sequence[tuple[int, ...]], problem: Problem, vectors: int, total_bytes: int
    ) -> list[float]:
        """Return microseconds of each kernel.

        Args:
            cuts: Of each what the library's ``struct cuts`` holds.
            problem: What is computed.
            vectors: Loads of a row of A.
            total_bytes: That cross device memory.
        """
        flat = [*chain.from_iterable(cuts)]
        kernels, found = (c_int64 * len(flat))(*flat), (c_double * len(cuts))()
        p = problem
        sizes = p.m, p.n, p.batch, p.k, vectors, float(total_bytes)
        self._times(*self._at, kernels, len(cuts), *sizes, found)
        return list(found)


class NativeModel:
    """Looks at the kernels of one set.

    Args:
        library: What :data:`SOURCE` was compiled to.
        kernels: The kernels.
        arrays: What else the library's ``struct kernels`` points to, by name.
        numbers: What else it holds.
        whole: So many of the kernels, the first, do not split k.
        most: So many of those that a first look puts first are looked at closely.
        fit: The fit.
        orders: Of tiles, among which one is chosen for a wave.
    """

    def __init__(
        self,
        library: PyDLL,
        kernels: KernelColumns,
        arrays: dict[str, NDArray[Any]],
        numbers: dict[str, float],
        whole: int,
        most: int,
        fit: Fit,
        orders: Sequence[Order],
    ) -> None:
        import numpy as np

        count = len(kernels.tile_k)
        self._stride, self._fit = -(-count // _LANES) * _LANES, fit
        #: So many kernels are found.
        self.most = min(most, count)
        self._kernel_columns = kernels
        rows = np.array([FEATURES.index(name) for name in _ROWS], np.int32)
        names = ("tiles", "sides", "blocks", "resident", "sum_us", "inner_us", "mma_us")
        doubles = {name: getattr(kernels, name) for name in (*names, "epilogue_us")}
        doubles |= {name: arrays[name] for name in ("least", "filling")}
        floats = {"tile_k": kernels.tile_k, "part": arrays["part"]}
        flags = {"swap_ab": kernels.swap_ab, "pingpong": kernels.pingpong}
        #: The library reads what these hold, so they live as long as this does.
        self._held: dict[str, NDArray[Any]] = {
            **{name: np.ascontiguousarray(array, np.float64) for name, array in doubles.items()},
            **{name: np.ascontiguousarray(array, np.float32) for name, array in floats.items()},
            **{name: np.ascontiguousarray(array, np.uint8) for name, array in flags.items()},
            "rows": rows,
        }
        scalars = {name: float(getattr(kernels, name)) for name in ("sms", "l2_us", "l2_us_sm")}
        self._kernels = _Kernels(
            count=count,
            whole=whole,
            stride=self._stride,
            features=len(FEATURES),
            last=LAST,
            **{name: array.ctypes.data for name, array in self._held.items()},
            **scalars,
            **numbers,
        )
        self._trees = _Forest(fit.trees)
        self._at = ctypes.addressof(self._kernels), self._trees.at
        self._describe, self._rank = library.describe, library.rank
        self._describe.restype = self._rank.restype = None
        self._describe.argtypes = [c_void_p] * 2 + [c_int64] * 4 + [c_int32]
        self._rank.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p]
        self._orders = orders
        self._numbers = np.array(orders, np.int64)
        self._orders_at = self._numbers.ctypes.data
        self._bits = {order: 1 << place for place, order in enumerate(orders)}
        self._all = sum(self._bits.values())
        self._least_loads = library.least_loads
        self._least_loads.restype = c_int64
        self._least_loads.argtypes = [c_int64] * 7 + [c_void_p, c_int64, c_int64]
        self._best_order = library.best_order
        self._best_order.restype = c_int64
        self._best_order.argtypes = [c_void_p, *[c_int64] * 6, c_void_p, c_int64, c_int32]
        self._knows_turns = int(knows_turns(float(kernels.sms)))
        self._local = threading.local()

    def _scratch(self, sides: tuple[float, float]) -> _Scratch:
        """Return where this thread's looks are written to."""
        known: dict[tuple[float, float], _Scratch] | None = getattr(self._local, "scratch", None)
        if known is None:
            known = self._local.scratch = {}
        found = known.get(sides)
        if found is None:
            found = known[sides] = _Scratch(self._kernel_columns, self._stride, self.most, sides)
        return found

    def best(self, problem: Problem, *, swapped: bool) -> Iterator[Found]:
        """Yield what :meth:`Fit.fastest` yields first, as long as it is exact: :attr:`most` kernels.

        Args:
            problem: What is computed.
            swapped: Whether swapped kernels are likely.
        """
        import numpy as np

        m, n, k = problem.m, problem.n, problem.k
        scratch = self._scratch(lying(m, n, k, problem.layout))
        kernels, trees = self._at
        self._describe(kernels, scratch.at, m, n, k, problem.batch, swapped)
        np.log(scratch.raw, scratch.raw)
        np.log(scratch.logs, scratch.logs)
        self._rank(kernels, trees, FIRST_TREES, self.most, scratch.at)
        # Lists, since the arrays are this thread's for its next look, too.
        logs, places = scratch.times.tolist(), scratch.kernels.tolist()
        parts, suits, base = scratch.parts.tolist(), scratch.suits.tolist(), self._fit.trees.base
        found = zip(logs, places, parts, suits, strict=True)
        return (Found(exp(log + base), at, split, likely) for log, at, split, likely in found)

    def best_order(self, problem: Problem, at: int, split: int) -> Order | None:
        """Return what :meth:`Tiling.best_order` returns of all orders; None where it is to be asked.

        Args:
            problem: What is computed.
            at: The kernel's place.
            split: Parts of k.
        """
        p, orders = problem, self._orders
        place: int = self._best_order(
            self._at[0], at, split, p.m, p.n, p.k, p.batch, self._orders_at, len(orders), self._knows_turns
        )
        return None if place < 0 else orders[place]

    def least_loads(self, wave: Wave, orders: Sequence[Order]) -> Order:
        """Return what :func:`~cutegen.families.gemm.perf_model.wave_order.least_loads` returns.

        Args:
            wave: What is loaded.
            orders: Some of those of the space, in its order.
        """
        if max(wave.clusters_m, wave.clusters_n) * wave.parts > _MOST_PLACES:
            return least_loads(wave, orders)
        asked = self._all if orders is self._orders else sum(self._bits[order] for order in orders)
        place: int = self._least_loads(*wave, self._orders_at, len(self._orders), asked)
        return self._orders[place]


class _Scratch:
    """What a thread's looks at one set of kernels are written to."""

    def __init__(self, kernels: KernelColumns, stride: int, most: int, sides: tuple[float, float]) -> None:
        import numpy as np

        count = len(kernels.tile_k)
        few = -(-most // _LANES) * _LANES
        self.splits, self.likely = np.empty(count, np.float32), np.empty(count, bool)
        self.features = np.zeros((len(FEATURES), stride), np.float32)
        self.features[:, :count] = kernels.constant(sides)
        self.found, self.keys = np.empty(stride, np.float32), np.empty(stride, np.float32)
        self.raw, self.logs = np.empty((4, count)), np.empty(2 * count + 3, np.float32)
        self.columns = np.zeros((len(FEATURES), few), np.float32)
        self.sums, self.times = np.empty(few, np.float32), np.empty(most, np.float32)
        self.kept, self.kernels = np.empty(most, np.int64), np.empty(most, np.int64)
        self.parts, self.suits = np.empty(most, np.int64), np.empty(most, bool)
        self._loads = kernels.loads(sides)
        written = (getattr(self, name).ctypes.data for name in _WRITTEN)
        self._pointers = _Pointers(*written, self._loads.ctypes.data)
        self.at = ctypes.addressof(self._pointers)
