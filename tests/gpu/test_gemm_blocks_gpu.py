"""fp8 products whose blocks have factors, on a real GPU: every way to cut them up against fp64, broken
kernels, the operator, and torch's own product by the same check."""

from __future__ import annotations

import pytest
from family_kernels import ARCH, Broken, broken_kernel_is_rejected, config_is_right, mutants
from hopper import GPU, NEEDS_HOPPER

from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_family, find_space
from cutegen.measure.check import judge
from cutegen.measure.poisoned_output import PoisonedOutput
from cutegen.space import Config, Value

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
SPACE = find_space("gemm_blocks", ARCH)
BASE: dict[str, Value] = {"tile_k": 128, "swap_ab": False}
WIDE = "tile_shape_mn=128x192 mma_warpgroups=2"
SWAPPED = "tile_shape_mn=128x72 mma_warpgroups=2 swap_ab=true"
AHEAD = "tile_shape_mn=128x128 tile_k=256 mma_warpgroups=2"
TALL = "tile_shape_mn=256x128 mma_warpgroups=2"
TALL_IN_TWO = "tile_shape_mn=256x96 mma_warpgroups=2"
TALL_SWAPPED = "tile_shape_mn=256x72 mma_warpgroups=2 swap_ab=true"
TWO = "mma_warpgroups=2"
SPLIT = "mma_warpgroups=1 use_tma_store=false"
KERNELS = (
    ("4096x7168x2048 e4m3 kk", f"tile_shape_mn=128x128 {TWO}"),
    ("333x2112x7168 e4m3 kk", f"{AHEAD} cluster_shape_mn=2x1"),
    ("1000x3008x1552 e4m3 kk", f"{WIDE} cluster_shape_mn=2x1 swizzle_size=4"),
    ("1000x3008x1552 e4m3 kk", f"tile_shape_mn=128x192 cluster_shape_mn=1x2 {TWO}"),
    ("777x1111x1040 e4m3 kk", f"tile_shape_mn=128x160 use_tma_store=false {TWO}"),
    ("4096x2112x7168 e4m3 kk", f"tile_shape_mn=128x128 stream_k=true {TWO}"),
    ("2000x3000x512 e4m3 kk", "tile_shape_mn=64x192 mma_warpgroups=1 pingpong=true cluster_shape_mn=1x2"),
    ("300x1000x144 e4m3 kk out=fp32 bias=n act=silu", f"tile_shape_mn=128x96 {TWO}"),
    ("4096x7168x2048 e4m3 kk", f"{TALL} cluster_shape_mn=1x2 swizzle_size=8"),
    ("4096x2112x7168 e4m3 kk", f"{AHEAD} stream_k=true"),
    ("1000x3008x5136 e4m3 kk", f"{AHEAD} cluster_shape_mn=1x2 swizzle_size=4"),
    ("2000x3000x1168 e4m3 kk", "tile_shape_mn=64x128 tile_k=256 mma_warpgroups=1 pingpong=true"),
    ("999x2112x1552 e4m3 kk out=fp32 bias=m", f"{TALL} cluster_shape_mn=2x1"),
    ("2000x3000x512 e4m3 kk", "tile_shape_mn=128x128 mma_warpgroups=1 pingpong=true cluster_shape_mn=2x1"),
    ("190x2112x1536 e4m3 kk", "tile_shape_mn=256x104 mma_warpgroups=2 swap_ab=true"),
    ("513x640x4096 e4m3 kk out=fp16", "tile_shape_mn=192x128 mma_warpgroups=3"),
    ("513x640x4096 e4m3 kk", "tile_shape_mn=192x128 mma_warpgroups=3"),
    ("333x392x1040 e4m3 kk alpha beta", "tile_shape_mn=64x64 tile_k=256 mma_warpgroups=1"),
    ("128x4096x7168 e4m3 kk", f"tile_shape_mn=64x128 split_k=3 {SPLIT}"),
    ("64x7168x2048 e4m3 kk", "tile_shape_mn=128x64 tile_k=256 mma_warpgroups=2 swap_ab=true"),
    ("70x1001x1536 e4m3 kk", f"{SWAPPED} use_tma_store=false"),
    ("37x2112x7168 e4m3 kk", f"tile_shape_mn=64x40 tile_k=256 swap_ab=true split_k=3 {SPLIT}"),
    ("1x24576x1536 e4m3 kk", "tile_shape_mn=64x8 tile_k=256 mma_warpgroups=1 swap_ab=true use_pdl=true"),
    ("200x640x2048 e4m3 kk", "tile_shape_mn=128x144 mma_warpgroups=2 swap_ab=true"),
    ("64x512x8192 e4m3 kk any_order", f"tile_shape_mn=64x64 split_k=4 reduction=arrival {SPLIT}"),
    ("5x7x16 e4m3 kk", f"tile_shape_mn=64x64 {SPLIT}"),
)
WRONG = r"out\[.* should be|out: \d+ of \d+ elements"
#: Broken texts of a kernel whose tiles lie in two blocks of columns, two slabs of rows to a warpgroup.
BROKEN = {
    "factors of the block before": Broken("last_block)\n", "last_block) // 2\n", WRONG),
    "one block of columns for a tile": Broken("begin + at * STEP_N < BLOCK", "begin + at < BLOCK", WRONG),
    "the block of columns a step late": Broken(
        "begin + at * STEP_N < BLOCK", "begin + at * STEP_N <= BLOCK", WRONG
    ),
    "a row's factor for that 8 further": Broken("[v // 2 % 2]", "[0]", WRONG),
    "factors of the first warp's rows": Broken(
        "wg_tid // 32 * 16 + wg_tid % 32 // 4\n    of", "wg_tid % 32 // 4\n    of", WRONG
    ),
    "factors of the first slab": Broken("row = slab + wg_tid", "row = wg_tid", WRONG),
    "the first slab twice": Broken("(None, (None, rep), kb", "(None, (None, 0), kb", WRONG),
    "sums of the first slab twice": Broken("first = step % REPS * (TILE_N // 2)", "first = 0", WRONG),
    "no factor of B": Broken("of_row * column", "of_row", WRONG),
    "the block before is not cleared": Broken("ACCUMULATE, False", "ACCUMULATE, True", WRONG),
    "a factor is of another block of k": Broken(
        "factor_at(scale_a, row + lane, at_k)",
        "factor_at(scale_a, row + lane, cutlass.select_(at_k == 3, cutlass.Int32(2), at_k))",
        WRONG,
    ),
    "factors of the next rows": Broken("one(of_rows + line * 32)", "one(of_rows + line * 32 + 1)", WRONG),
    "a line of factors is missing": Broken("range_constexpr(LINES)", "range_constexpr(LINES - 1)", WRONG),
}
#: The same of a kernel that multiplies the next block of k while it adds one up.
BROKEN_AHEAD = {
    "the first block of a k tile twice": Broken("step // REPS * (BLOCK // 32)", "0", WRONG),
    "factors of the first block": Broken("block, slab = step // REPS", "block, slab = 0", WRONG),
    "factors of one block for a k tile": Broken("* BLOCKS + block, last", "* BLOCKS, last", WRONG),
}
BROKEN_SWAPPED = {
    "columns in pairs": Broken("wg_tid % 4 * 2 + odd", "wg_tid % 4 * 2", WRONG),
    "factors of the first columns": Broken("factors[pair * 8 +", "factors[0 * pair +", WRONG),
    "one block of rows for all tiles": Broken("m_0 // BLOCK + lane", "lane", WRONG),
    "one block of rows for a tile": Broken("(begin + slab) // BLOCK", "0", WRONG),
}


def _case(line: str, words: str) -> tuple[Problem, Config]:
    problem = Problem.parse(f"gemm_blocks {line}")
    return problem, SPACE.default(problem).replace(**{**BASE, **Config.parse(words)})


CASES = {f"{line} | {words}": _case(line, words) for line, words in KERNELS} if GPU is not None else {}
MUTANTS = mutants(
    ("gemm_blocks 500x1000x1040 e4m3 kk", {**BASE, **Config.parse(TALL_IN_TWO)}, BROKEN),
    ("gemm_blocks 500x1000x1552 e4m3 kk", {**BASE, **Config.parse(AHEAD)}, BROKEN_AHEAD),
    ("gemm_blocks 70x1000x1040 e4m3 kk", {**BASE, **Config.parse(TALL_SWAPPED)}, BROKEN_SWAPPED),
)
test_config_is_right = config_is_right
test_broken_kernel_is_rejected = broken_kernel_is_rejected


def test_torchs_own_product_passes_the_check() -> None:
    """Operands, factors and reference are what cuBLAS takes them for."""
    import torch

    problem = Problem.parse("gemm_blocks 512x1024x2048 e4m3 kk")
    family, device = find_family(problem.family), torch.device("cuda")
    inputs = family.inputs(problem, torch.Generator(device=device).manual_seed(0))
    [argument] = [a for a in family.arguments(problem) if a.kind == "out"]
    output = PoisonedOutput(argument, device)
    output.poison()
    [(name, baseline)] = family.baselines(problem, inputs, {"out": output.tensor}).items()
    baseline(inputs, {"out": output.tensor})
    verdict = judge({"out": output}, family.reference(problem, inputs))
    assert name == "torch._scaled_mm" and verdict.ok, verdict


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize(("m", "n", "k"), [(200, 640, 1536), (1, 300, 400), (77, 128, 128), (129, 1001, 80)])
def test_the_operator_agrees_with_fp64(m: int, n: int, k: int) -> None:
    """Eager and compiled, of factors in the strides of torch and of a weight."""
    import torch

    import cutegen

    problem = Problem(m, n, k, ab_dtype="e4m3", family="gemm_blocks")
    inputs = find_family("gemm_blocks").inputs(problem, torch.Generator(device="cuda").manual_seed(3))
    given = [inputs.tensors[name] for name in ("a", "b", "scale_a", "scale_b")]
    reference = find_family("gemm_blocks").reference(problem, inputs)
    of_weight = [*given[:3], given[3].t()]
    for run in (cutegen.scaled_gemm, torch.compile(cutegen.scaled_gemm, fullgraph=True)):
        found = [run(*given), run(*of_weight)]
        assert torch.equal(*found) and found[0].dtype == torch.bfloat16
        for chunk in reference.chunks("out", found[0]):
            assert bool(((chunk.got - chunk.want).abs() <= chunk.allowed).all())
