"""In which order the tiles of one wave reach multiprocessors with the fewest loads from L2.

The GPU gives clusters to its GPCs in turn. What several thread blocks of a GPC load at one time leaves L2
once, so clusters that read the same tiles should meet in one GPC: their numbers differ by a multiple of the
GPCs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from cutegen.space import Value, as_flag, as_integer

__all__ = ["Order", "Wave", "clusters_of_gpcs", "least_loads", "loads", "of_several_waves", "orders_of"]

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
        rows: Of a cluster's tiles.
        columns: Of a cluster's tiles.
    """

    clusters_m: int
    clusters_n: int
    parts: int
    blocks: int
    rows: int
    columns: int


def orders_of(swizzle_size: Sequence[Value], raster_along_m: Sequence[Value]) -> list[Order]:
    """Return the orders that these values of both knobs make."""
    return [(as_integer(band), as_flag(along)) for band, along in product(swizzle_size, raster_along_m)]


def of_several_waves(orders: Sequence[Order]) -> list[Order]:
    """Return those of some orders that were measured where tiles take several waves.

    Bands as wide as GPCs that take turns late are for one wave: there they take up to 7 % less time than
    others (docs/results/gemm_orders_bands.json).
    """
    return [order for order in orders if order[0] != GPCS - 1]


def least_loads(wave: Wave, orders: Sequence[Order]) -> Order:
    """Return the first of some orders with which GPCs load least.

    Source: kernels of one wave in eight orders, 80 on an H200 and 80 on an H100 on products drawn at random:
    this one takes 1.0 % longer than the best, tiles along one side 1.8 and 3.2 %, and up to 21 %
    (docs/results/gemm_orders_one_wave.json, gemm_orders_one_wave_h100.json).
    """
    if min(wave.clusters_m, wave.clusters_n) == 1:
        return orders[0]  # all are the same
    found = loads(wave, orders)
    return orders[found.index(min(found))]


def loads(wave: Wave, orders: Sequence[Order]) -> list[int]:
    """Return how many rows and columns GPCs load with each of some orders, each once for every GPC."""
    clusters = wave._replace(rows=1, columns=1)
    counted = (_count(clusters, order) for order in orders)
    return [of_m * wave.rows + of_n * wave.columns for of_m, of_n in counted]


@lru_cache(maxsize=8192)
def _count(wave: Wave, order: Order) -> tuple[int, int]:
    """Return how many clusters' rows and how many columns all GPCs load."""
    rows, columns = _places(wave, order)
    members = clusters_of_gpcs(len(rows), wave.blocks)
    of_m = sum(len({rows[unit] for unit in units}) for units in members)
    return of_m, sum(len({columns[unit] for unit in units}) for units in members)


@lru_cache(maxsize=512)
def clusters_of_gpcs(units: int, blocks: int) -> list[list[int]]:
    """Return which of a wave's clusters of so many thread blocks run on each GPC: their numbers."""
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
