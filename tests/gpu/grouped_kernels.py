"""Kernels of grouped products, plain and gated, that their tests on a GPU share."""

from __future__ import annotations

from typing import Any

__all__ = ["DIRECT", "PLAIN", "SWAPPED_TURNS", "TURNS"]

PLAIN: dict[str, Any] = {
    "tile_shape_mn": (128, 128),
    "tile_k": 64,
    "cluster_shape_mn": (1, 1),
    "mma_warpgroups": 1,
    "pingpong": False,
    "swap_ab": False,
    "use_tma_store": True,
    "use_pdl": False,
    "swizzle_size": 1,
    "raster_along_m": True,
}
TURNS = {**PLAIN, "pingpong": True, "cluster_shape_mn": (1, 2), "use_pdl": True, "raster_along_m": False}
DIRECT = {**PLAIN, "tile_shape_mn": (64, 96), "use_tma_store": False, "tile_k": 128}
SWAPPED_TURNS = {**TURNS, "tile_shape_mn": (128, 104), "swap_ab": True, "swizzle_size": 4}
