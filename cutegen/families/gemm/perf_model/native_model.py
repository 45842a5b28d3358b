"""The fit's look at many kernels in C: what numpy computes, to the last bit, in a third of the time.

Where the library is not, :class:`~cutegen.families.gemm.perf_model.kernel_set.KernelSet` does it with numpy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import PyDLL, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.families.gemm.perf_model.fitted import (
    FEATURES,
    FIRST_TREES,
    Fit,
    KernelColumns,
    Look,
    lying,
    memory_us,
)
from cutegen.families.gemm.problem import Problem

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cutegen.families.gemm.perf_model.fitted import Array
    from cutegen.families.gemm.perf_model.trees import Trees

__all__ = ["SOURCE", "NativeModel", "NativeTrees"]

SOURCE = Path(__file__).with_name("native_model.c")
#: Features that sizes decide, in the order of the library.
_ROWS = (
    "split_log", "m_log", "n_log", "k_log", "waves_log", "last_wave", "compute_to_memory_log", "time_log",
    "reduce_part", "l2_to_mma_log", "epilogue_part", "clusters_n", "inside_m", "inside_n", "steps_log",
    "sms_busy", "waves",
)  # fmt: skip
#: Columns that the library works on at a time.
_LANES = 8


_ARRAYS = (
    "tiles", "sides", "load_bytes", "blocks", "resident", "sum_us", "inner_us", "mma_us", "epilogue_us",
    "least", "filling", "tile_k", "part", "swap_ab", "pingpong", "short_runs", "rows",
)  # fmt: skip
_NUMBERS = (
    "sms", "l2_us", "l2_us_sm", "fixed_us", "reduce_us", "most_waves", "most_clusters", "split_tiles",
    "narrow",
)  # fmt: skip


class _Kernels(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("count", "whole", "stride")),
        *((name, c_void_p) for name in _ARRAYS),
        *((name, c_double) for name in _NUMBERS),
        ("most_split", c_float),
    ]


class _Problem(Structure):
    _fields_: ClassVar = [
        *((name, c_double) for name in ("m", "n", "batch", "memory_us")),
        ("k", c_float),
        ("swapped", c_int32),
    ]


class _Trees(Structure):
    _fields_: ClassVar = [
        *((name, c_int64) for name in ("depth", "count")),
        *((name, c_void_p) for name in ("asked", "limits", "leaves")),
    ]


class _Pointers(Structure):
    _fields_: ClassVar = [
        (name, c_void_p) for name in ("splits", "features", "logs", "found", "raw", "likely")
    ]


class _Forest:
    """Trees as the library takes them, at an address."""

    def __init__(self, trees: Trees) -> None:
        import numpy as np

        self._asked = np.ascontiguousarray(trees.asked, np.int32)
        self._limits = np.ascontiguousarray(trees.limits, np.float32)
        self._leaves = np.ascontiguousarray(trees.leaves, np.float32)
        arrays = (array.ctypes.data for array in (self._asked, self._limits, self._leaves))
        self._trees = _Trees(trees.depth, len(trees), *arrays)
        self.at = ctypes.addressof(self._trees)


class NativeTrees:
    """Sums of all trees for one row of features.

    Args:
        library: What :data:`SOURCE` was compiled to.
        trees: The trees.
    """

    def __init__(self, library: PyDLL, trees: Trees) -> None:
        self._forest, self._count = _Forest(trees), len(trees)
        self._find = library.find_leaves
        self._find.restype, self._find.argtypes = None, [c_void_p] * 3

    def sum(self, features: Sequence[float]) -> float:
        """Return the sum, as :meth:`Trees.sums` adds it up."""
        import numpy as np

        asked, leaves = np.array(features, np.float32), np.empty((self._count, 1), np.float32)
        self._find(self._forest.at, asked.ctypes.data, leaves.ctypes.data)
        found: float = np.add.reduce(leaves, 0)[0]
        return found


class NativeModel:
    """Looks at the kernels of one set.

    Args:
        library: What :data:`SOURCE` was compiled to.
        kernels: The kernels.
        arrays: What else the library's ``struct kernels`` points to, by name.
        numbers: What else it holds.
        whole: So many of the kernels, the first, do not split k.
        fit: The fit.
    """

    def __init__(
        self,
        library: PyDLL,
        kernels: KernelColumns,
        arrays: dict[str, NDArray[Any]],
        numbers: dict[str, float],
        whole: int,
        fit: Fit,
    ) -> None:
        import numpy as np

        count = len(kernels.tile_k)
        self._count, self._stride, self._fit = count, -(-count // _LANES) * _LANES, fit
        self._kernel_columns = kernels
        rows = np.array([FEATURES.index(name) for name in _ROWS], np.int32)
        names = ("tiles", "sides", "load_bytes", "blocks", "resident", "sum_us", "inner_us", "mma_us")
        doubles = {name: getattr(kernels, name) for name in (*names, "epilogue_us")}
        doubles |= {name: arrays[name] for name in ("least", "filling")}
        floats = {"tile_k": kernels.tile_k, "part": arrays["part"]}
        flags = {"swap_ab": kernels.swap_ab, "pingpong": kernels.pingpong, "short_runs": arrays["short_runs"]}
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
            **{name: array.ctypes.data for name, array in self._held.items()},
            **scalars,
            **numbers,
        )
        self._trees = _Forest(fit.trees)
        self._at = ctypes.addressof(self._kernels), self._trees.at
        self._describe, self._coarse, self._fine = library.describe, library.coarse, library.fine
        for function in (self._describe, self._coarse, self._fine):
            function.restype = None
        self._describe.argtypes = [c_void_p] * 3
        self._coarse.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
        places: list[Any] = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
        self._fine.argtypes = [c_void_p, c_void_p, c_int64, c_int64, *places]
        self._local = threading.local()

    def look(self, problem: Problem, *, swapped: bool) -> Look:
        """Return what the first trees say of each kernel.

        Args:
            problem: What is computed.
            swapped: Whether swapped kernels are likely.
        """
        import numpy as np

        scratch: _Scratch | None = getattr(self._local, "scratch", None)
        sides = lying(problem.m, problem.n, problem.layout)
        if scratch is None or scratch.sides != sides:
            scratch = self._local.scratch = _Scratch(self._kernel_columns, self._stride, sides)
        p = scratch.problem
        p.m, p.n, p.k, p.batch = problem.m, problem.n, problem.k, problem.batch
        p.memory_us, p.swapped = memory_us(problem, self._kernel_columns.rates), swapped
        kernels, trees = self._at
        self._describe(kernels, scratch.problem_at, scratch.at)
        np.log(scratch.raw, scratch.raw)
        np.log(scratch.logs, scratch.logs)
        self._coarse(kernels, trees, FIRST_TREES, scratch.at)

        def more(kept: NDArray[numpy.intp]) -> Array:
            kept = np.ascontiguousarray(kept, np.int64)
            stride = -(-len(kept) // _LANES) * _LANES
            columns, sums = np.empty((len(FEATURES), stride), np.float32), np.empty(stride, np.float32)
            at = kept.ctypes.data, columns.ctypes.data, sums.ctypes.data
            self._fine(kernels, trees, FIRST_TREES, len(FEATURES), scratch.at, at[0], len(kept), *at[1:])
            found: Array = sums[: len(kept)]
            return found

        count = self._count
        return Look(scratch.found[:count].copy(), scratch.likely.copy(), scratch.splits.copy(), more)


class _Scratch:
    """What a thread's looks at one set of kernels are written to."""

    def __init__(self, kernels: KernelColumns, stride: int, sides: tuple[float, float]) -> None:
        import numpy as np

        count, self.sides = len(kernels.tile_k), sides
        self.splits, self.likely = np.empty(count, np.float32), np.empty(count, bool)
        self.features, self.found = (
            np.zeros((len(FEATURES), stride), np.float32),
            np.empty(stride, np.float32),
        )
        self.features[:, :count] = kernels.constant(sides)
        self.raw, self.logs = np.empty((4, count)), np.empty(2 * count + 3, np.float32)
        arrays = (self.splits, self.features, self.logs, self.found, self.raw, self.likely)
        self._pointers, self.problem = _Pointers(*(array.ctypes.data for array in arrays)), _Problem()
        self.at, self.problem_at = ctypes.addressof(self._pointers), ctypes.addressof(self.problem)
