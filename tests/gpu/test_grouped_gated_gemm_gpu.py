"""Grouped gated products on a real GPU: both forms, every kind of kernel, broken kernels."""

from __future__ import annotations

from typing import Any

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, config_is_right, listed_cases, mutants
from grouped_kernels import DIRECT, PLAIN, SWAPPED_TURNS, TURNS
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
RANGES, MASKED = "grouped_gated_gemm ", "grouped_gated_gemm_masked "
WIDE = {**PLAIN, "tile_shape_mn": (128, 256), "mma_warpgroups": 2, "cluster_shape_mn": (2, 1)}
SWAPPED = {**PLAIN, "tile_shape_mn": (128, 24), "swap_ab": True, "tile_k": 128, "raster_along_m": False}
SWAPPED_DIRECT = {
    **SWAPPED,
    "tile_shape_mn": (256, 16),
    "mma_warpgroups": 2,
    "tile_k": 64,
    "use_tma_store": False,
}
#: Problems, and the kernels for them beside their default.
CASES_OF: dict[str, tuple[dict[str, Any], ...]] = {
    RANGES + "4000x768x2048x8 bf16": (WIDE, TURNS, DIRECT, SWAPPED_TURNS),
    RANGES + "4096x768x512x128 bf16 tokens=zipf layout=interleaved": (PLAIN, TURNS, SWAPPED),
    RANGES + "8200x1001x264x5 bf16 activation=gelu": (DIRECT,),
    RANGES + "64x4096x4096x8 fp16 activation=relu": (SWAPPED, SWAPPED_DIRECT),
    RANGES + "37x40x8x37 bf16": (PLAIN,),
    MASKED + "1024x1024x512x8 bf16 mean=320 layout=interleaved": (WIDE, TURNS, DIRECT, SWAPPED_TURNS),
    MASKED + "4096x1536x2048x6 bf16 mean=20 tokens=zipf": (SWAPPED, SWAPPED_DIRECT, PLAIN),
    MASKED + "1000x1001x264x5 fp16 activation=gelu_tanh": (DIRECT,),
}
#: A row that two groups write changes from run to run.
WRONG = r"out\[\d+.* should be|elements outside of the output|wrote its input out"
#: A text of the kernel, what takes its place, and what the check must say.
BROKEN = {
    "gates multiply themselves": Broken("UP = TILE_N // 4", "UP = 0", WRONG),
    "halves one row too close": Broken("cutlass.Int64(places) *", "cutlass.Int64(places - 1) *", WRONG),
    "the matrix of the group before": Broken(
        "    within = work - before",
        "    expert = cutlass.max(expert - 1, 0)\n    within = work - before",
        WRONG,
    ),
    "last columns unwritten": Broken(
        "last_n = cutlass.max(m_d.shape[1] - D_N, 0)",
        "last_n = cutlass.max(m_d.shape[1] - D_N - 8, 0)",
        WRONG,
    ),
}

CASES = listed_cases(CASES_OF)
MUTANTS = mutants((RANGES + "5000x1032x512x64 bf16", PLAIN, BROKEN))
test_a_config_multiplies_and_gates_groups = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected
