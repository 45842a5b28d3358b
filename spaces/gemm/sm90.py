"""Which Hopper GEMM configs exist, which are legal, and what follows from each of them.

``tile_shape_mn`` is the tile as the kernel sees it: with ``swap_ab`` its first number runs along n of
the problem and its second along m.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from math import prod
from typing import TypeAlias

from cutegen.arch import Arch, resident_clusters
from cutegen.dtypes import DTYPE_BYTES
from cutegen.families.gemm.perf_model.fitted import has_slow_memory
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Launch, Rule, Space, Value

from .hopper_resources import (
    REGISTERS,
    SLAB,
    WARPGROUP,
    accumulators,
    consumers,
    empty_arrivals,
    epilogue_columns,
    least_buffers,
    loaded_columns,
    stage_bytes,
    store_bytes,
)
from .shared import (
    RUN_TIME_KNOBS,
    WORKSPACE_LIMIT_BYTES,
    compile_view,
    kernel_sizes,
    padded_blocks,
    sizes_round_up_below_2_to_31,
    split_k_stores_partial_sums,
    stages_and_buffers,
    tile_counts,
    tile_order,
    tma_store_needs_aligned_output,
)

BARRIER_BYTES = 1024
"""Shared memory before the first tile: mbarriers, padded to the 1024 bytes that swizzled tiles align to."""
MAX_STAGES = 64
"""A stage has two 8-byte mbarriers, which live in those 1024 bytes."""
LONE_ACCUMULATORS = 200
"""Accumulator registers that a thread may hold when it owns 240 (208 wide tiles spill; see the rule)."""
MAX_STORE_BUFFERS = 4
MAX_STREAM_PARTS = 32
#: Tile, cluster, warpgroups, k tile in lines of 128 bytes, kind.
_Candidate: TypeAlias = tuple[tuple[int, int], tuple[int, int], int, int, str]

DOMAINS: Mapping[str, tuple[Value, ...]] = {
    "tile_shape_mn": tuple((m, n) for m in (128, 64, 192, 256) for n in range(8, 257, 8)),
    "tile_k": (64, 128, 256),
    "cluster_shape_mn": ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)),
    "mma_warpgroups": (2, 1, 3),
    "pingpong": (False, True),
    "swap_ab": (False, True),
    "use_tma_store": (True, False),
    "use_pdl": (False, True),
    "stream_k": (False, True),
    "reduction": ("fixed", "arrival"),
    "split_k": (*range(1, 34), 44, 66),
    "swizzle_size": (1, 2, 4, 8),
    "raster_along_m": (False, True),
}

#: Tile, cluster, warpgroups, k tile in lines of 128 bytes, kind, for 16-bit operands. Source: kernels
#: timed on an H200 (docs/results/gemm_sweep_h200.json.xz). Seventy, added one by one, left the best of
#: them least behind the best of 223 on 791 shapes; thirteen more came the same way after 330 shapes of 80
#: to 2048 rows. With these and the swapped tiles of 64 x 136 to 64 x 256, which hold all of as many rows,
#: the best is 0.6 % behind the best of 284 where m is 129 to 256, and 0.8 % up to 512; without, 1.1 % and
#: 1.7 %. Others left again: three were timed with few rows only, and at 0.73 to 0.96 of torch.mm with
#: many, on random products; without 13 others the best is 0.02 % further behind on 1594 shapes. What took
#: their places was fastest where ranges are slow: 64x176 and 128x96 with 1x2 at m of 213 and 182
#: (docs/results/middle_m.json), and 13 kernels on 35 shapes of 146 to 7628 rows
#: (docs/results/middle_kernels.json.xz), where the best of all before was 2.4 % behind the best of twice
#: as many. 128x24 and 128x32 with two warpgroups: where tiles of 64 make a second wave, 9216 columns by 18
#: and 30 rows, they take 12 % less than all others (docs/results/range_check_9216x3072.json).
DEFAULT_CANDIDATES = (
    ((64, 80), (1, 1), 1, 2, ""),
    ((64, 80), (2, 1), 1, 2, ""),
    ((64, 144), (2, 1), 1, 1, "pingpong"),
    ((64, 160), (2, 1), 1, 1, ""),
    ((64, 176), (2, 1), 1, 1, ""),
    ((64, 192), (2, 1), 1, 1, "pingpong"),
    ((128, 112), (2, 1), 2, 1, ""),
    ((128, 128), (1, 1), 1, 1, "pingpong"),
    ((128, 128), (2, 1), 1, 1, "pingpong"),
    ((128, 144), (2, 1), 1, 1, "pingpong"),
    ((128, 192), (2, 1), 1, 1, "pingpong"),
    ((128, 200), (1, 1), 1, 1, "pingpong"),
    ((128, 224), (2, 1), 2, 1, ""),
    ((192, 96), (1, 1), 1, 1, "pingpong"),
    ((192, 112), (1, 1), 3, 1, ""),
    ((192, 128), (1, 2), 1, 1, "pingpong"),
    ((64, 8), (1, 1), 1, 2, "swapped"),
    ((64, 8), (4, 1), 1, 2, "swapped"),
    ((64, 16), (1, 1), 1, 2, "pingpong swapped"),
    ((64, 16), (4, 1), 1, 2, "swapped"),
    ((64, 24), (1, 1), 1, 2, "pingpong swapped"),
    ((64, 32), (1, 1), 1, 2, "swapped"),
    ((64, 32), (4, 1), 1, 2, "swapped"),
    ((64, 48), (1, 1), 1, 2, "swapped"),
    ((64, 56), (1, 1), 1, 2, "swapped"),
    ((64, 56), (1, 2), 1, 2, "swapped"),
    ((64, 56), (4, 1), 1, 2, "swapped"),
    ((64, 64), (1, 1), 1, 2, "swapped"),
    ((64, 64), (1, 2), 1, 2, "swapped"),
    ((64, 64), (4, 1), 1, 2, "swapped"),
    ((64, 72), (1, 1), 1, 2, "swapped"),
    ((64, 72), (1, 2), 1, 2, "swapped"),
    ((64, 72), (4, 1), 1, 2, "swapped"),
    ((64, 80), (1, 2), 1, 2, "swapped"),
    ((64, 88), (1, 2), 1, 1, "swapped"),
    ((64, 96), (2, 1), 1, 2, "swapped"),
    ((64, 96), (4, 1), 1, 1, "swapped"),
    ((64, 104), (2, 2), 1, 1, "swapped"),
    ((64, 128), (4, 1), 1, 1, "swapped"),
    ((64, 136), (1, 2), 1, 1, "swapped"),
    ((64, 144), (1, 2), 1, 1, "swapped"),
    ((64, 152), (1, 1), 1, 1, "swapped"),
    ((64, 160), (1, 1), 1, 1, "swapped"),
    ((64, 168), (1, 1), 1, 1, "swapped"),
    ((64, 192), (1, 1), 1, 1, "swapped"),
    ((64, 232), (1, 1), 1, 1, "swapped"),
    ((128, 8), (4, 1), 2, 2, "swapped"),
    ((128, 16), (1, 1), 2, 2, "swapped"),
    ((128, 24), (1, 1), 2, 2, "swapped"),
    ((128, 32), (1, 1), 2, 2, "swapped"),
    ((128, 72), (1, 2), 2, 1, "swapped"),
    ((128, 80), (1, 1), 1, 1, "swapped"),
    ((128, 80), (1, 2), 2, 1, "swapped"),
    ((128, 88), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 96), (1, 1), 2, 1, "swapped"),
    ((128, 96), (1, 2), 2, 1, "swapped"),
    ((128, 104), (1, 1), 2, 1, "swapped"),
    ((128, 104), (1, 2), 1, 1, "pingpong swapped"),
    ((128, 104), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 112), (1, 1), 2, 1, "swapped"),
    ((128, 112), (1, 2), 2, 1, "swapped"),
    ((128, 112), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 120), (1, 1), 1, 1, "pingpong swapped"),
    ((128, 120), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 128), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 136), (1, 1), 1, 1, "pingpong swapped"),
    ((128, 136), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 144), (1, 1), 2, 1, "swapped"),
    ((128, 144), (1, 2), 2, 1, "swapped"),
    ((128, 144), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 152), (1, 1), 1, 1, "pingpong swapped"),
    ((128, 152), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 160), (1, 1), 2, 1, "swapped"),
    ((128, 160), (1, 2), 2, 1, "swapped"),
    ((128, 168), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 176), (1, 1), 2, 1, "swapped"),
    ((128, 176), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 184), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 192), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 200), (1, 1), 1, 1, "pingpong swapped"),
    ((192, 72), (1, 2), 3, 1, "swapped"),
    ((192, 88), (1, 1), 1, 1, "pingpong swapped"),
    ((192, 112), (1, 1), 3, 1, "swapped"),
    ((192, 112), (1, 2), 3, 1, "swapped"),
    ((192, 144), (1, 1), 3, 1, "swapped"),
    ((256, 88), (2, 1), 2, 1, "swapped"),
    ((256, 112), (1, 1), 2, 1, "swapped"),
    ((64, 128), (2, 1), 1, 1, "split"),
    ((64, 8), (1, 1), 1, 2, "swapped split"),
    ((64, 16), (1, 1), 1, 2, "swapped split"),
    ((64, 24), (1, 1), 1, 2, "swapped split"),
    ((64, 32), (1, 1), 1, 2, "swapped split"),
    ((64, 48), (1, 1), 1, 2, "swapped split"),
    ((64, 64), (1, 1), 1, 2, "swapped split"),
    ((64, 80), (1, 1), 1, 2, "swapped split"),
    ((64, 96), (1, 1), 1, 2, "swapped split"),
    ((128, 80), (1, 2), 2, 1, "swapped split"),
    ((128, 96), (1, 2), 2, 1, "swapped split"),
    ((128, 104), (1, 2), 2, 1, "swapped split"),
    ((128, 144), (1, 1), 2, 1, "swapped split"),
)
#: The same, more of them for GEMMs alone: families that borrow candidates have not been measured with these.
#: Source: 40 came one by one as the fit predicts them to gain most on 2162 random products of more than 64
#: rows. On 268 others the choice was a new one on 72, where it took 2.0 % less time in the geometric mean.
#: Seven are left out, tiles that are not swapped and share nothing in a cluster: four of these lost where
#: they were chosen (docs/results/wide_tiles.json.xz). Clusters of eight are for tiles that are a wave of at
#: most 15 clusters: on 322 products (docs/results/gemm_products_h200_801.json.xz,
#: gemm_products_h200_811.json.xz) they take less time than all others on 125, up to 18 % less; 30 took part
#: in most of that or are predicted to gain most. In their place went four that are worth nothing beside them.
#: The last fifteen came when tiles of one wave were given today's order, which favours others: they were
#: fastest of up to nine on some of 381 products (docs/results/gemm_products_h200_1001.json.xz,
#: gemm_products_h100_1001.json.xz), or are predicted to gain most; fifteen that gain nothing beside them
#: went. The last five are for what was slow untuned: 64x144 for 300 to 450 rows of 2880 columns and 160 to
#: 200 of 6144, 64x112 for 210 to 223 of 4096, and k split for 145 to 176 rows. On 65 random GEMMs for which
#: they changed the choice (docs/results/new_kernels_behind.json.xz,
#: new_kernels_back_to_back.json.xz) the new one takes 2.5 and 3.0 % less time, at worst 16 and 20 % more.
FURTHER_CANDIDATES = (
    ((64, 224), (2, 1), 1, 1, ""),
    ((128, 176), (2, 1), 1, 1, "pingpong"),
    ((192, 168), (1, 1), 3, 1, ""),
    ((64, 104), (1, 2), 1, 1, "swapped"),
    ((64, 152), (1, 2), 1, 1, "pingpong swapped"),
    ((64, 168), (1, 2), 1, 1, "pingpong swapped"),
    ((128, 88), (1, 2), 2, 1, "swapped"),
    ((128, 104), (1, 2), 2, 1, "swapped"),
    ((128, 136), (1, 2), 1, 1, "pingpong swapped"),
    ((128, 160), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 216), (2, 1), 2, 1, "swapped"),
    ((128, 248), (2, 1), 2, 1, "swapped"),
    ((192, 88), (1, 2), 3, 1, "swapped"),
    ((192, 96), (1, 2), 3, 1, "swapped"),
    ((192, 104), (1, 2), 1, 1, "pingpong swapped"),
    ((192, 120), (1, 2), 1, 1, "pingpong swapped"),
    ((192, 128), (1, 1), 3, 1, "swapped"),
    ((192, 136), (1, 2), 3, 1, "swapped"),
    ((192, 152), (1, 1), 3, 1, "swapped"),
    ((192, 160), (1, 2), 3, 1, "swapped"),
    ((192, 168), (1, 1), 3, 1, "swapped"),
    ((256, 104), (2, 1), 2, 1, "swapped"),
    ((64, 128), (1, 2), 1, 1, ""),
    ((64, 32), (1, 2), 1, 2, "swapped"),
    ((64, 40), (1, 1), 1, 2, "swapped"),
    ((64, 40), (1, 2), 1, 2, "swapped"),
    ((128, 88), (4, 1), 2, 1, "swapped"),
    ((128, 208), (2, 1), 2, 1, "swapped"),
    ((128, 224), (2, 1), 2, 1, "swapped"),
    ((128, 232), (1, 1), 2, 1, "swapped"),
    ((192, 176), (1, 1), 3, 1, "swapped"),
    ((64, 16), (4, 2), 1, 2, "swapped"),
    ((64, 32), (4, 2), 1, 2, "swapped"),
    ((64, 40), (2, 4), 1, 2, "swapped"),
    ((64, 48), (4, 2), 1, 2, "swapped"),
    ((64, 48), (2, 4), 1, 2, "swapped"),
    ((64, 64), (2, 4), 1, 2, "swapped"),
    ((64, 88), (2, 4), 1, 1, "swapped"),
    ((64, 88), (4, 2), 1, 1, "swapped"),
    ((64, 104), (4, 2), 1, 1, "swapped"),
    ((64, 128), (4, 2), 1, 1, "swapped"),
    ((64, 152), (4, 2), 1, 1, "swapped"),
    ((64, 96), (2, 4), 1, 1, ""),
    ((64, 104), (2, 4), 1, 1, ""),
    ((64, 128), (2, 4), 1, 1, ""),
    ((64, 160), (4, 2), 1, 1, ""),
    ((64, 176), (4, 2), 1, 1, ""),
    ((128, 72), (4, 2), 2, 1, "swapped"),
    ((128, 96), (4, 2), 1, 1, "pingpong swapped"),
    ((128, 136), (4, 2), 1, 1, "pingpong swapped"),
    ((128, 144), (4, 2), 1, 1, "pingpong swapped"),
    ((128, 184), (4, 2), 1, 1, "pingpong swapped"),
    ((64, 72), (2, 4), 1, 1, "swapped"),
    ((64, 136), (4, 2), 1, 1, "swapped"),
    ((128, 152), (4, 2), 1, 1, "pingpong swapped"),
    ((128, 160), (4, 2), 1, 1, "pingpong swapped"),
    ((64, 24), (4, 1), 1, 2, "swapped"),
    ((64, 152), (4, 1), 1, 1, "pingpong swapped"),
    ((128, 176), (4, 1), 1, 1, "pingpong swapped"),
    ((128, 200), (1, 2), 1, 1, "pingpong swapped"),
    ((128, 112), (4, 1), 2, 1, "swapped"),
    ((256, 152), (1, 2), 2, 1, "swapped"),
    ((256, 136), (1, 2), 2, 1, "swapped"),
    ((128, 168), (1, 2), 1, 1, "pingpong swapped"),
    ((192, 192), (1, 2), 3, 1, "swapped"),
    ((64, 96), (4, 2), 1, 1, ""),
    ((192, 136), (2, 1), 3, 1, "swapped"),
    ((128, 96), (4, 1), 2, 1, "swapped"),
    ((128, 160), (2, 1), 1, 1, "pingpong"),
    ((256, 160), (1, 2), 2, 1, "swapped"),
    ((128, 168), (4, 2), 1, 1, "pingpong swapped"),
    ((128, 104), (4, 1), 2, 1, "swapped"),
    ((128, 96), (4, 2), 1, 1, "pingpong"),
    ((64, 96), (4, 2), 1, 1, "swapped"),
    ((64, 144), (1, 2), 1, 1, ""),
    ((64, 144), (2, 4), 1, 1, ""),
    ((64, 112), (1, 2), 1, 1, "swapped"),
    ((128, 160), (1, 1), 1, 1, "swapped split"),
    ((128, 176), (1, 1), 1, 1, "swapped split"),
)
#: The same where an operand is contiguous along m or n: more thread blocks share what such a tile loads,
#: which is more. Source: 693 kernels timed on 353 products on an H200
#: (docs/results/gemm_products_h200_mn.json.xz, gemm_products_h200_223.json.xz); 34 came one by one as the fit
#: predicts them to gain most on 600 random products.
ALONG_COLUMNS_CANDIDATES = (
    ((64, 144), (1, 4), 1, 1, ""),
    ((64, 144), (4, 1), 1, 1, ""),
    ((64, 144), (2, 2), 1, 1, ""),
    ((64, 192), (4, 1), 1, 1, ""),
    ((64, 216), (4, 1), 1, 1, "pingpong"),
    ((128, 160), (1, 2), 1, 1, "pingpong"),
    ((128, 200), (2, 1), 1, 1, "pingpong"),
    ((128, 256), (1, 2), 2, 1, ""),
    ((192, 152), (1, 2), 3, 1, ""),
    ((64, 32), (1, 4), 1, 2, "swapped"),
    ((64, 80), (4, 1), 1, 2, "swapped"),
    ((128, 8), (2, 1), 2, 2, "swapped"),
    ((128, 16), (4, 1), 2, 2, "swapped"),
    ((128, 32), (4, 1), 2, 2, "swapped"),
    ((128, 64), (2, 2), 2, 1, "swapped"),
    ((128, 64), (4, 1), 2, 1, "swapped"),
    ((128, 96), (2, 2), 2, 1, "swapped"),
    ((128, 120), (4, 1), 1, 1, "pingpong swapped"),
    ((128, 144), (4, 1), 1, 1, "pingpong swapped"),
    ((128, 200), (2, 1), 1, 1, "pingpong swapped"),
    ((128, 232), (2, 1), 2, 1, "swapped"),
    ((192, 24), (4, 1), 3, 2, "swapped"),
    ((192, 80), (2, 2), 3, 1, "swapped"),
    ((192, 128), (2, 1), 1, 1, "pingpong swapped"),
    ((192, 160), (2, 1), 3, 1, "swapped"),
    ((192, 176), (2, 1), 3, 1, "swapped"),
    ((256, 136), (2, 1), 2, 1, "swapped"),
    ((256, 144), (2, 1), 2, 1, "swapped"),
    ((256, 152), (2, 1), 2, 1, "swapped"),
    ((256, 168), (1, 2), 2, 1, "swapped"),
    ((64, 64), (2, 4), 1, 1, ""),
    ((64, 80), (2, 4), 1, 1, ""),
    ((64, 160), (2, 4), 1, 1, "pingpong"),
    ((64, 192), (2, 4), 1, 1, "pingpong"),
    ((128, 160), (2, 4), 1, 1, "pingpong"),
    ((128, 176), (2, 4), 1, 1, "pingpong"),
    ((64, 64), (4, 2), 1, 2, "swapped"),
    ((64, 120), (4, 2), 1, 1, "swapped"),
    ((64, 144), (4, 2), 1, 1, "swapped"),
    ((64, 240), (4, 2), 1, 1, "swapped"),
    ((128, 96), (4, 2), 2, 1, "swapped"),
    ((128, 104), (2, 4), 1, 1, "pingpong swapped"),
    ((128, 112), (4, 2), 1, 1, "pingpong swapped"),
    ((128, 112), (2, 4), 2, 1, "swapped"),
    ((64, 208), (2, 4), 1, 1, ""),
    ((128, 104), (2, 4), 2, 1, ""),
    ((128, 200), (4, 2), 2, 1, "swapped"),
    ((192, 120), (2, 1), 1, 1, "pingpong swapped"),
    ((64, 48), (2, 4), 1, 2, ""),
)
#: The same where memory is slower than the H200's: clusters of four thread blocks share what that limits.
#: Source: 413 kernels timed at least twice, or in smaller clusters, on 243 products on an H100
#: (docs/results/gemm_wide_h100.json.xz); 30 came one by one as the fit predicts them to gain most on 980
#: random products, large gains counted more, and 128x136; two have come to all GPUs since.
SLOW_MEMORY_CANDIDATES = (
    ((64, 104), (4, 1), 1, 1, ""),
    ((64, 160), (4, 1), 1, 1, ""),
    ((64, 184), (4, 1), 1, 1, ""),
    ((128, 256), (2, 1), 2, 1, ""),
    ((192, 152), (1, 2), 3, 1, ""),
    ((192, 192), (2, 1), 3, 1, ""),
    ((256, 160), (2, 2), 2, 1, ""),
    ((64, 8), (1, 2), 1, 2, "swapped"),
    ((64, 16), (1, 2), 1, 2, "swapped"),
    ((64, 32), (1, 2), 1, 2, "swapped"),
    ((64, 32), (1, 4), 1, 2, "swapped"),
    ((64, 56), (1, 4), 1, 2, "swapped"),
    ((64, 136), (4, 1), 1, 1, "swapped"),
    ((64, 160), (4, 1), 1, 1, "swapped"),
    ((64, 184), (4, 1), 1, 1, "swapped"),
    ((64, 224), (4, 1), 1, 1, "swapped"),
    ((128, 136), (4, 1), 2, 1, "swapped"),
    ((128, 160), (4, 1), 2, 1, "swapped"),
    ((128, 176), (4, 1), 2, 1, "swapped"),
    ((128, 200), (1, 2), 2, 1, "swapped"),
    ((128, 208), (1, 2), 2, 1, "swapped"),
    ((128, 224), (2, 1), 2, 1, "swapped"),
    ((192, 72), (1, 4), 3, 1, "swapped"),
    ((192, 96), (1, 4), 3, 1, "swapped"),
    ((192, 160), (2, 1), 3, 1, "swapped"),
    ((192, 160), (2, 2), 3, 1, "swapped"),
    ((192, 168), (1, 2), 3, 1, "swapped"),
    ((192, 192), (4, 1), 3, 1, "swapped"),
    ((256, 128), (2, 1), 2, 1, "swapped"),
    ((256, 144), (2, 1), 2, 1, "swapped"),
)
#: The same for 8-bit operands. Source: 30 kernels timed on 70 shapes on an H200, in bf16; the model chooses
#: best among these, in the geometric mean.
DEFAULT_CANDIDATES_8_BIT = (
    ((128, 192), (1, 1), 1, 1, "pingpong"),
    ((128, 176), (2, 1), 1, 1, "pingpong"),
    ((128, 112), (2, 1), 1, 1, "pingpong"),
    ((64, 256), (2, 1), 1, 1, "pingpong"),
    ((64, 96), (1, 1), 1, 1, "pingpong"),
    ((128, 96), (2, 1), 2, 1, ""),
    ((64, 128), (1, 1), 1, 1, ""),
    ((64, 64), (1, 1), 1, 2, "swapped"),
    ((64, 32), (1, 1), 1, 2, "swapped"),
    ((64, 16), (1, 1), 1, 2, "swapped"),
    ((64, 8), (1, 1), 1, 2, "swapped"),
    ((64, 256), (2, 1), 1, 1, "split"),
    ((64, 64), (1, 1), 1, 2, "split"),
    ((64, 16), (1, 1), 1, 2, "swapped split"),
    ((64, 8), (1, 1), 1, 2, "swapped split"),
)


def three_stages_fit(per_stage: int, stores: tuple[int, int], arch: Arch) -> bool:
    """Return whether three stages of so many bytes fit beside barriers and two rounds of store buffers.

    ``stores`` is what :func:`store_bytes` returns.
    """
    buffers, tail = stores
    return BARRIER_BYTES + 2 * buffers + tail + 3 * per_stage <= arch.smem_bytes


# --- rules: parameters name the knobs a rule looks at, docstrings are the reasons users read ---


def tf32_is_for_blackwell(problem: Problem) -> bool:
    """The compiler has no tf32 MMA for sm_90a, so tf32 runs on sm_100a and sm_103a only."""
    return problem.ab_dtype != "tf32"


def warpgroups_divide_tile(tile_shape_mn: tuple[int, int], mma_warpgroups: int) -> bool:
    """tile_m must be a multiple of 64 rows for each of the mma_warpgroups that share it."""
    return tile_shape_mn[0] % (SLAB * mma_warpgroups) == 0


def tile_k_is_one_or_two_swizzle_rows(tile_k: int, problem: Problem) -> bool:
    """A k tile is one or two rows of 128 bytes, the span of the shared-memory swizzle: 64 or 128 elements
    of 16 bits, 128 or 256 of 8."""
    return tile_k * DTYPE_BYTES[problem.ab_dtype] in (128, 256)


def int8_tiles_have_widths_of_the_mma(tile_shape_mn: tuple[int, int], problem: Problem) -> bool:
    """The int8 MMA is 8, 16, 24, 32 or a multiple of 16 columns wide (PTX ISA, wgmma shapes), so tile_n
    must be too."""
    return problem.ab_dtype != "int8" or tile_shape_mn[1] <= 32 or tile_shape_mn[1] % 16 == 0


def accumulators_fit_registers(tile_shape_mn: tuple[int, int], mma_warpgroups: int, problem: Problem) -> bool:
    """A thread keeps tile_m * tile_n / (128 * mma_warpgroups) accumulators, which must leave room in its
    registers: at most 200 with one or two warpgroups (208 and more spill), 96 with three; promote keeps
    them twice."""
    limit = 96 if mma_warpgroups == 3 else LONE_ACCUMULATORS
    return accumulators(tile_shape_mn, mma_warpgroups) * (2 if problem.promote else 1) <= limit


def single_stores_leave_registers(
    tile_shape_mn: tuple[int, int],
    mma_warpgroups: int,
    swap_ab: bool,
    use_tma_store: bool,
    reduction: str,
    split_k: int,
    problem: Problem,
) -> bool:
    """Without a TMA store, swap_ab or an unaligned D makes every element a store of its own, whose address
    takes registers: a thread may then hold at most 176 accumulators (184 and more spill)."""
    elsewhere = use_tma_store or (split_k > 1 and reduction == "fixed")
    if elsewhere or not (swap_ab or problem.unaligned_out):
        return True
    return accumulators(tile_shape_mn, mma_warpgroups) <= 176


def pingpong_has_one_warpgroup_per_tile(mma_warpgroups: int, pingpong: bool) -> bool:
    """With pingpong two warpgroups work on two tiles, so mma_warpgroups, those of one tile, must be 1."""
    return not pingpong or mma_warpgroups == 1


def stages_fit_shared_memory(
    tile_shape_mn: tuple[int, int],
    tile_k: int,
    cluster_shape_mn: tuple[int, int],
    mma_warpgroups: int,
    pingpong: bool,
    swap_ab: bool,
    use_tma_store: bool,
    problem: Problem,
    arch: Arch,
) -> bool:
    """At least 3 stages of (tile_m + tile_n) * tile_k elements and two store buffers per warpgroup must
    fit the shared memory of a thread block, or loads cannot run ahead of the tensor cores."""
    stores = store_bytes(tile_shape_mn[1], mma_warpgroups, pingpong, use_tma_store, problem)
    loaded = loaded_columns(tile_shape_mn, cluster_shape_mn, swap_ab, problem)
    return three_stages_fit(stage_bytes(tile_shape_mn[0], loaded, tile_k, problem), stores, arch)


def wide_k_is_for_small_tiles(tile_shape_mn: tuple[int, int], tile_k: int, problem: Problem) -> bool:
    """A k tile of 256 bytes halves the barriers per byte and reads memory in longer runs, but larger tiles
    keep too few stages of it: allowed up to tile_m + tile_n = 256."""
    return tile_k * DTYPE_BYTES[problem.ab_dtype] <= 128 or tile_shape_mn[0] + tile_shape_mn[1] <= 256


def swap_ab_is_for_narrow_m(swap_ab: bool, problem: Problem) -> bool:
    """swap_ab puts m on the finely divisible side of the MMA, so that tiles fit m and fill whole waves; with
    m above 6144 tiles are so many that the plain order does as well."""
    return not swap_ab or problem.m <= 6144


def split_k_leaves_work(tile_k: int, split_k: int, problem: Problem) -> bool:
    """Every part of a split k range needs at least 4 k tiles, or adding its partial sums costs more than its
    MMAs."""
    return split_k == 1 or split_k * 4 * tile_k <= problem.k


def split_k_has_no_pingpong(pingpong: bool, split_k: int) -> bool:
    """Pingpong hides an epilogue behind the next tile; split_k is for problems without one."""
    return split_k == 1 or not pingpong


def arrival_order_is_asked_for(reduction: str, problem: Problem) -> bool:
    """reduction=arrival adds partial sums in the order in which they happen to arrive, so results differ
    in their last bits from run to run; the problem must allow that with any_order."""
    return reduction == "fixed" or problem.any_order


def arrival_order_is_for_split_k(reduction: str, split_k: int) -> bool:
    """reduction=arrival says how partial sums of split_k are added, so split_k must be above 1."""
    return reduction == "fixed" or split_k > 1


def stream_k_is_whole(pingpong: bool, stream_k: bool, split_k: int) -> bool:
    """stream_k cuts only the tiles of the last, partial wave along k, so split_k must be 1; the two groups
    of pingpong count on equally many k tiles, so pingpong must be false."""
    return not stream_k or (split_k == 1 and not pingpong)


def stream_k_has_a_partial_wave(
    tile_shape_mn: tuple[int, int],
    tile_k: int,
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    stream_k: bool,
    problem: Problem,
    arch: Arch,
) -> bool:
    """stream_k needs more clusters of tiles than run at once, at most half of them left for the last wave,
    and at least 8 k tiles to cut."""
    if not stream_k:
        return True
    cluster = cluster_shape_mn[0] * cluster_shape_mn[1]
    count = padded_blocks(tile_shape_mn, cluster_shape_mn, swap_ab, problem) // cluster
    at_once = resident_clusters(arch.nominal_sm_count, cluster)
    return count > at_once and 0 < count % at_once <= at_once // 2 and problem.k >= 8 * tile_k


def split_k_workspace_is_bounded(
    tile_shape_mn: tuple[int, int],
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    split_k: int,
    problem: Problem,
) -> bool:
    """The fp32 partial sums of all parts together may take at most 256 MiB."""
    if split_k == 1:
        return True
    needed = _workspace_bytes(tile_shape_mn, cluster_shape_mn, swap_ab, split_k, problem)
    return needed <= WORKSPACE_LIMIT_BYTES


def split_k_is_for_few_tiles(
    tile_shape_mn: tuple[int, int], swap_ab: bool, split_k: int, problem: Problem
) -> bool:
    """split_k makes up for missing tiles; above 1024 of them every multiprocessor is busy anyway."""
    return split_k == 1 or prod(tile_counts(tile_shape_mn, swap_ab, problem)) * problem.batch <= 1024


def cluster_is_no_larger_than_problem(
    tile_shape_mn: tuple[int, int], cluster_shape_mn: tuple[int, int], swap_ab: bool, problem: Problem
) -> bool:
    """A cluster must not be more than twice as tall or wide as D, since blocks outside D only wait."""
    if cluster_shape_mn == (1, 1):
        return True
    (high, wide), (along_m, along_n) = cluster_shape_mn, tile_counts(tile_shape_mn, swap_ab, problem)
    return (high == 1 or high < 2 * along_m) and (wide == 1 or wide < 2 * along_n)


def tile_counts_fit_32_bits(tile_shape_mn: tuple[int, int], swap_ab: bool, problem: Problem) -> bool:
    """Work units are numbered with 32-bit integers."""
    along_m, along_n = tile_counts(tile_shape_mn, swap_ab, problem)
    return along_m * along_n * problem.batch < 2**30


RULES = tuple(
    Rule.of(function)
    for function in (
        sizes_round_up_below_2_to_31,
        tf32_is_for_blackwell,
        warpgroups_divide_tile,
        tile_k_is_one_or_two_swizzle_rows,
        int8_tiles_have_widths_of_the_mma,
        accumulators_fit_registers,
        single_stores_leave_registers,
        pingpong_has_one_warpgroup_per_tile,
        stages_fit_shared_memory,
        wide_k_is_for_small_tiles,
        tma_store_needs_aligned_output,
        swap_ab_is_for_narrow_m,
        split_k_leaves_work,
        split_k_stores_partial_sums,
        split_k_has_no_pingpong,
        split_k_workspace_is_bounded,
        arrival_order_is_asked_for,
        arrival_order_is_for_split_k,
        stream_k_is_whole,
        stream_k_has_a_partial_wave,
        split_k_is_for_few_tiles,
        cluster_is_no_larger_than_problem,
        tile_counts_fit_32_bits,
    )
)


def _workspace_bytes(
    tile_shape_mn: tuple[int, int],
    cluster_shape_mn: tuple[int, int],
    swap_ab: bool,
    split_k: int,
    problem: Problem,
) -> int:
    tile_bytes = tile_shape_mn[0] * tile_shape_mn[1] * 4
    return split_k * padded_blocks(tile_shape_mn, cluster_shape_mn, swap_ab, problem) * tile_bytes


# --- what follows from a config ---


def derive(
    config: Config, problem: Problem, arch: Arch, stored_n: int = 0, beside_tiles: int = 0
) -> dict[str, Value]:
    """Return stages and who frees them, store buffers, threads, registers and exact shared memory (bytes).

    ``stored_n`` columns of a tile are stored, all of them if it is 0. A stage holds ``beside_tiles`` bytes
    beside tiles of A and B.
    """
    tile, tile_k = config.pair("tile_shape_mn"), config.integer("tile_k")
    mma_warpgroups, pingpong = config.integer("mma_warpgroups"), config.flag("pingpong")
    stored = stored_n or tile[1]
    warpgroups = consumers(mma_warpgroups, pingpong)
    split = config["split_k"] != 1
    staged = config.flag("use_tma_store") and not split
    singles = not staged and (config.flag("swap_ab") or problem.unaligned_out)
    columns, tail = epilogue_columns(stored, staged, singles)
    loaded = loaded_columns(tile, config.pair("cluster_shape_mn"), config.flag("swap_ab"), problem)
    of_tiles = stage_bytes(tile[0], loaded, tile_k, problem)
    per_stage = of_tiles + beside_tiles
    per_round, tail_bytes = store_bytes(stored, mma_warpgroups, pingpong, staged, problem)
    # The single buffer of a last piece is reused after `stored // columns` other stores, so no more
    # than that may be in flight.
    most = min(MAX_STORE_BUFFERS, stored // columns + 1) if tail else MAX_STORE_BUFFERS
    free = arch.smem_bytes - BARRIER_BYTES - tail_bytes
    least = min(most, least_buffers(problem, free, per_stage, per_round))
    stages, rounds = stages_and_buffers(free, per_stage, per_round, MAX_STAGES, most, least)
    registers = REGISTERS[warpgroups]
    return {
        "groups": 2 if pingpong else 1,
        "split": split,
        "stages": stages,
        "loaded_n": loaded,
        "expected_bytes": of_tiles,
        "empty_arrivals": empty_arrivals(config.pair("cluster_shape_mn"), mma_warpgroups),
        "epi_n": columns,
        "epi_tail": tail,
        "epi_stages": rounds,
        "epi_bytes": rounds * per_round + tail_bytes,
        "smem_bytes": BARRIER_BYTES + stages * per_stage + rounds * per_round + tail_bytes,
        "threads": WARPGROUP * (1 + warpgroups),
        "reg_load": registers.load,
        "reg_mma": registers.mma,
        "acc_registers": accumulators(tile, mma_warpgroups),
    }


@lru_cache(maxsize=1024)
def _launch_of_whole_tiles(config: Config, sm_count: int) -> Launch:
    """Return what :func:`launch` returns where k is not split: the same for all problems, so remembered."""
    high, wide = config.pair("cluster_shape_mn")
    return Launch((resident_clusters(sm_count, high * wide), *tile_order(config)), 0)


def launch(config: Config, problem: Problem, sm_count: int) -> Launch:
    """Return clusters, swizzle_size, raster_along_m (and split_k if it is not 1), and the workspace."""
    whole = _launch_of_whole_tiles(config, sm_count)
    split_k = config.integer("split_k")
    if split_k == 1 and not config.flag("stream_k"):
        return whole
    cluster, scalars = config.pair("cluster_shape_mn"), whole.scalars
    clusters = scalars[0]
    tile, swap = config.pair("tile_shape_mn"), config.flag("swap_ab")
    if config.flag("stream_k"):
        most = max(1, min(MAX_STREAM_PARTS, problem.k // (4 * config.integer("tile_k"))))
        return Launch((*scalars, most), clusters * cluster[0] * cluster[1] * tile[0] * tile[1] * 4)
    blocks = padded_blocks(tile, cluster, swap, problem)
    if config["reduction"] == "arrival":
        # One set of partial sums, and a counter for each warp that multiplies.
        counters = blocks * config.integer("mma_warpgroups") * 4
        return Launch((*scalars, split_k), (blocks * tile[0] * tile[1] + counters) * 4, zeroed=True)
    return Launch((*scalars, split_k), _workspace_bytes(tile, cluster, swap, split_k, problem))


def choose_default(space: Space, problem: Problem) -> Config:
    """Return a safe config that fits the shape: wide tiles if there are enough of them, else smaller ones."""
    sm_count = space.arch.nominal_sm_count
    swap = problem.m <= SLAB and problem.n > problem.m
    m, n = kernel_sizes(problem, swap)
    tile, warpgroups = (SLAB, SLAB), 1
    narrow = next(width for width in (16, 32, SLAB) if n <= width or width == SLAB)
    tile = (SLAB, narrow)
    for wide, count in (((128, 256), 2), ((128, 128), 2), ((SLAB, 128), 1)):
        enough = -(-m // wide[0]) * -(-n // wide[1]) * problem.batch * 10 >= sm_count * 8
        if not swap and enough and accumulators_fit_registers(wide, count, problem):
            tile, warpgroups = wide, count
            break
    cluster = (2, 1) if tile == (128, 256) and m > 2 * tile[0] else (1, 1)
    return Config(
        {
            "tile_shape_mn": tile,
            "tile_k": 128 // DTYPE_BYTES[problem.ab_dtype],
            "cluster_shape_mn": cluster,
            "mma_warpgroups": warpgroups,
            "pingpong": False,
            "swap_ab": swap,
            "use_tma_store": not problem.unaligned_out,
            "use_pdl": False,
            "stream_k": False,
            "reduction": "fixed",
            "split_k": 1,
            "swizzle_size": 8 if tile == (128, 256) else 1,
            "raster_along_m": True,
        }
    )


def default_candidates(
    problem: Problem, further: Iterable[_Candidate] = FURTHER_CANDIDATES
) -> Iterator[dict[str, Value]]:
    """Yield what is chosen from before anybody measured; the rest of each is the default's."""
    yield from borrowed_candidates(problem)
    if DTYPE_BYTES[problem.ab_dtype] > 1:
        along = () if problem.layout == "kk" else ALONG_COLUMNS_CANDIDATES
        yield from _candidates(problem, dict.fromkeys((*further, *along)))


def borrowed_candidates(problem: Problem) -> Iterator[dict[str, Value]]:
    """Yield those that families whose tiles are alike choose from, too."""
    promoted = [((128, 128), (1, 1), 2, 2, "")] if problem.promote else []
    narrow = DTYPE_BYTES[problem.ab_dtype] == 1
    yield from _candidates(
        problem, (*promoted, *(DEFAULT_CANDIDATES_8_BIT if narrow else DEFAULT_CANDIDATES))
    )


def _candidates(problem: Problem, likely: Iterable[_Candidate]) -> Iterator[dict[str, Value]]:
    for tile, cluster, warpgroups, lines, kind in likely:
        yield {
            "tile_shape_mn": tile,
            "tile_k": lines * 128 // DTYPE_BYTES[problem.ab_dtype],
            "cluster_shape_mn": cluster,
            "mma_warpgroups": warpgroups,
            "pingpong": "pingpong" in kind,
            "swap_ab": "swapped" in kind,
            "use_tma_store": not problem.unaligned_out and "split" not in kind,
            "use_pdl": True,
            "split_k": 2 if "split" in kind else 1,
        }


def build_space(arch: Arch) -> Space:
    """Return the space of Hopper GEMMs bound to ``arch``."""
    further = (*FURTHER_CANDIDATES, *(SLOW_MEMORY_CANDIDATES if has_slow_memory(arch) else ()))
    return Space(
        family="gemm",
        arch=arch,
        domains=DOMAINS,
        rules=RULES,
        derive=derive,
        choose_default=choose_default,
        launch=launch,
        compile_view=compile_view,
        run_time_knobs=RUN_TIME_KNOBS,
        default_candidates=partial(default_candidates, further=further),
    )
