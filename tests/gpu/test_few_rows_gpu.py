"""Kernels for few rows on a real GPU: on poisoned outputs with guards around them, against fp64, twice.

Every number of rows, tails of n and k, every epilogue, batches, clusters. The check runs each problem and a
smaller one of odd extents, with gaps of NaN between the rows of A and B, and compares the bits of two runs.
"""

from __future__ import annotations

import pytest
from family_kernels import config_is_right
from hopper import NEEDS_HOPPER

from cutegen.arch import find_arch
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

SPACE = find_space("gemm", find_arch("sm_90a"), algorithm="few_rows")
LINES = [
    *((f"gemm {m}x1000x4096 bf16 kk", "") for m in range(1, 5)),
    *((f"gemm {m}x1001x1032 fp16 kk", "columns_per_warp=4 unroll=1 warps_along_k=2") for m in (1, 3)),
    ("gemm 1x1x8 bf16 kk", ""),
    ("gemm 1x4097x8 fp16 kk out=fp32", ""),
    ("gemm 3x7x264 bf16 kk", "unroll=1 columns_per_warp=8"),
    ("gemm 3x515x520 bf16 kk", "warps_along_k=1 columns_per_warp=2 unroll=2"),
    ("gemm 1x6144x4096 bf16 kk", "columns_per_warp=1 warps_along_k=2 unroll=8"),
    ("gemm 1x6144x4096 bf16 kk", "warps_along_k=4 columns_per_warp=2 unroll=4 use_pdl=false"),
    ("gemm 4x6144x4096 bf16 kk", "unroll=1 columns_per_warp=8 threads_per_cta=512 warps_along_k=4"),
    ("gemm 4x6152x7168 bf16 kk", "threads_per_cta=64 columns_per_warp=2 warps_along_k=1 unroll=8"),
    ("gemm 2x301x7168 bf16 kk", "threads_per_cta=512 warps_along_k=8 columns_per_warp=1 unroll=4"),
    ("gemm 1x64x7176 bf16 kk", "threads_per_cta=128 warps_along_k=4 cluster_k=4 columns_per_warp=2 unroll=2"),
    ("gemm 4x63x7176 fp16 kk bias=m", "threads_per_cta=64 warps_along_k=2 cluster_k=4 columns_per_warp=4"),
    ("gemm 4x130x4096 bf16 kk", "threads_per_cta=128 warps_along_k=4 cluster_k=4 columns_per_warp=8"),
    ("gemm 3x4x130x4096 bf16 kk beta", "columns_per_warp=2"),
    ("gemm 5x1x520x4104 fp16 kk alpha bias=n", ""),
    (
        "gemm 2x2x64x8192 bf16 kk",
        "threads_per_cta=64 warps_along_k=2 cluster_k=4 unroll=4 columns_per_warp=1",
    ),
    ("gemm 1x777x2048 bf16 kk alpha beta bias=n act=silu", ""),
    ("gemm 3x777x2048 bf16 kk beta bias=m act=gelu out=fp16", ""),
    ("gemm 2x768x2048 fp16 kk bias=n act=gelu_tanh", ""),
    ("gemm 4x768x2048 bf16 kk act=relu out=fp32", ""),
    ("gemm 2x768x2048 bf16 kk scale", ""),
    ("gemm 1x768x2048 bf16 kk any_order", ""),
    ("gemm 4x768x2048 bf16 kk unaligned", ""),
]


def chosen(line: str, words: str) -> tuple[Problem, Config]:
    """A problem, and its default config with some knobs changed."""
    problem = Problem.parse(line)
    config = SPACE.default(problem).replace(**Config.parse(words))
    if "unroll" not in words:
        smaller = (config.replace(unroll=count) for count in (8, 4, 2, 1))
        config = next(c for c in smaller if not SPACE.explain(problem, c))
    SPACE.require(problem, config)
    return problem, config


CASES = {f"{problem} | {config}": (problem, config) for problem, config in (chosen(*line) for line in LINES)}
pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
test_a_legal_config_computes_the_product = config_is_right
