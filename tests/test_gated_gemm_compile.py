"""Gated products through the real compiler: every way to find the two halves of a tile.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.families.registry import find_space, parse_problem

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
ARCH = find_arch("sm_90a")
#: A problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("8192x14336x4096 bf16", {"tile_shape_mn": (128, 256)}),
    (
        "4096x14336x4096 fp16 layout=interleaved pre activation=gelu_tanh",
        {"tile_shape_mn": (128, 160), "mma_warpgroups": 1, "pingpong": True},
    ),
    ("16x14336x4096 bf16", {"tile_k": 128, "cluster_shape_mn": (4, 1)}),
    ("333x1001x1024 bf16 pre", {}),
    ("64x4096x8192 bf16 pre", {"use_tma_store": False, "split_k": 4}),
    ("3000x3904x512 bf16 activation=relu", {"tile_shape_mn": (128, 224), "stream_k": True}),
    (
        "8192x14336x4096 bf16 layout=split",
        {"tile_shape_mn": (128, 176), "mma_warpgroups": 1, "pingpong": True},
    ),
    ("64x4096x8192 bf16 layout=split pre", {"use_tma_store": False, "split_k": 4}),
)


def test_kernels_compile_without_spills_into_the_shared_memory_that_is_derived(compiler: Builder) -> None:
    """Nor does the compiler note that it serialised MMAs."""
    space = find_space("gated_gemm", ARCH)
    wanted = {}
    for line, changes in KERNELS:
        problem = parse_problem(f"gated_gemm {line}")
        config = space.default(problem).replace(**changes)
        wanted[render(problem, config, ARCH)] = space.derive(config, problem, ARCH)
    results = dict(compiler.build(list(wanted)))
    assert len(results) == len(KERNELS)
    for source, result in results.items():
        assert isinstance(result, Artifact), f"{source.config}: {result}"
        found = result.resources
        assert (found.stack_bytes, found.spill_store_bytes, found.notes) == (0, 0, ()), source.config
        assert 0 <= int(str(wanted[source]["smem_bytes"])) - found.smem_bytes < 1024, source.config


#: Of few rows: a problem, and knobs that differ from its default config.
FEW_ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1x14336x4096 bf16", {}),
    ("2x512x4096 fp16 pre activation=relu", {}),
    ("3x1001x4096 fp16 layout=split", {}),
    ("4x1001x4096 bf16 activation=gelu layout=interleaved", {}),
    (
        "1x64x8192 fp16 layout=interleaved pre",
        {"threads_per_cta": 128, "columns_per_warp": 2, "warps_along_k": 4, "unroll": 2, "cluster_k": 4},
    ),
)


def test_kernels_of_few_rows_compile_as_derived(compiler: Builder) -> None:
    """Without spills, with the shared memory that the space derives."""
    space, wanted = find_space("gated_gemm", ARCH, algorithm="few_rows"), {}
    for line, changes in FEW_ROWS:
        problem = parse_problem(f"gated_gemm {line}")
        config = space.default(problem).replace(**changes)
        space.require(problem, config)
        wanted[render(problem, config, ARCH)] = space.derive(config, problem, ARCH)
    results = dict(compiler.build(list(wanted)))
    for source, derived in wanted.items():
        result = results[source]
        assert isinstance(result, Artifact), f"{source.config}: {result}"
        found = result.resources
        assert (found.stack_bytes, found.spill_store_bytes, found.notes) == (0, 0, ()), source.config
        assert (found.smem_bytes, found.threads) == (derived["smem_bytes"], derived["threads"])


def test_the_kernel_is_that_of_the_gemm_but_for_the_halves_of_its_tiles() -> None:
    """A few dozen lines of some hundreds differ."""
    import difflib

    gated, plain = (
        parse_problem("gated_gemm 8192x14336x4096 bf16"),
        parse_problem("gemm 8192x28672x4096 bf16 kk"),
    )
    config = find_space("gated_gemm", ARCH).default(gated)
    texts = [
        render(gated, config, ARCH).text,
        render(plain, config.replace(reduction="fixed"), ARCH).text,
    ]
    changed = [line for line in difflib.ndiff(*[text.splitlines() for text in texts]) if line[0] in "+-"]
    assert len(changed) < 100 < 300 < len(texts[1].splitlines())
