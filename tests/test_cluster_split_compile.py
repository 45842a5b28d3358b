"""GEMMs whose clusters split k through the real compiler: resources and instructions.

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
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.space import Config

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH, algorithm="cluster_split")
#: Problem; tile, cluster, parts of k, warpgroups; what else.
KERNELS = (
    ("213x5632x3072 bf16 kk", "192x112 1x2 2 3", "swap_ab=true use_tma_store=true"),
    ("200x2000x4096 fp16 kk bias=n act=gelu", "128x160 1x1 4 2", "swap_ab=false use_tma_store=true"),
    ("60x1001x4096 bf16 kk beta unaligned", "64x64 2x1 3 1", "swap_ab=true use_tma_store=false"),
)


def cases() -> dict[Source, tuple[Problem, Config]]:
    found = {}
    for line, shape, words in KERNELS:
        problem = Problem.parse(f"gemm {line}")
        tile, cluster, parts, warpgroups = shape.split()
        config = Config.parse(
            f"algorithm=cluster_split tile_shape_mn={tile} tile_k=64 cluster_shape_mn={cluster} "
            f"cluster_k={parts} mma_warpgroups={warpgroups} use_pdl=false {words}"
        )
        found[render(problem, config, ARCH)] = (problem, config)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Source, Artifact]:
    """The kernels, compiled; whatever fails to compile fails every test with its reason."""
    done, failed = {}, []
    with Builder(Store(tmp_path_factory.mktemp("cache"))) as builder:
        for source, result in builder.build(cases()):
            if isinstance(result, Artifact):
                done[source] = result
            else:
                failed.append(f"{source.config}: {result.message}\n{result.log[-800:]}")
    assert not failed, "\n".join(failed)
    return done


def test_a_kernel_takes_what_its_space_says_and_spills_nothing(built: dict[Source, Artifact]) -> None:
    for source, (problem, config) in cases().items():
        derived, resources = SPACE.derive(config, problem, ARCH), built[source].resources
        assert resources.smem_bytes == derived["smem_bytes"], source.config
        assert resources.threads == derived["threads"], source.config
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.notes) == (0, 0, ())


def test_sums_go_to_other_blocks_in_wide_stores(built: dict[Source, Artifact], tmp_path: Path) -> None:
    """Each piece of each other owner, 16 bytes of a thread at a time, between two waits of the cluster."""
    sources = list(cases())
    for source, code in zip(sources, disassembled([built[s] for s in sources], tmp_path), strict=True):
        tile, warpgroups = source.config.pair("tile_shape_mn"), source.config.integer("mma_warpgroups")
        stores = re.findall(r"\bST\.E\.128\b|\bSTS\.128\b|\bST\.128\b", code)
        assert len(stores) == tile[0] * tile[1] // (128 * warpgroups) // 4, source.config
        assert not re.findall(r"\b(?:LDL|STL)\b", code), source.config
        assert len(re.findall(r"\bUCGABAR_ARV\b", code)) >= 6, source.config
