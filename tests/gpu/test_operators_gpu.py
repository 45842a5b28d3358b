"""NVIDIA's operators on a real GPU: right answers, and a sweep in which they compete with our kernels."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from hopper import GPU, NEEDS_HOPPER

from cutegen.arch import find_arch
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families.gemm.operator_package import PACKAGE
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import space_of
from cutegen.measure import Bench, Candidate
from cutegen.operator_api import find_offers
from cutegen.records.table import Table
from cutegen.records.trials import TrialStore
from cutegen.runtime.dispatch import Dispatcher
from cutegen.runtime.kernel_cache import Kernels
from cutegen.space import Config
from cutegen.tuning import AutoTuner

torch = pytest.importorskip("torch")


def installed() -> bool:
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        return False
    return True


pytestmark = [*NEEDS_HOPPER, pytest.mark.skipif(not installed(), reason=f"{PACKAGE} is not installed")]
ARCH = find_arch("sm_90a")
KNOBS = "source=operators operator=Sm90StaticPersistentGemmOperator"
LINES = (
    ("gemm 1000x2048x1032 bf16 kk", "tile_shape_mn=128x256 cluster_shape_mn=2x1"),
    ("gemm 1000x2048x1032 fp16 kn out=fp32", "tile_shape_mn=128x128 cluster_shape_mn=1x2"),
    ("gemm 3x304x1000x1032 bf16 mn", "tile_shape_mn=64x128 cluster_shape_mn=2x2"),
    ("gemm 1000x2048x1040 e4m3 kk", "tile_shape_mn=64x256 cluster_shape_mn=1x1"),
    ("gemm 1000x2048x1040 int8 kk", "tile_shape_mn=128x64 cluster_shape_mn=2x1"),
)


@pytest.mark.parametrize(("line", "words"), LINES)
def test_operators_compute_the_product_and_its_tails(
    store: Store, bench: Bench, line: str, words: str
) -> None:
    """By the check that every candidate passes: poisoned output, guards, fp64, twice, and odd tails."""
    assert GPU is not None
    problem, config = Problem.parse(line), Config.parse(f"{KNOBS} {words}")
    space = space_of(config, problem.family, ARCH)
    artifact = Kernels(store).artifact(problem, config, ARCH)
    candidate = Candidate.of(
        "it", artifact.shared_object, artifact.symbol, space, config, problem, GPU.sm_count
    )
    assert candidate.tail_problem is not None
    bench.open(problem)
    result = bench.check(candidate)
    assert result.ok, result.error


def test_a_call_runs_the_operator_that_is_asked_for(store: Store) -> None:
    """``cutegen.gemm`` with an operator's config gives torch's product, batched and not."""
    import cutegen
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(Dispatcher(kernels=Kernels(store, build="allow"), fallback="none"))
    try:
        for batch in ((), (3,)):
            a, b = (torch.rand(*batch, m, 512, device="cuda").bfloat16() - 0.5 for m in (256, 384))
            out: Any = torch.full((*batch, 256, 384), float("nan"), device="cuda", dtype=torch.bfloat16)
            config = f"{KNOBS} tile_shape_mn=128x128 cluster_shape_mn=2x1"
            cutegen.gemm(a, b.mT, out=out, config=config)
            torch.testing.assert_close(out.float(), a.float() @ b.mT.float(), rtol=1e-2, atol=1e-1)
    finally:
        cutegen.use(before)


@pytest.mark.alone
def test_both_sources_compete_in_one_sweep(tmp_path: Path) -> None:
    """All 24 operators are right and timed next to ours and torch.mm; the table names whose kernel won."""
    problem = Problem(512, 512, 512)
    tuner = AutoTuner(cache_dir=tmp_path, sources=("cutegen", "operators"))
    result = tuner.tune_problem(problem, candidates=24)
    assert {row.config.source for row in result.rows} == {"cutegen", "operators"}
    with TrialStore(tmp_path / "trials.db") as trials:
        theirs = [trial for trial in trials.find(problem) if trial.origin == "operators"]
    assert {trial.outcome for trial in theirs} == {"ok"} and all(trial.timing for trial in theirs)
    offered = find_offers(problem, ARCH, Store(tmp_path)).configs
    assert {trial.config for trial in theirs} == set(offered) and len(offered) == 24
    assert tuner.setting.table is not None
    entry = Table.load(tuner.setting.table).entries[problem]
    assert entry.source == result.config.source and entry.config == result.config
    theirs_first = next(row for row in result.rows if row.config.source == "operators")
    assert theirs_first.timing is not None and theirs_first.timing.ratio
    artifact = Kernels(Store(tmp_path), build="never").artifact(problem, theirs_first.config, ARCH)
    assert artifact.source_digest == render(problem, theirs_first.config, ARCH).digest
