"""Times of GEMM kernels as fitted to measurements: a short roofline, corrected by boosted trees.

The trees, which ``tools/fit_gemm.py`` fits to a recorded sweep of one GPU, correct the logarithm of the
roofline's time by features of kernel and shape (``roofline.py``). All kernels of a set are predicted at once,
in arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cutegen.arch import Arch, Calibration
from cutegen.errors import StoreError
from cutegen.families.gemm.perf_model.calibration_file import read_calibration
from cutegen.families.gemm.perf_model.roofline import (
    FEATURES,
    H200,
    Cover,
    KernelColumns,
    Rates,
    rooflines,
)
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config
from cutegen.text import shown

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cutegen.families.gemm.perf_model.roofline import Array

__all__ = [
    "FILE",
    "FIRST_TREES",
    "KEPT",
    "LAST",
    "Fit",
    "Found",
    "Look",
    "fit_of",
    "fitted_times_us",
    "fitted_us",
    "has_slow_memory",
    "is_fitted",
    "load_fit",
    "read_fit",
]

FILE = Path(__file__).with_name("fit_sm_90a.json")
#: Types that the sweep's kernels multiply at the same rate and load with the same bytes.
_DTYPES = ("bf16", "fp16")
_LOOKED_AT = (
    "tile_shape_mn", "cluster_shape_mn", "tile_k", "swap_ab", "pingpong", "mma_warpgroups", "use_pdl",
)  # fmt: skip
#: Trees that look at every kernel, and the best of these that all trees look at: the rest is far behind. Of
#: 1,300 random products, by the fit of the H200, none gets another kernel than all trees would choose. Of
#: the best 8 alone 14 would, predicted to take 1.8 % longer at most; with 32 trees of a fit before one got a
#: kernel that they predict to take 9 % longer (163x64640x7168, measured at 0.83 of torch.mm).
FIRST_TREES, KEPT = 48, 16
#: Larger than any difference of logarithms of times.
LAST = 100.0
#: Of the H200's memory bandwidth. The H100's is 0.7 of it.
_SLOW = 0.85
_TIME_LOG = FEATURES.index("time_log")


def is_fitted(problem: Problem, arch: Arch) -> bool:
    """Return whether a fit says anything of ``problem``: 16-bit operands, and a target that was measured."""
    return problem.ab_dtype in _DTYPES and arch.name == load_fit().arch


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
            for log, at in zip(found.tolist(), places.tolist(), strict=True):
                time_us = exp(log + self.trees.base)
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


def has_slow_memory(arch: Arch) -> bool:
    """Return whether memory and L2 limit the GPU that ``arch`` is calibrated for more than the H200.

    There clusters of four thread blocks that share what they load pay most.
    Source: an H100, the only such GPU that was measured.

    Raises:
        StoreError: The file of its calibration cannot be read, or is none.
    """
    return arch.calibration is not None and arch.name == load_fit().arch and fit_of(arch).rates.memory < _SLOW


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
