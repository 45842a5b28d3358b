"""In which order the tiles of one wave reach multiprocessors with the fewest loads from L2.

The GPU gives clusters to its GPCs in turn. What several thread blocks of a GPC load at one time leaves L2
once, so clusters that read the same tiles should meet in one GPC: their numbers differ by a multiple of the
GPCs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

__all__ = ["Count", "Order", "Wave", "count_loads", "of_several_waves"]

#: GPCs of an H100 or H200, and thread blocks, one to a multiprocessor, that start before one of the GPCs is
#: full; from then on the others take turns. Source: %smid of clusters of 1 to 16 thread blocks on an H200 and
#: two H100s: seven GPCs have room for 16 thread blocks of clusters, one for 8.
GPCS, FIRST_TURNS = 8, 64

#: How tiles follow each other: ``swizzle_size`` and ``raster_along_m``.
Order: TypeAlias = tuple[int, bool]


class Wave(NamedTuple):
    """Clusters that run at once.

    Attributes:
        clusters_m: Clusters of tiles along the kernel's m.
        clusters_n: Along its n.
        parts: How often these clusters come: batches and parts of k, which share nothing.
        blocks: Thread blocks of a cluster.
    """

    clusters_m: int
    clusters_n: int
    parts: int
    blocks: int


#: Returns, for each order of a wave, how many clusters' rows and how many columns all GPCs load.
Count: TypeAlias = Callable[[Wave, Sequence[Order]], Sequence[tuple[int, int]]]


def of_several_waves(orders: Sequence[Order]) -> list[Order]:
    """Return those of some orders that were measured where tiles take several waves.

    Bands as wide as GPCs that take turns late are for one wave: there they take up to 7 % less time than
    others (docs/results/gemm_orders_bands.json).
    """
    return [order for order in orders if order[0] != GPCS - 1]


def count_loads(wave: Wave, orders: Sequence[Order]) -> Sequence[tuple[int, int]]:
    """Return, for each order, the clusters' rows and columns that GPCs load, each once for every GPC."""
    return _count_loads(wave, tuple(orders))


@lru_cache(maxsize=4096)
def _count_loads(wave: Wave, orders: tuple[Order, ...]) -> tuple[tuple[int, int], ...]:
    members = _members(wave.clusters_m * wave.clusters_n * wave.parts, wave.blocks)
    found = []
    for order in orders:
        rows, columns = _places(wave, order)
        of_m = sum(len({rows[unit] for unit in units}) for units in members)
        of_n = sum(len({columns[unit] for unit in units}) for units in members)
        found.append((of_m, of_n))
    return tuple(found)


@lru_cache(maxsize=512)
def _members(units: int, blocks: int) -> list[list[int]]:
    """Return which clusters of a wave run on each GPC."""
    first = min(units, FIRST_TURNS // blocks)
    found = [list(range(gpc, first, GPCS)) for gpc in range(GPCS)]
    for gpc in range(1, GPCS):
        found[gpc] += range(first + gpc - 1, units, GPCS - 1)
    return found


def _places(wave: Wave, order: Order) -> tuple[list[int], list[int]]:
    """Return the row and the column of each cluster by its number; those of another part are others."""
    swizzle, along_m = order
    major, minor = (wave.clusters_m, wave.clusters_n) if along_m else (wave.clusters_n, wave.clusters_m)
    band = min(swizzle, minor)
    of_major: list[int] = []
    of_minor: list[int] = []
    for part in range(wave.parts):
        for start in range(0, minor, band):
            width = min(band, minor - start)
            for at in range(major):
                of_major += [part * major + at] * width
                of_minor += range(part * minor + start, part * minor + start + width)
    return (of_major, of_minor) if along_m else (of_minor, of_major)
