"""How long ``torch.mm`` takes, roughly: what an untuned GEMM is compared with before it is measured.

The library chooses among tiles of its own. It is taken to be as fast as the best of the usual ones, by whole
waves, or as memory allows. ``tools/fit_torch_mm.py`` fits the constants to measured times.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from cutegen.families.gemm.problem import Problem

__all__ = ["FILE", "Constants", "fitted", "torch_mm_us"]

FILE = Path(__file__).with_name("torch_mm.json")
#: Tiles of D that libraries have kernels for. Source: names of cuBLAS kernels in profiles of an H200.
_TILES = ((256, 128), (192, 128), (128, 128), (256, 64), (128, 64), (64, 64), (128, 32), (128, 16), (64, 8))
_SPLITS = (1, 2, 4)
#: 16-bit types, which all take as long.
_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Constants:
    """What is believed of the library on one GPU; all fitted.

    Attributes:
        start_us: From one call's start to its first multiply, and from its last to the end.
        bytes_us: Bytes of device memory per microsecond.
        flops_us: Operations per microsecond of all SMs, with the largest tile.
        wave_us: What each wave of tiles adds.
        small_tile: Exponent by which tiles of less area are slower.
        overlap: How far arithmetic and memory hide each other: norm of the two times.
        split_us: What adding up the parts of a split k takes.
    """

    start_us: float
    bytes_us: float
    flops_us: float
    wave_us: float
    small_tile: float
    overlap: float
    split_us: float

    def time_us(self, m: int, n: int, k: int, sm_count: int) -> float:
        """Return microseconds of the product of m x k and k x n, in 16 bits."""
        memory = 2 * (m * k + k * n + m * n) / self.bytes_us
        shapes = {tile for rows, columns in _TILES for tile in ((rows, columns), (columns, rows))}
        math = min(self._math_us(tile, m, n, k, sm_count) for tile in shapes)
        both: float = (memory**self.overlap + math**self.overlap) ** (1 / self.overlap)
        return self.start_us + both

    def _math_us(self, tile: tuple[int, int], m: int, n: int, k: int, sm_count: int) -> float:
        area, tiles = prod(tile), -(-m // tile[0]) * -(-n // tile[1])
        rate: float = self.flops_us / sm_count * (area / prod(_TILES[0])) ** self.small_tile
        splits = [split for split in _SPLITS if split == 1 or split * tiles <= sm_count]
        return min(
            -(-tiles * split // sm_count) * (2 * area * k / split / rate + self.wave_us)
            + (self.split_us if split > 1 else 0.0)
            for split in splits
        )


@cache
def fitted(arch: str) -> Constants | None:
    """Return the constants of the main GPU of ``arch``, None where nothing was measured."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return Constants(**found["constants"]) if found["arch"] == arch else None


def torch_mm_us(problem: Problem, arch: str, sm_count: int) -> float | None:
    """Return what ``torch.mm`` is expected to take for ``problem``, None where it is not known."""
    constants = fitted(arch)
    plain = problem.ab_dtype in _DTYPES and problem.out_dtype == problem.ab_dtype and problem.batch == 1
    if constants is None or not plain:
        return None
    return constants.time_us(problem.m, problem.n, problem.k, sm_count)
