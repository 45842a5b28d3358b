"""The registers that kernels with rows in registers take, and how many CTAs find room in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutegen.arch import Arch
from cutegen.space import Config, as_integer
from cutegen.space.space import Derived

from .sizes import sums_of_lane

__all__ = ["RegistersTaken", "ctas_with", "resident_ctas"]

_MOST_CTAS, _MOST_THREADS = 32, 2048
"""Of a multiprocessor. Source: CUDA C++ Programming Guide, technical specifications."""
_MOST_OF_CLUSTERS = 8
"""The same of CTAs of clusters of two and more. Source: measured on an H200: of a kernel that only waits, in
CTAs of 64 threads, 4224 run at a time, 32 on each multiprocessor; in clusters of 2, 4, 8 and 16 528, 248, 124
and 58 clusters, which cuOccupancyMaxActiveClusters says, too."""
_STEP = 8
"""Registers are given to threads in steps of so many. Source: CUDA occupancy calculator, for 9.0."""


@dataclass(frozen=True)
class RegistersTaken:
    """Registers of a thread whose row is in registers, where launch bounds set no limit.

    They are the larger of two numbers: while values are worked on, and while a row's sums are read beside
    them. Source: tools/fit_row_registers.py, which compiles kernels.

    Attributes:
        working: Without values.
        per_value: For each value of a row.
        per_weight: For each register of weights as they are loaded.
        reading: Beside the values while sums are read.
        per_sum: For each sum that a lane reads.
        shared: More where CTAs share a row.
    """

    working: float
    per_value: float
    per_weight: float
    reading: float
    per_sum: float
    shared: float

    def of(self, values: int, weights: int, sums: int, is_shared: bool) -> float:
        """Return the registers of a thread with so many values, registers of weights, and sums to read."""
        working = self.working + self.per_value * values
        reading = self.reading + values + self.per_sum * sums + (self.shared if is_shared else 0.0)
        return max(working, reading) + self.per_weight * weights


def resident_ctas(
    config: Config, derived: Derived, values: int, weights: int, arch: Arch, taken: RegistersTaken
) -> int:
    """Return how many CTAs a multiprocessor has at a time.

    As many as launch bounds ask for; where they ask for none and a row is in registers, as many as find room.

    Args:
        config: The kernel's config.
        derived: What the space derives from it.
        values: Of a row, in one thread.
        weights: Registers of one thread for weights that come early.
        arch: The GPU it runs on.
        taken: What kernels of the family take.
    """
    found, threads = as_integer(derived["min_blocks"]), as_integer(derived["threads"])
    cluster_n = config.integer("cluster_n")
    if config["row_in"] == "registers" and found == 1:
        sums = sums_of_lane(config.integer("threads_per_row"), cluster_n)
        found = ctas_with(taken.of(values, weights, sums, cluster_n > 1), threads, arch)
    return min(found, _MOST_OF_CLUSTERS) if cluster_n > 1 else found


def ctas_with(registers: float, threads: int, arch: Arch) -> int:
    """Return how many CTAs find room of which each thread takes so many registers; one in any case."""
    each = _STEP * math.ceil(registers / _STEP)
    return max(1, min(_MOST_CTAS, _MOST_THREADS // threads, arch.registers // (threads * each)))
