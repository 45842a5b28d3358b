"""Softmax kernels through the real compiler: what the space says of them holds, on every target."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from row_compile import build, require_predicted

from cutegen.arch import find_arch
from cutegen.build import Builder
from cutegen.build.render import render
from cutegen.families.registry import find_space, parse_problem

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
SMEM: dict[str, Any] = {"row_in": "smem", "turn": 2}
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sm_90a", "16384x4096 bf16", {}),
    ("sm_90a", "16384x128 fp16", {"threads_per_row": 16, "rows_per_thread": 2, "rows_per_cta": 16}),
    ("sm_90a", "16x1001 bf16", {"pdl": "late"}),
    ("sm_90a", "256x32768 bf16", {"threads_per_row": 256, "cluster_n": 4}),
    ("sm_90a", "32768x32768 bf16", {"threads_per_row": 256, "cluster_n": 4, "pdl": "off"}),
    ("sm_90a", "1x262143 bf16", {}),
    ("sm_90a", "2048x65536 bf16", {}),
    ("sm_90a", "1024x100008 bf16", {"pdl": "late"}),
    ("sm_90a", "2048x65536 bf16", {**SMEM, "threads_per_row": 512, "cluster_n": 2}),
    ("sm_90a", "1024x262144 fp32", {**SMEM, "turn": 4}),
    ("sm_100a", "1024x131072 bf16", {**SMEM, "threads_per_row": 256, "cluster_n": 8}),
    ("sm_103a", "16384x4096 fp32", {"threads_per_row": 256}),
    ("sm_103a", "256x32768 bf16", {"threads_per_row": 256, "cluster_n": 4, "pdl": "early"}),
)


def test_a_kernel_takes_what_its_space_predicts_and_spills_nothing(compiler: Builder) -> None:
    require_predicted(build("softmax", KERNELS, compiler))


def test_there_is_one_exchange() -> None:
    """A pair of numbers from each warp, in one asynchronous store where CTAs share a row."""
    space = find_space("softmax", find_arch("sm_90a"))
    for line, clusters in (
        ("16384x4096 bf16", False),
        ("32768x32768 bf16", True),
        ("1024x131072 bf16", True),
    ):
        problem = parse_problem(f"softmax {line}")
        text = render(problem, space.default(problem), space.arch).text
        assert text.count("share_pair(") == 2 and "sum_over_row" not in text
        assert (text.count("store_async_dsmem") == 1) == clusters
