"""How tiles cover a GEMM: clusters, how many run at once, and what their order costs device memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from cutegen.arch import resident_clusters
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.perf_model.gpu_params import Machine
from cutegen.families.gemm.perf_model.wave_order import Order, Wave, knows_turns, least_loads
from cutegen.families.gemm.problem import Problem

__all__ = ["KEPT", "NEAR", "Geometry", "Tiling", "element_bytes"]

#: Part of L2 below which it keeps an operand. Source: assumed.
KEPT = 0.3
#: Orders that cause up to so many times the least traffic count as equal to the best. Source: judgement.
NEAR = 1.01


def element_bytes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of an element of A and B, and those that are moved for one of D."""
    outputs = 2 if problem.epilogue.beta else 1
    return DTYPE_BYTES[problem.ab_dtype], outputs * DTYPE_BYTES[problem.out_dtype]


class Geometry(NamedTuple):
    """How tiles of one shape cover the output.

    Attributes:
        clusters_m: Clusters of tiles along the kernel's m.
        clusters_n: Along its n.
        clusters: In all, batches included.
        resident: That run at once.
        blocks: Thread blocks of a cluster.
    """

    clusters_m: int
    clusters_n: int
    clusters: int
    resident: int
    blocks: int

    @property
    def has_orders(self) -> bool:
        """Whether there are several clusters along both axes, so that their order matters."""
        return min(self.clusters_m, self.clusters_n) > 1


class Tiling:
    """Counts and traffic for one problem on one GPU; remembers what it has worked out.

    Configs are mappings with ``tile_shape_mn``, ``cluster_shape_mn`` and perhaps ``swap_ab``.
    """

    def __init__(self, problem: Problem, sm_count: int, machine: Machine) -> None:
        self._problem = problem
        self._sm_count = sm_count
        self._l2_bytes = machine.l2_bytes
        in_bytes, out_bytes = element_bytes(problem)
        self._line_bytes = problem.k * in_bytes
        self._out_bytes = problem.m * problem.n * problem.batch * out_bytes
        self._geometries: dict[Any, Geometry] = {}
        self._traffic: dict[Any, float] = {}

    @property
    def knows_turns(self) -> bool:
        """Whether it is known in which order this GPU gives clusters to its GPCs."""
        return knows_turns(self._sm_count)

    def sizes(self, swap: bool) -> tuple[int, int]:
        """Return what the kernel sees as m and n."""
        p = self._problem
        return (p.n, p.m) if swap else (p.m, p.n)

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """Return how the tiles of ``config`` cover the output."""
        key = (config["tile_shape_mn"], config["cluster_shape_mn"], config.get("swap_ab", False))
        known = self._geometries.get(key)
        if known is None:
            (tile_m, tile_n), (cm, cn), swap = key
            rows, cols = self.sizes(swap)
            clusters_m, clusters_n = ceil(rows / (tile_m * cm)), ceil(cols / (tile_n * cn))
            clusters = clusters_m * clusters_n * self._problem.batch
            resident = resident_clusters(self._sm_count, cm * cn)
            known = self._geometries[key] = Geometry(clusters_m, clusters_n, clusters, resident, cm * cn)
        return known

    def traffic(self, config: Mapping[str, Any], swizzle: int, along_m: bool) -> float:
        """Return the bytes that cross device memory when tiles are rasterized in this order."""
        tile, cluster = config["tile_shape_mn"], config["cluster_shape_mn"]
        key = (tile, cluster, config.get("swap_ab", False), swizzle, along_m)
        known = self._traffic.get(key)
        if known is None:
            known = self._traffic[key] = self._of_order(config, swizzle, along_m)
        return known

    def cheapest(self, config: Mapping[str, Any], orders: Sequence[Order]) -> list[Order]:
        """Return those of some orders that cause hardly more traffic than the best."""
        of = self._of_orders(config)
        found = [of(*order) for order in orders]
        most = min(found) * NEAR
        return [order for order, traffic in zip(orders, found, strict=True) if traffic <= most]

    def best_order(
        self,
        config: Mapping[str, Any],
        parts: int,
        orders: Sequence[Order],
        least: Callable[[Wave, Sequence[Order]], Order] = least_loads,
    ) -> Order:
        """Return that of the orders of least traffic with which GPCs load least, with k in so many parts.

        The first of these where it is not known how GPCs take turns. ``least`` is another way to count loads.
        Source: docs/results/gemm_orders_parts.json.
        """
        if not self.is_one_wave(config, parts):  # in one all cause the same traffic
            orders = self.cheapest(config, orders)
        return least(self.wave(config, parts), orders) if self.knows_turns else orders[0]

    def is_one_wave(self, config: Mapping[str, Any], parts: int) -> bool:
        """Whether all clusters of tiles run at once, with k in so many parts."""
        shape = self.geometry(config)
        return shape.clusters * parts <= shape.resident

    def wave(self, config: Mapping[str, Any], parts: int) -> Wave:
        """Return the clusters of tiles, with k in so many parts."""
        shape = self.geometry(config)
        (tile_m, tile_n), (cm, cn) = config["tile_shape_mn"], config["cluster_shape_mn"]
        parts *= self._problem.batch
        sides = tile_m * cm, tile_n * cn
        return Wave(shape.clusters_m, shape.clusters_n, parts, shape.blocks, *sides, shape.resident)

    def _of_order(self, config: Mapping[str, Any], swizzle: int, along_m: bool) -> float:
        return self._of_orders(config)(swizzle, along_m)

    def _of_orders(self, config: Mapping[str, Any]) -> Callable[[int, bool], float]:
        """Return what gives the bytes of an order, with what all orders share worked out once.

        Each round of resident clusters covers a patch of the output and loads its two sides.
        """
        shape = self.geometry(config)
        (tile_m, tile_n), (cm, cn) = config["tile_shape_mn"], config["cluster_shape_mn"]
        rows, cols = self.sizes(config.get("swap_ab", False))
        tiles = shape.clusters_m * shape.clusters_n
        resident = min(shape.resident, tiles)
        load_rows, load_cols = (self._loads(extent, tiles / resident) for extent in (rows, cols))

        def bytes_of(swizzle: int, along_m: bool) -> float:
            major, minor = shape.clusters_n, shape.clusters_m
            if along_m:
                major, minor = minor, major
            band = min(swizzle, minor)
            deep = min(major, resident / band)
            wide = min(minor, max(band, resident / major))
            patch_m, patch_n = (deep, wide) if along_m else (wide, deep)
            return load_rows(patch_m * tile_m * cm) + load_cols(patch_n * tile_n * cn) + self._out_bytes

        return bytes_of

    def _loads(self, extent: int, rounds: float) -> Callable[[float], float]:
        """Return what gives the bytes of one operand for a patch: once, and again as far as L2 has lost it.

        L2 keeps an operand below 30 % of its size and loses one above 80 %. Source: assumed.
        """
        line, batch = self._line_bytes, self._problem.batch
        once = extent * line
        lost = min(1.0, max(0.0, (once / self._l2_bytes - KEPT) / 0.5))
        if not lost:
            return lambda patch: batch * once
        return lambda patch: batch * (once + max(0.0, rounds * min(patch, extent) * line - once) * lost)
