"""Grouped GEMMs on a real GPU: both forms, every kind of kernel, broken kernels, the operator."""

from __future__ import annotations

from typing import Any

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, config_is_right, listed_cases, mutants
from grouped_kernels import DIRECT, PLAIN, SWAPPED_TURNS, TURNS
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
RANGES, MASKED = "grouped_gemm ", "grouped_gemm_masked "
WIDE = {
    **PLAIN,
    "tile_shape_mn": (128, 256),
    "mma_warpgroups": 2,
    "cluster_shape_mn": (2, 1),
    "swizzle_size": 8,
}
#: A warpgroup has three slabs, or two of every other 64 rows; a group's last tile leaves some out.
TALL = {**TURNS, "tile_shape_mn": (192, 128), "swizzle_size": 8, "raster_along_m": True}
TALL_TOGETHER = {**PLAIN, "tile_shape_mn": (256, 128), "mma_warpgroups": 2, "cluster_shape_mn": (1, 2)}
ODD = {**PLAIN, "tile_shape_mn": (192, 72), "mma_warpgroups": 3, "swizzle_size": 2, "raster_along_m": False}
SWAPPED = {**PLAIN, "tile_shape_mn": (64, 24), "swap_ab": True, "tile_k": 128, "raster_along_m": False}
SWAPPED_DIRECT = {**SWAPPED, "tile_shape_mn": (128, 16), "mma_warpgroups": 2, "use_tma_store": False}
#: Problems, and the kernels for them beside their default.
CASES_OF: dict[str, tuple[dict[str, Any], ...]] = {
    RANGES + "4000x1536x2048x8 bf16": (WIDE, TURNS, TALL, TALL_TOGETHER, ODD, DIRECT, SWAPPED_TURNS),
    RANGES + "4096x768x512x128 bf16 tokens=zipf": (PLAIN, TURNS, SWAPPED),
    RANGES + "511x392x264x512 bf16": (PLAIN, SWAPPED),
    RANGES + "8200x1001x264x5 bf16": (DIRECT,),
    RANGES + "3000x648x264x7 bf16": (WIDE, TURNS, SWAPPED_TURNS),
    RANGES + "64x4096x4096x8 fp16": (SWAPPED, SWAPPED_DIRECT),
    RANGES + "1x512x512x4 bf16": (SWAPPED,),
    RANGES + "8192x8x512x1 bf16": (),
    RANGES + "37x40x8x37 bf16": (PLAIN,),
    MASKED + "1024x2048x512x8 bf16 mean=320": (WIDE, TURNS, TALL, TALL_TOGETHER, ODD, DIRECT, SWAPPED_TURNS),
    MASKED + "4096x1536x2048x6 bf16 mean=20 tokens=zipf": (SWAPPED, SWAPPED_DIRECT, PLAIN),
    MASKED + "1000x1001x264x5 fp16": (DIRECT,),
    MASKED + "1x64x512x7 bf16": (SWAPPED,),
}
WRONG = r"out\[\d+.* should be|elements outside of the output"
LAST = "last_m = cutlass.max(end - first - TILE_M, 0)"
WITHIN = "    within = work - before"
BEHIND = "        before[MAX_EXPERTS] = behind"
TOTAL = "    total = cutlass.min(before[MAX_EXPERTS], most) * tiles_wide\n"
#: A text of the kernel, what takes its place, and what the check must say.
BROKEN = {
    "rows of the next group overwritten": Broken("if end - first < TILE_M:", "if end - first < 0:", WRONG),
    "rows beyond the end written": Broken("            rows = end\n", "            rows = end + 1\n", WRONG),
    "the last tile not moved back": Broken(
        f"            {LAST}\n            m_0", "            last_m = end - first\n            m_0", WRONG
    ),
    "the matrix of the group before": Broken(
        WITHIN, f"    expert = cutlass.max(expert - 1, 0)\n{WITHIN}", WRONG
    ),
    "one tile too few": Broken(f"{BEHIND}\n", f"{BEHIND} - 1\n", WRONG),
    "tiles of half a warp counted": Broken("range_constexpr(5)", "range_constexpr(4)", WRONG),
    "the first row of all": Broken(
        "            m_0 += first\n            batch = 0\n            rows",
        "            batch = 0\n            rows",
        WRONG,
    ),
    "tiles that only pass by": Broken("if last + 64 <= first", "if last - 64 <= first", WRONG),
    "a slab left out that nobody multiplies": Broken(
        "(ahead + 64 * (MMA_WGS - 1))", "(ahead + 64 * MMA_WGS)", WRONG
    ),
    "input modified": Broken(TOTAL, f"{TOTAL}    offs[0] = 0\n", "wrote its input offs"),
}

CASES = listed_cases(CASES_OF)
MUTANTS = mutants((RANGES + "5000x1536x512x64 bf16", PLAIN, BROKEN))
test_a_config_multiplies_groups = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


def _operands(*shape: int) -> Any:
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize(
    "counts", [(0, 300, 1, 0, 7), (0, 0, 0, 0, 308), (61, 61, 61, 61, 64), (0, 0, 0, 0, 0)]
)
def test_a_call_multiplies_each_group(counts: tuple[int, ...]) -> None:
    """In both forms; rows of no group stay what they are."""
    import torch

    import cutegen

    a, b = _operands(400, 256), _operands(5, 384, 256)
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    out = torch.full((400, 384), 7.0, device="cuda", dtype=torch.bfloat16)
    assert cutegen.grouped_gemm(a, b, ends, out=out) is out
    want = torch.full_like(out, 7.0)
    masked = torch.stack([a] * 5)
    first = 0
    for group, count in enumerate(counts):
        want[first : first + count] = a[first : first + count] @ b[group].T
        first += count
    assert torch.allclose(out, want, rtol=2**-7, atol=0.07)
    assert torch.equal(out, cutegen.grouped_gemm(a, b, counts_to_ends(counts), out=torch.full_like(out, 7.0)))
    every = torch.full((5, 400, 384), 7.0, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor(counts, device="cuda", dtype=torch.int32)
    cutegen.grouped_gemm(masked, b, counts=rows, out=every, expected_rows=100)
    for group, count in enumerate(counts):
        assert torch.allclose(every[group, :count], a[:count] @ b[group].T, rtol=2**-7, atol=0.07)
        assert bool((every[group, count:] == 7.0).all())


def counts_to_ends(counts: tuple[int, ...]) -> list[int]:
    return [sum(counts[: at + 1]) for at in range(len(counts))]


@pytest.mark.usefixtures("own_kernels")
def test_wrong_offsets_on_the_device_stay_inside() -> None:
    """Offsets that decrease or pass the end read and write nothing but the operands' rows."""
    import torch

    import cutegen

    memory = torch.full((600, 384), 7.0, device="cuda", dtype=torch.bfloat16)
    a, b = _operands(400, 256), _operands(5, 384, 256)
    for wrong in ((90, 60, 2**31 - 1, -5, 1000), (-(2**31), 400, 0, 400, 0), (500, 600, 700, 800, 900)):
        ends = torch.tensor(wrong, device="cuda", dtype=torch.int32)
        cutegen.grouped_gemm(a, b, ends, out=memory[100:500])
        cutegen.grouped_gemm(a[None].expand(5, -1, -1).contiguous(), b, counts=ends)
        torch.cuda.synchronize()
        assert bool((memory[:100] == 7.0).all()) and bool((memory[500:] == 7.0).all())


@pytest.mark.filterwarnings("ignore")  # torch makes an empty graph first, and warns of it
@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_compiles(mode: str) -> None:
    """torch.compile traces it without a break, and a graph takes other offsets than those of its capture."""
    import torch

    import cutegen

    a, b = _operands(128, 256), _operands(4, 384, 256)

    def step(a: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return cutegen.grouped_gemm(a * 2, b, offs).relu()

    run = torch.compile(step, mode=mode, fullgraph=True)
    for ends in ((32, 64, 96, 128), (0, 128, 128, 128), (1, 2, 3, 128), (128, 128, 128, 128)):
        offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
        assert torch.equal(run(a, offs), step(a, offs))
