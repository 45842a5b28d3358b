"""GEMMs whose clusters split k on a real GPU: on poisoned outputs with guards, against fp64, twice.

Every way to share a tile, tails of m, n and k, one and several waves, every epilogue, batches. The check runs
each problem and a smaller one of odd extents, and compares the bits of two runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hopper import GPU

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder, Result
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure import Bench, Candidate
from cutegen.space import Config

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH, algorithm="cluster_split")
#: Problem; tile, cluster, parts of k, warpgroups; what else.
CASES = [
    ("213x5632x3072 bf16 kk", "192x112 1x2 2 3", "swap_ab=true"),
    ("213x5632x3072 bf16 kk", "128x216 1x1 2 2", "swap_ab=true"),
    ("182x5632x3072 fp16 kk", "192x184 1x1 4 3", "swap_ab=true"),
    ("100x5632x3080 bf16 kk", "128x104 2x1 3 2", "swap_ab=true use_pdl=true"),
    ("500x4096x1032 bf16 kk", "128x160 1x1 2 2", ""),
    ("500x2100x1032 bf16 kk unaligned", "128x160 1x1 3 2", "use_tma_store=false"),
    ("500x2104x2056 bf16 kk", "256x96 1x2 4 2", "use_tma_store=false"),
    ("64x3072x14336 bf16 kk", "64x64 1x1 4 1", "swap_ab=true tile_k=128"),
    ("64x4096x14336 bf16 kk", "64x72 2x1 2 1", "swap_ab=true tile_k=128 use_tma_store=false"),
    ("7x1000x2048 fp16 kk", "64x16 1x1 4 1", "swap_ab=true"),
    ("1x64x512 bf16 kk", "64x24 1x1 2 1", ""),
    ("700x1016x1024 bf16 kk", "128x128 2x1 2 1", "swap_ab=true"),
    ("300x512x1536 bf16 kn", "128x88 1x2 2 2", ""),
    ("304x512x1536 bf16 mk", "64x136 1x1 2 1", "swap_ab=true"),
    ("304x512x1536 fp16 mn out=fp32", "128x64 1x1 3 2", ""),
    ("5x130x520x1024 bf16 kk", "64x128 2x1 2 1", "swap_ab=true"),
    ("300x777x2048 bf16 kk alpha beta bias=n act=silu", "128x96 1x1 2 2", "swap_ab=true use_tma_store=false"),
    ("300x768x2048 bf16 kk beta bias=m act=gelu", "128x104 1x1 4 2", ""),
    ("200x768x2048 fp16 kk bias=n act=gelu_tanh", "192x96 1x1 2 3", "swap_ab=true"),
    ("200x768x2048 bf16 kk scale act=relu out=fp32", "128x96 1x1 2 1", ""),
]


def chosen(line: str, shape: str, words: str) -> tuple[Problem, Config]:
    """A problem and the config that the words say."""
    problem = Problem.parse(f"gemm {line}")
    tile, cluster, parts, warpgroups = shape.split()
    plain = f"tile_k=64 swap_ab=false use_tma_store={str(not problem.unaligned_out).lower()} use_pdl=false"
    config = Config.parse(
        f"algorithm=cluster_split tile_shape_mn={tile} cluster_shape_mn={cluster} cluster_k={parts} "
        f"mma_warpgroups={warpgroups} {plain}"
    ).replace(**Config.parse(words))
    SPACE.require(problem, config)
    return problem, config


PAIRS = [chosen(*case) for case in CASES]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dsl,
    pytest.mark.skipif(GPU is None or GPU.arch.name != "sm_90a", reason="needs an NVIDIA GPU of sm_90a"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Source, Result]:
    """The kernels, compiled together."""
    with Builder(Store(tmp_path_factory.mktemp("cache"))) as builder:
        return dict(builder.build({render(*pair, ARCH) for pair in PAIRS}))


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(timeout_s=60) as opened:
        yield opened


@pytest.mark.parametrize(
    ("problem", "config"), [pytest.param(*pair, id=f"{pair[0]} | {pair[1]}") for pair in PAIRS]
)
def test_a_legal_config_computes_the_product(
    problem: Problem, config: Config, results: dict[Source, Result], bench: Bench
) -> None:
    """The problem itself and a smaller one of odd extents agree with fp64, everywhere, and again."""
    assert GPU is not None
    artifact = results[render(problem, config, ARCH)]
    assert isinstance(artifact, Artifact), artifact
    bench.open(problem)
    candidate = Candidate.of(
        "kernel", artifact.shared_object, artifact.symbol, SPACE, config, problem, GPU.sm_count
    )
    result = bench.check(candidate)
    assert result.ok, result.error
    assert result.verdict is not None and result.verdict.compared > 0
