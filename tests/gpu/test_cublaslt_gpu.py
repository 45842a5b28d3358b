"""cuBLASLt through its C interface on a real GPU: it is found, its algorithms compute what they should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hopper import NEEDS_HOPPER

from cutegen.families.gemm.problem import Problem
from cutegen.measure import Bench
from cutegen.measure.policy import Policy
from tools.benchmark.child import ENGINE
from tools.benchmark.environment import ROOT
from tools.benchmark.vendor import Vendor

pytestmark = NEEDS_HOPPER


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """The measuring child of contests."""
    with Bench(engine=ENGINE, search_path=[ROOT], timeout_s=60) as opened:
        yield opened


@pytest.mark.parametrize(
    "problem",
    [
        Problem(64, 7168, 2048),
        Problem(1, 6144, 4096),
        Problem(256, 512, 1024, layout="kn"),
        Problem(256, 512, 1024, layout="mn", ab_dtype="fp16"),
        Problem(264, 520, 1032, layout="mk", out_dtype="fp32"),
        Problem(1000, 1001, 512),
    ],
    ids=str,
)
def test_its_best_algorithms_are_right_and_timed(bench: Bench, problem: Problem) -> None:
    """Against fp64, as every kernel is; several are offered, and those that go on can be timed."""
    bench.open(problem)
    entrant = Vendor("behind").enter(bench, problem)
    assert int(str(entrant.details["algorithms"])) >= 1 and int(str(entrant.details["timed"])) >= 1
    run = bench.time([finalist.candidate for finalist in entrant.finalists], Policy.screen())
    assert set(run) == {finalist.candidate.name for finalist in entrant.finalists}
    print(problem, entrant.details, [f.config for f in entrant.finalists])  # noqa: T201
