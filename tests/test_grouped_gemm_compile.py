"""Grouped GEMMs through the real compiler: both forms, each kind of kernel.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from disassembly import disassembled

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.families.registry import find_space, parse_problem

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
ARCH = find_arch("sm_90a")
TURNS: dict[str, Any] = {"mma_warpgroups": 1, "pingpong": True, "tile_k": 64, "cluster_shape_mn": (2, 1)}
SWAPPED = {**TURNS, "swap_ab": True}
#: A problem, and knobs that differ from its default config: those with most accumulators of their kind.
KERNELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("grouped_gemm 32768x6144x7168x4 bf16", {**TURNS, "tile_shape_mn": (128, 200), "use_pdl": True}),
    ("grouped_gemm 4096x1001x2048x8 fp16", {"tile_shape_mn": (128, 176)}),
    ("grouped_gemm_masked 4096x6144x7168x6 bf16 mean=1024", {**SWAPPED, "tile_shape_mn": (128, 144)}),
)


@pytest.fixture(scope="module")
def built(compiler: Builder) -> dict[Source, tuple[Artifact, Any]]:
    """The kernels, and what was derived for them; whatever fails to compile fails every test."""
    derived = {}
    for line, changes in KERNELS:
        problem = parse_problem(line)
        space = find_space(problem.family, ARCH)
        config = space.default(problem).replace(**changes)
        derived[render(problem, config, ARCH)] = space.derive(config, problem, ARCH)
    done = {}
    for source, result in list(compiler.build(derived)):
        assert isinstance(result, Artifact), f"{source.config}: {result.message}\n{result.log[-800:]}"
        done[source] = result, derived[source]
    return done


def test_a_kernel_takes_what_was_planned(built: dict[Source, tuple[Artifact, Any]]) -> None:
    """Shared memory to the byte, with the table of groups; no spills, no serialised MMAs."""
    assert len(built) == len(KERNELS)
    for source, (artifact, derived) in built.items():
        found = artifact.resources
        assert found.smem_bytes == derived["smem_bytes"], source.config
        assert (found.stack_bytes, found.spill_store_bytes, found.notes) == (0, 0, ()), source.config
        assert found.threads == derived["threads"]


def test_groups_shorter_than_a_tile_are_stored_element_by_element(
    built: dict[Source, tuple[Artifact, Any]], tmp_path: Path
) -> None:
    """Every kernel has bounded stores; those that store by TMA as well choose by the rows of a group."""
    texts = disassembled([artifact for artifact, _ in built.values()], tmp_path)
    for source, listing in zip(built, texts, strict=True):
        staged = bool(source.config["use_tma_store"])
        assert ("UTMASTG" in listing) == staged == ("if end - first < TILE_" in source.text)
        assert re.search(r"STG\.E", listing)
        loads = set(re.findall(r"UTMALDG\.(\dD)", listing))
        masked = source.signature.family == "grouped_gemm_masked"
        assert loads == ({"3D"} if masked else {"2D", "3D"})
