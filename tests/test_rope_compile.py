"""Kernels of rotary embeddings through the real compiler, on every target.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from row_compile import Compiled, build, texts_of_targets

from cutegen.build import Builder
from cutegen.families.registry import parse_problem

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sm_90a", "rope 8192x32x8x128x64x1 bf16", {}),
    ("sm_90a", "rope 8192x32x8x128x64x1 bf16 norm", {"heads_per_thread": 8}),
    (
        "sm_90a",
        "rope 8192x32x8x128x64x4096 bf16 table=positions style=interleaved table_dtype=same",
        {"pdl": "off"},
    ),
    ("sm_90a", "rope 1024x28x4x80x16x1 fp32 style=interleaved inverse", {"threads": 256}),
    ("sm_90a", "rope 77x7x3x50x13x1 bf16 norm", {}),
    ("sm_100a", "rope 777x7x3x192x32x77 fp16 norm table=positions index=int32", {}),
    ("sm_100a", "rope 777x7x3x192x32x1 fp16 norm style=interleaved", {}),
    ("sm_103a", "rope 8192x128x1x576x32x1 bf16", {"heads_per_thread": 2}),
)


@pytest.fixture(scope="module")
def built(compiler: Builder) -> list[Compiled]:
    return build("", KERNELS, compiler)


def test_a_kernel_spills_nothing(built: list[Compiled]) -> None:
    assert len(built) == len(KERNELS)
    for artifact, _, config, _ in built:
        found = artifact.resources
        assert (found.smem_bytes, found.stack_bytes, found.spill_store_bytes, found.notes) == (0, 0, 0, ())
        assert found.threads == config["threads"]


def test_what_is_not_turned_is_copied_unless_norms_read_it(built: list[Compiled]) -> None:
    for _, problem, _, text in built:
        sig: Any = problem.signature
        tail = sig.d > 2 * sig.pairs
        assert ("copy_tail(" in text) == (tail and not sig.norm)
        assert ("warp_reduction_sum" in text) == sig.norm
        assert ("positions[token]" in text) == (sig.table == "positions")


def test_blackwell_runs_the_text_of_hopper() -> None:
    assert len(texts_of_targets(parse_problem("rope 8192x32x8x128x64x1 bf16"))) == 1
