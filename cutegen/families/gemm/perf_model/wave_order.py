"""In which order tiles reach multiprocessors with the fewest loads from L2.

The GPU gives clusters to its GPCs in turn. What several thread blocks of a GPC load at one time leaves L2
once. Kernels for Hopper therefore give the clusters of a GPC work units that follow each other
(templates/gemm/_gpc_parts.j2), and the order of these decides how many operands a GPC loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from typing import NamedTuple, TypeAlias

from cutegen.space import Value, as_flag, as_integer

__all__ = [
    "GPCS",
    "KNOWN_SMS",
    "PAIRS",
    "SMALL",
    "SMALL_SMS",
    "Order",
    "Wave",
    "knows_turns",
    "least_loads",
    "loads",
    "orders_of",
    "turn_of",
    "units_of_gpcs",
]

#: Multiprocessors of the GPUs whose turns are known: H100 and H200. Source: docs/results/gpc_turns.json.
KNOWN_SMS = 132
#: GPCs that take turns; the one of them, by its turn, that is full first, and how many multiprocessors it
#: has; groups of two multiprocessors, which take turns before the GPCs, as if they were some. Source: the
#: same. The small one has another turn on other chips: which one it is taken to be makes little difference.
GPCS, SMALL, SMALL_SMS, PAIRS = 8, 1, 8, 4

#: How tiles follow each other: ``swizzle_size`` and ``raster_along_m``.
Order: TypeAlias = tuple[int, bool]


class Wave(NamedTuple):
    """Clusters of tiles, of which some run at once.

    Attributes:
        clusters_m: Clusters of tiles along the kernel's m.
        clusters_n: Along its n.
        parts: How often these clusters come: batches and parts of k, which share nothing.
        blocks: Thread blocks of a cluster.
        rows: Of a cluster's tiles.
        columns: Of a cluster's tiles.
        resident: Clusters that run at once.
    """

    clusters_m: int
    clusters_n: int
    parts: int
    blocks: int
    rows: int
    columns: int
    resident: int


def orders_of(swizzle_size: Sequence[Value], raster_along_m: Sequence[Value]) -> list[Order]:
    """Return the orders that these values of both knobs make."""
    return [(as_integer(band), as_flag(along)) for band, along in product(swizzle_size, raster_along_m)]


def knows_turns(sm_count: float) -> bool:
    """Return whether it is known in which order a GPU of so many SMs gives clusters to its GPCs."""
    return sm_count == KNOWN_SMS


def least_loads(wave: Wave, orders: Sequence[Order]) -> Order:
    """Return the first of some orders with which GPCs load least: in the first wave, if there are several."""
    if min(wave.clusters_m, wave.clusters_n) == 1:
        return orders[0]  # all are the same
    found = loads(wave, orders)
    return orders[found.index(min(found))]


def loads(wave: Wave, orders: Sequence[Order]) -> list[int]:
    """Return how many rows and columns GPCs load with each of some orders, each once for every GPC."""
    counted = (_clusters_loaded(wave, order) for order in orders)
    return [of_m * wave.rows + of_n * wave.columns for of_m, of_n in counted]


def _clusters_loaded(wave: Wave, order: Order) -> tuple[int, int]:
    """Return how many clusters' rows and how many columns all GPCs load."""
    swizzle, along_m = order
    major, minor = (wave.clusters_m, wave.clusters_n) if along_m else (wave.clusters_n, wave.clusters_m)
    units, parts, band = min(major * minor * wave.parts, wave.resident), wave.parts, min(swizzle, minor)
    if units <= band * major:  # what follows the first band makes no difference, so many waves are the same
        major, minor, parts = -(-units // band), band, 1
    along, across = _count(_Bands(major, minor, parts, band), units, wave.blocks)
    return (along, across) if along_m else (across, along)


class _Bands(NamedTuple):
    """Clusters of tiles in bands, which are walked through one after the other.

    Attributes:
        major: Clusters along a band.
        minor: Across all bands.
        parts: How often these clusters come.
        width: Clusters across a band.
    """

    major: int
    minor: int
    parts: int
    width: int


@lru_cache(maxsize=8192)
def _count(bands: _Bands, units: int, blocks: int) -> tuple[int, int]:
    """Return at how many places along bands and across them GPCs have work, each once for every GPC."""
    places = list(islice(_places(bands), units))
    of_gpcs = [places[first : first + count] for first, count in units_of_gpcs(units, blocks)]
    return sum(len({at for at, _ in some}) for some in of_gpcs), sum(
        len({across for _, across in some}) for some in of_gpcs
    )


@lru_cache(maxsize=512)
def units_of_gpcs(units: int, blocks: int) -> tuple[tuple[int, int], ...]:
    """Return the work units of each group of multiprocessors, the first and how many: alone, then by GPC.

    Args:
        units: Work units that run at once.
        blocks: Thread blocks of a cluster.
    """
    counts = [0] * GPCS
    alone = 0
    for cluster in range(units):
        turn, _ = turn_of(cluster, blocks)
        if turn < 0:
            alone += 1
        else:
            counts[turn] += 1
    starts = [alone + sum(counts[:gpc]) for gpc in range(GPCS)]
    return (*((unit, 1) for unit in range(alone)), *zip(starts, counts, strict=True))


def turn_of(cluster: int, blocks: int) -> tuple[int, int]:
    """Return the GPC of a cluster by its turn, and how many clusters this one has before.

    Groups of two multiprocessors have turns below 0.
    """
    rounds = {1: 2, 2: 1}.get(blocks, 0)  # in which these take part
    apart, full = rounds * (PAIRS + GPCS), SMALL_SMS // blocks
    late = apart + (full - rounds) * GPCS
    if cluster < apart:
        before, turn = divmod(cluster, PAIRS + GPCS)
        return turn - PAIRS, before
    if cluster < late:
        before, turn = divmod(cluster - apart, GPCS)
        return turn, before + rounds
    before, turn = divmod(cluster - late, GPCS - 1)
    return turn + (turn >= SMALL), before + full


def _places(bands: _Bands) -> Iterator[tuple[int, int]]:
    """Yield the place of each work unit along its band and across all; those of another part are others."""
    for part in range(bands.parts):
        for start in range(0, bands.minor, bands.width):
            end = min(start + bands.width, bands.minor)
            for at in range(part * bands.major, (part + 1) * bands.major):
                for across in range(part * bands.minor + start, part * bands.minor + end):
                    yield at, across
