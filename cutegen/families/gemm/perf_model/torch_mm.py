"""How long ``torch.mm`` takes, as fitted to measurements: what an untuned GEMM is compared with.

The library chooses among tiles of its own by rules that nobody tells: a roofline is corrected by trees that
``tools/fit_torch_mm.py`` fits to the times of a recorded sweep, by sizes and by waves of the usual tiles.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import ceil, exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.arch import Arch, Calibration
from cutegen.errors import StoreError
from cutegen.families.gemm.perf_model.calibration_file import read_calibration
from cutegen.families.gemm.perf_model.native_model import SOURCE, NativeTorch
from cutegen.families.gemm.perf_model.roofline import lying
from cutegen.families.gemm.perf_model.trees import Trees
from cutegen.families.gemm.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cutegen.strategy import OpenLibrary

__all__ = [
    "FILE",
    "TorchMm",
    "after_mm_us",
    "describe",
    "load_torch_mm",
    "read_torch_mm",
    "reading_c_us",
    "torch_mm_of",
    "torch_mm_us",
]

FILE = Path(__file__).with_name("torch_mm.json")
#: Tiles of D that libraries have kernels for. Source: names of cuBLAS kernels in profiles of an H200.
_TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (64, 64))
#: What :func:`describe` describes a product by: sizes, three numbers for each tile, how operands lie.
_FEATURES = 7 + 3 * len(_TILES) + 2
#: 16-bit types, which all take as long.
_DTYPES = ("bf16", "fp16")
#: Round constants of the roofline; the trees correct what they get wrong. Source: NVIDIA H200 datasheet, less
#: what is never reached.
_START_US, _BYTES_US, _FLOPS_US = 2.5, 4.4e6, 7.5e8
#: Of more waves the trees are told that there are so many.
_MOST_WAVES = 8


def describe(m: int, n: int, k: int, sm_count: int, layout: str = "kk") -> tuple[float, list[float]]:
    """Return microseconds by the roofline, and what the trees ask about, of one product in 16 bits."""
    memory = 2 * (m * k + k * n + m * n) / _BYTES_US
    math = 2 * m * n * k / _FLOPS_US
    found = [log(m), log(n), log(k), log(m * n), log(m * n * k), log(math / memory), log(memory)]
    for rows, columns in _TILES:
        rounds = ceil(m / rows) * ceil(n / columns) / sm_count
        waves = ceil(rounds)
        found += [log(rounds), rounds / waves, min(waves, _MOST_WAVES)]
    found += lying(m, n, k, layout)
    return _START_US + max(memory, math), found


@dataclass(frozen=True)
class TorchMm:
    """What is known of the library on one GPU.

    Attributes:
        arch: The target that was measured.
        provenance: GPU, versions, number of products, errors: for people.
        trees: Corrections of the logarithm of the roofline's time.
    """

    arch: str
    provenance: Mapping[str, Any]
    trees: Trees
    #: The same in C, if anything.
    _native: list[NativeTorch] = field(default_factory=list, init=False, repr=False, compare=False)

    def time_us(self, m: int, n: int, k: int, sm_count: int, layout: str = "kk") -> float:
        """Return microseconds of the product of m x k and k x n, in 16 bits.

        That is behind another kernel by the fit that the package ships for the H200; back to back by the
        fits of calibrations.
        """
        if self._native:
            return self._native[0].time_us(m, n, k, sm_count, lying(m, n, k, layout))
        import numpy as np

        time, features = describe(m, n, k, sm_count, layout)
        added = self.trees.sums(np.array(features, np.float32)[:, None])[0]
        return time * exp(float(added) + self.trees.base)

    def prepare(self, library: OpenLibrary) -> None:
        """Leave roofline and trees to a library from now on, if it is there."""
        opened = None if self._native else library(SOURCE)
        if opened is not None:
            numbers = {
                "bytes_us": _BYTES_US,
                "flops_us": _FLOPS_US,
                "start_us": _START_US,
                "most_waves": _MOST_WAVES,
                "base": self.trees.base,
            }
            self._native.append(NativeTorch(opened, self.trees, _TILES, numbers))


@cache
def load_torch_mm() -> TorchMm:
    """Return the fit that the package ships."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return TorchMm(found["arch"], found["provenance"], Trees.of(found, _FEATURES))


def torch_mm_of(arch: Arch) -> TorchMm:
    """Return the fit for ``arch``: that of its calibration, else the shipped.

    Raises:
        StoreError: The file of its calibration cannot be read, or says nothing.
    """
    return load_torch_mm() if arch.calibration is None else _calibrated(arch.calibration)


@lru_cache(maxsize=8)
def _calibrated(calibration: Calibration) -> TorchMm:
    return read_torch_mm(Path(calibration.path), calibration.digest)


def read_torch_mm(path: Path, digest: str = "") -> TorchMm:
    """Return what a calibration's file says of the library.

    Args:
        path: The file.
        digest: Of the content that is meant; empty for any.

    Raises:
        StoreError: There is no such file, or it says nothing that this version of cutegen understands.
    """
    found = read_calibration(path, digest)
    try:
        return TorchMm(str(found["arch"]), found["provenance"], Trees.of(found["torch_mm"], _FEATURES))
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise StoreError(f"calibration {path} is malformed: {type(error).__name__}: {error}") from error


def reading_c_us(problem: Problem) -> float:
    """Return what reading a matrix of the size of D takes."""
    return problem.m * problem.n * problem.batch * 2 / _BYTES_US


def after_mm_us(problem: Problem) -> float:
    """Return what reading C and an activation in place add to the time of ``torch.mm``; a bias adds nothing.

    Source: 12 products with bias and silu on an H200; those of less than 20 us took 1.4 to 2.3 us longer. 11
    with C took 1.6 us longer in the median than the product and reading C.
    """
    epilogue = problem.epilogue
    if not (epilogue.beta or epilogue.activation):
        return 0.0
    out_us = reading_c_us(problem)
    return (1.5 + out_us if epilogue.beta else 0.0) + (1.5 + 2 * out_us if epilogue.activation else 0.0)


def torch_mm_us(problem: Problem, arch: Arch, sm_count: int) -> float | None:
    """Return what ``torch.mm`` is expected to take for ``problem``, None where it is not known.

    Nothing is expected where rows of D do not start at multiples of 16 bytes: of eight such products on an
    H200 (docs/results/untuned_seed11.json.xz) it took 1.3 to 2.6 times as long as of aligned ones for up to
    13 rows, and 7 to 9 times for more.

    Raises:
        StoreError: The file of the target's calibration cannot be read.
    """
    plain = problem.ab_dtype in _DTYPES and problem.out_dtype == problem.ab_dtype and problem.batch == 1
    plain = plain and not problem.unaligned_out
    if not plain or arch.name != load_torch_mm().arch:
        return None
    return torch_mm_of(arch).time_us(problem.m, problem.n, problem.k, sm_count, problem.layout)
