"""Grouped fp8 products whose blocks have factors, on a real GPU: kernels, broken ones, calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from family_kernels import ARCH, Broken, broken_kernel_is_rejected, config_is_right, mutants
from hopper import GPU, NEEDS_HOPPER

from cutegen.families.registry import find_family, find_space, parse_problem
from cutegen.family import Problem
from cutegen.measure.check import judge
from cutegen.measure.poisoned_output import PoisonedOutput
from cutegen.space import Config

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
NAME = "grouped_gemm_blocks "
SPACE = find_space("grouped_gemm_blocks", ARCH)
#: What all kernels below have, unless they say otherwise.
BASE = "tile_k=128 mma_warpgroups=2 swap_ab=false cluster_shape_mn=1x1 pingpong=false"
TALL = "tile_shape_mn=256x96 cluster_shape_mn=1x2 swizzle_size=8 raster_along_m=false"
WIDE = "tile_shape_mn=128x192 cluster_shape_mn=2x1"
AHEAD = "tile_shape_mn=128x128 tile_k=256"
THREE = "tile_shape_mn=192x128 mma_warpgroups=3 use_pdl=true"
TURNS = "tile_shape_mn=64x128 tile_k=256 mma_warpgroups=1 pingpong=true cluster_shape_mn=1x2"
DIRECT = "tile_shape_mn=64x96 mma_warpgroups=1 use_tma_store=false"
SWAPPED = "tile_shape_mn=64x32 tile_k=256 mma_warpgroups=1 swap_ab=true"
SWAPPED_WIDE = "tile_shape_mn=256x104 swap_ab=true"
SWAPPED_DIRECT = "tile_shape_mn=128x16 swap_ab=true use_tma_store=false"
#: Problems, and the kernels for them beside their default.
CASES_OF: dict[str, tuple[str, ...]] = {
    "4000x1536x2048x8 e4m3": (TALL, WIDE, AHEAD, THREE, TURNS, DIRECT, SWAPPED_WIDE),
    "4096x768x512x128 e4m3 tokens=zipf": (AHEAD, TURNS, SWAPPED),
    "511x384x256x512 e4m3": (DIRECT, SWAPPED),
    "8203x1152x384x5 e4m3 out=fp32": (TALL, THREE),
    "64x4096x4096x8 e4m3 out=fp16": (SWAPPED, SWAPPED_DIRECT),
    "1x512x512x4 e4m3": (SWAPPED,),
    "8192x128x512x1 e4m3": (),
    "37x128x128x37 e4m3": (AHEAD,),
}
WRONG = r"out\[\d+.* should be|elements outside of the output"
#: A text of the kernel, what takes its place, and what the check must say.
BROKEN = {
    "factors of the first matrix": Broken(
        "scale_b, at_k, column, expert)", "scale_b, at_k, column, 0)", WRONG
    ),
    "factors of the first rows of all": Broken(
        "factor_at(scale_a, row + lane, at_k)", "factor_at(scale_a, row - first + lane, at_k)", WRONG
    ),
    "factors of the block before": Broken("last_block)\n", "last_block) // 2\n", WRONG),
    "one block of columns for a tile": Broken("begin + at * STEP_N < BLOCK", "begin + at < BLOCK", WRONG),
    "rows of the next group overwritten": Broken("if end - first < TILE_M:", "if end - first < 0:", WRONG),
    "the first matrix for all": Broken("rank[0], CLUSTER_M, expert)", "rank[0], CLUSTER_M, 0)", WRONG),
}


def _cases() -> Iterator[tuple[Problem, Config]]:
    for line, kernels in CASES_OF.items() if GPU is not None else ():
        problem = parse_problem(NAME + line)
        default = SPACE.default(problem)
        base = default.replace(**Config.parse(BASE))
        for config in dict.fromkeys([default, *(base.replace(**Config.parse(words)) for words in kernels)]):
            yield problem, config


CASES = {f"{problem} | {config}": (problem, config) for problem, config in _cases()}
MUTANTS = mutants((f"{NAME}5000x1536x512x16 e4m3", {**Config.parse(BASE), **Config.parse(TALL)}, BROKEN))
test_a_config_multiplies_groups = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


def test_a_loop_of_torchs_products_passes_the_check() -> None:
    """Operands, factors and reference are what cuBLAS takes them for."""
    import torch

    problem = parse_problem(f"{NAME}1001x1024x2048x7 e4m3")
    family, device = find_family(problem.family), torch.device("cuda")
    inputs = family.inputs(problem, torch.Generator(device=device).manual_seed(0))
    [argument] = [a for a in family.arguments(problem) if a.kind == "inout"]
    output = PoisonedOutput(argument, device, initial=inputs.tensors["out"])
    output.poison()
    [(name, baseline)] = family.baselines(problem, inputs, {"out": output.tensor}).items()
    baseline(inputs, {"out": output.tensor})
    verdict = judge({"out": output}, family.reference(problem, inputs))
    assert name == "loop of torch._scaled_mm" and verdict.ok, verdict


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize(
    "counts", [(0, 300, 1, 0, 7), (0, 0, 0, 0, 308), (61, 61, 61, 61, 64), (0, 0, 0, 0, 0)]
)
def test_a_call_multiplies_each_group(counts: tuple[int, ...]) -> None:
    """Eager and compiled; rows of no group stay what they are."""
    import torch

    import cutegen

    def operand(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)

    a, b = operand(401, 256), operand(5, 384, 256)
    scale_a = torch.rand(2, 401, device="cuda").t() + 0.5
    scale_b = torch.rand(5, 3, 2, device="cuda") + 0.5
    x = a.float() * scale_a.repeat_interleave(128, 1)
    w = b.float() * scale_b.repeat_interleave(128, 1).repeat_interleave(128, 2)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    want = torch.full((401, 384), 7.0, device="cuda")
    for group, (count, end) in enumerate(zip(counts, ends.tolist(), strict=True)):
        want[end - count : end] = (x[end - count : end].double() @ w[group].double().T).float()
    for run in (cutegen.scaled_grouped_gemm, torch.compile(cutegen.scaled_grouped_gemm, fullgraph=True)):
        out = torch.full((401, 384), 7.0, device="cuda")
        assert run(a, b, scale_a, scale_b, ends, out=out) is out
        assert torch.allclose(out, want, rtol=1e-3, atol=0.05)
