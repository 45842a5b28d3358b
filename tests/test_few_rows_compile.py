"""Kernels for few rows through the real compiler, for every target: resources and instructions.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from disassembly import disassembled

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
#: Target, problem, and every knob but the kernel's name and threads_per_cta of 128.
KERNELS = (
    (
        "sm_90a",
        "1x6144x4096 bf16 kk",
        "rows_per_cta=1 columns_per_warp=2 warps_along_k=4 unroll=4 cluster_k=1",
    ),
    ("sm_90a", "1x64x7168 fp16 kk", "rows_per_cta=1 columns_per_warp=2 warps_along_k=4 unroll=2 cluster_k=4"),
    (
        "sm_90a",
        "3x3x1001x4096 bf16 kk alpha beta bias=n act=gelu",
        "rows_per_cta=4 columns_per_warp=4 warps_along_k=1 unroll=2 cluster_k=1",
    ),
    (
        "sm_90a",
        "4x6144x4096 fp16 kk out=fp32 bias=m",
        "rows_per_cta=4 columns_per_warp=8 warps_along_k=2 unroll=1 cluster_k=1",
    ),
    (
        "sm_100a",
        "4x6144x4096 bf16 kk scale",
        "rows_per_cta=4 columns_per_warp=2 warps_along_k=1 unroll=4 cluster_k=1",
    ),
    (
        "sm_103a",
        "2x64x8192 bf16 kk",
        "rows_per_cta=2 columns_per_warp=2 warps_along_k=4 unroll=2 cluster_k=4",
    ),
)


def cases() -> dict[Source, tuple[Problem, Config]]:
    found = {}
    for number, (target, line, words) in enumerate(KERNELS):
        problem, pdl = Problem.parse(f"gemm {line}"), "true" if number % 2 else "false"
        config = Config.parse(f"algorithm=few_rows threads_per_cta=128 {words} use_pdl={pdl}")
        found[render(problem, config, find_arch(target))] = (problem, config)
    return found


@pytest.fixture(scope="module")
def built(compiler: Builder) -> dict[Source, Artifact]:
    """The kernels, compiled; whatever fails to compile fails every test with its reason."""
    done, failed = {}, []
    for source, result in compiler.build(cases()):
        if isinstance(result, Artifact):
            done[source] = result
        else:
            failed.append(f"{source.arch} {source.config}: {result.message}\n{result.log[-800:]}")
    assert not failed, "\n".join(failed)
    return done


def test_a_kernel_takes_what_its_space_predicts_and_spills_nothing(built: dict[Source, Artifact]) -> None:
    for source, (problem, config) in cases().items():
        arch = find_arch(source.arch)
        derived = find_space("gemm", arch, algorithm="few_rows").derive(config, problem, arch)
        resources = built[source].resources
        assert resources.smem_bytes == derived["smem_bytes"], source.config
        assert resources.threads == derived["threads"], source.config
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.notes) == (0, 0, ())
        assert isinstance(derived["registers"], int)
        assert abs(resources.registers - derived["registers"]) <= 48, source.config


def test_weights_come_in_wide_loads_that_leave_l1_to_a(built: dict[Source, Artifact], tmp_path: Path) -> None:
    """All loads of B have 16 bytes and allocate no L1, those of A have 16 bytes; sums are fp32, and nothing
    touches local memory or a tensor core."""
    sources = list(cases())
    for source, code in zip(sources, disassembled([built[s] for s in sources], tmp_path), strict=True):
        config = source.config
        columns, rows = config.integer("columns_per_warp"), config.integer("rows_per_cta")
        unroll = config.integer("unroll")
        loads = re.findall(r"\bLDG\S*", code)
        weights = [load for load in loads if ".NA" in load]
        assert len(weights) == 2 * columns * unroll, source.config  # of whole rounds, and of the last
        assert all(load.endswith(".128") for load in weights), set(weights)
        wide = [load for load in loads if ".NA" not in load and load.endswith(".128")]
        assert len(wide) == 2 * rows * unroll, source.config
        assert len(re.findall(r"\bFFMA2?\b", code)) > 0
        assert not re.findall(r"\b(?:LDL|STL|HMMA|HGMMA|UTCHMMA)\b", code), source.config
        assert bool(re.findall(r"\bSTAS\b", code)) == (config["cluster_k"] != 1), source.config


def test_loads_are_all_under_way_before_the_first_product(
    built: dict[Source, Artifact], tmp_path: Path
) -> None:
    """Of a round: that is what hides the latency of memory."""
    source = next(iter(cases()))
    [code] = disassembled([built[source]], tmp_path)
    order = re.findall(r"\b(LDG\S*\.NA\S*|FFMA)\b", code)
    first = next(at for at, name in enumerate(order) if name == "FFMA")
    assert first == source.config.integer("columns_per_warp") * source.config.integer("unroll")
