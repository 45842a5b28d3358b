"""RMSNorm kernels through the real compiler: what the space says of them holds, on every target.

Needs the compiler but no GPU; takes some seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest
from rmsnorm_problem import rows
from row_compile import texts_of_targets

from cutegen.arch import find_arch
from cutegen.build import Artifact, Builder
from cutegen.build.render import Source, render
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.space import Config

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the CuTe DSL"),
]
ALL: Mapping[str, Any] = {"residual": True, "residual_out": True, "rstd": True}
SMEM: Mapping[str, Any] = {"row_in": "smem", "turn": 2}
#: The target, a problem, and knobs that differ from its default config.
KERNELS: tuple[tuple[str, Problem, dict[str, Any]], ...] = (
    ("sm_90a", rows(16384, 4096), {}),
    (
        "sm_90a",
        rows(16384, 128, dtype="fp16", rstd=True),
        {"threads_per_row": 16, "rows_per_thread": 2, "rows_per_cta": 16},
    ),
    ("sm_90a", rows(16, 1001, weight="none"), {"pdl": "late"}),
    ("sm_90a", rows(256, 32768, weight="fp32", **ALL), {"threads_per_row": 256, "cluster_n": 4}),
    ("sm_90a", rows(16384, 8192, **ALL), {"threads_per_row": 256, "prefetch_weight": False, "pdl": "late"}),
    ("sm_90a", rows(32768, 32768), {"threads_per_row": 256, "cluster_n": 4, "pdl": "off"}),
    ("sm_90a", rows(1, 262_143, weight="fp32"), {}),
    # Rows in shared memory: the default, parts that end early in the last CTA, every kind of operand.
    ("sm_90a", rows(2048, 65536), {}),
    ("sm_90a", rows(1024, 100_008), {"pdl": "late"}),
    ("sm_90a", rows(2048, 65536, weight="fp32", **ALL), {**SMEM, "threads_per_row": 512, "cluster_n": 4}),
    ("sm_90a", rows(1024, 262_144, dtype="fp32", weight="none", **ALL), {**SMEM, "turn": 4}),
    ("sm_100a", rows(1024, 50_000, dtype="fp16", weight="none"), {"pdl": "off"}),
    ("sm_100a", rows(1024, 131_072, **ALL), {**SMEM, "threads_per_row": 256, "cluster_n": 16}),
    ("sm_103a", rows(2048, 65536, weight="fp32", rstd=True), {"threads_per_row": 512, "cluster_n": 2}),
    ("sm_100a", rows(16384, 4096, dtype="fp32", **ALL), {"threads_per_row": 256}),
    ("sm_103a", rows(256, 32768), {"threads_per_row": 256, "cluster_n": 4, "pdl": "early"}),
)


def cases() -> dict[Source, tuple[Problem, Config]]:
    found = {}
    for target, problem, changes in KERNELS:
        arch = find_arch(target)
        space = find_space("rmsnorm", arch)
        config = space.default(problem).replace(**changes)
        assert not space.explain(problem, config), f"{problem}: {config}"
        found[render(problem, config, arch)] = (problem, config)
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
        derived = find_space("rmsnorm", arch).derive(config, problem, arch)
        resources = built[source].resources
        assert resources.smem_bytes == derived["smem_bytes"], source.config
        assert resources.threads == derived["threads"], source.config
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.notes) == (0, 0, ())


def test_a_knob_is_what_is_rendered() -> None:
    """Clusters exchange sums by asynchronous stores; a weight and the start of the next kernel come before or
    after the sum; shared memory is filled by bulk copies before anything is read from it."""
    for source, (problem, config) in cases().items():
        body = source.text.partition("def kernel(")[2]
        started = body.find("griddepcontrol_launch_dependents")
        summed, scaled = body.index("= sum_over_"), body.index("rsqrt")
        assert ("store_async_dsmem" in source.text) == (config["cluster_n"] != 1)
        assert ("use_pdl=True" in source.text) == ("griddepcontrol_wait" in body) == (config["pdl"] != "off")
        staged = config["row_in"] == "smem"
        fetched = body.find("fetch(x_row")
        assert (fetched >= 0) == ("cp_async_bulk_" in source.text) == staged
        reads = fetched if staged else body.index("load_vectors")
        assert (0 <= started < reads) == (config["pdl"] == "early")
        assert (summed < started < scaled) == (config["pdl"] == "late")
        if staged:
            assert fetched < body.index("mbarrier_wait(loaded") < body.index("squares(") < summed
            assert scaled < body.index("normalise(")
        elif problem.signature.weight:
            assert (body.index("weights = ") < summed) == config["prefetch_weight"]


def test_blackwell_runs_the_text_of_hopper() -> None:
    assert len(texts_of_targets(rows(16384, 4096))) == 1
