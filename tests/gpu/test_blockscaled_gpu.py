"""Block-scaled products on a real GPU that has them: torch's own, then the default kernel of each format.

torch's product passing the check says that operands, scale factors and reference are what cuBLAS takes them
for; it comes first, so that a failing kernel can be told from a failing check.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hopper import GPU, NEEDS_BLACKWELL

from cutegen.build import Artifact, Builder
from cutegen.build.render import render
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_family, find_space
from cutegen.measure import Bench, Candidate

pytestmark = NEEDS_BLACKWELL

VENDOR = {
    "256x512x1024 nvfp4 kk": "torch._scaled_mm",
    "200x528x1056 nvfp4 kk out=fp32": "torch._scaled_mm",
    "200x528x1056 nvfp4 kk alpha": "torch.nn.functional.scaled_mm",
    "256x512x1024 mxfp8_e4m3 kk": "torch._scaled_mm",
    "200x528x1056 mxfp8_e4m3 kk out=fp32": "torch._scaled_mm",
    "3x200x528x1056 mxfp8_e4m3 kk": "torch._scaled_mm for each batch",
    "256x512x1024 mxfp8_e5m2 kk": "torch.mm of decoded bf16 + copy",
}
KERNELS = (
    "256x512x1024 nvfp4 kk",
    "200x520x1056 nvfp4 kk alpha",
    "3x200x521x1056 nvfp4 kk out=fp32",
    "200x520x1056 mxfp8_e4m3 kk alpha",
    "200x520x1056 mxfp8_e5m2 kk out=fp16",
)


def problem_of(line: str) -> Problem:
    return Problem.parse(f"gemm_blockscaled {line}")


@pytest.mark.parametrize("line", VENDOR)
def test_torchs_own_product_passes_the_check(line: str) -> None:
    """Its name says that it is cuBLAS's; its result is judged as a kernel's would be."""
    import torch

    from cutegen.measure.check import judge
    from cutegen.measure.poisoned_output import PoisonedOutput

    problem, device = problem_of(line), torch.device("cuda")
    family = find_family(problem.family)
    inputs = family.inputs(problem, torch.Generator(device=device).manual_seed(0))
    [argument] = [a for a in family.arguments(problem) if a.kind == "out"]
    output = PoisonedOutput(argument, device)
    output.poison()
    [(name, baseline)] = family.baselines(problem, inputs, {"out": output.tensor}).items()
    baseline(inputs, {"out": output.tensor})
    verdict = judge({"out": output}, family.reference(problem, inputs))
    print(name, verdict)  # noqa: T201 - read by whoever runs this by hand
    assert name == VENDOR[line]
    assert verdict.ok or "decoded" in name, verdict


@pytest.mark.parametrize("line", KERNELS)
def test_the_default_kernel_is_right_on_problem_and_tail(line: str, tmp_path: Path) -> None:
    """Compiled here, in a child process, on poisoned outputs, again for equal bits."""
    assert GPU is not None
    problem = problem_of(line)
    space = find_space(problem.family, GPU.arch)
    config = space.default(problem)
    with Builder(Store(tmp_path)) as builder:
        [(_, artifact)] = builder.build([render(problem, config, GPU.arch)])
    assert isinstance(artifact, Artifact), artifact.message
    candidate = Candidate.of(
        "default", artifact.shared_object, artifact.symbol, space, config, problem, GPU.sm_count
    )
    with Bench(timeout_s=60) as bench:
        bench.open(problem)
        result = bench.check(candidate)
    assert result.ok, result.error
