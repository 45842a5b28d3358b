"""Gated products on a real GPU: tails, clusters, split k, few rows, outputs, broken kernels, the operator."""

from __future__ import annotations

from typing import Any

import pytest
from family_kernels import ARCH, Broken, broken_kernel_is_rejected, config_is_right, mutants
from hopper import GPU, NEEDS_HOPPER

from cutegen.families.registry import find_space, parse_problem

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
PINGPONG = {"mma_warpgroups": 1, "pingpong": True}
SPLIT = {"use_tma_store": False, "cluster_shape_mn": (1, 1), "mma_warpgroups": 1}
#: A problem, and knobs that differ from its default config.
GIVEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("700x2048x1024 bf16", {"tile_shape_mn": (128, 256), "mma_warpgroups": 2, "cluster_shape_mn": (2, 1)}),
    ("1000x2880x2880 bf16 layout=interleaved", {"tile_shape_mn": (128, 192), **PINGPONG}),
    ("333x1001x1024 fp16 activation=gelu_tanh", {}),
    ("1000x2048x1032 bf16", {"tile_shape_mn": (64, 48), "cluster_shape_mn": (4, 1), "mma_warpgroups": 1}),
    (
        "1000x2048x1032 bf16",
        {"tile_shape_mn": (64, 128), "cluster_shape_mn": (1, 4), "tile_k": 128, "mma_warpgroups": 1},
    ),
    ("700x2048x520 fp16", {"tile_shape_mn": (192, 128), "mma_warpgroups": 3, "cluster_shape_mn": (1, 2)}),
    ("3000x3904x512 bf16 activation=relu", {"tile_shape_mn": (128, 224), "stream_k": True}),
    ("600x2048x2056 bf16 layout=interleaved pre", {"tile_shape_mn": (64, 160), **PINGPONG}),
    ("16x14336x4096 bf16", {}),
    ("1x8192x4096 fp16 layout=interleaved", {"use_pdl": True}),
    ("37x4096x1024 bf16 unaligned", {}),
    ("201x2047x520 bf16 pre", {"tile_shape_mn": (128, 128), "mma_warpgroups": 2}),
    ("64x4096x8192 bf16 activation=gelu", {"tile_shape_mn": (128, 64), "split_k": 4, **SPLIT}),
    ("100x2048x4096 bf16 pre", {"swap_ab": True, "tile_shape_mn": (128, 104), **PINGPONG}),
    ("100x2048x4096 fp16 layout=interleaved pre", {"tile_shape_mn": (64, 64), "split_k": 3, **SPLIT}),
    (
        "100x2048x4096 bf16 pre",
        {"swap_ab": True, "tile_shape_mn": (256, 32), "split_k": 3, **SPLIT, "mma_warpgroups": 2},
    ),
    ("257x509x128 bf16 pre", {}),
    ("37x1x64 bf16", {}),
    ("1x7x8 fp16 layout=interleaved pre", {}),
    ("700x2048x1024 bf16 layout=split", {"tile_shape_mn": (128, 256), "mma_warpgroups": 2}),
    ("1000x2880x2880 bf16 layout=split pre", {"tile_shape_mn": (128, 176), **PINGPONG}),
    ("333x1001x1024 fp16 layout=split", {}),
    ("64x4096x8192 bf16 layout=split", {"tile_shape_mn": (128, 64), "split_k": 4, **SPLIT}),
    ("16x14336x4096 bf16 layout=split", {}),
)
FEW = {"algorithm": "few_rows", "threads_per_cta": 128}
#: The same of few rows.
FEW_ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((f"{m}x1000x4096 bf16", {"algorithm": "few_rows"}) for m in range(1, 5)),
    ("1x14336x4096 bf16", {**FEW, "columns_per_warp": 4, "warps_along_k": 4, "unroll": 4}),
    ("1x1001x1032 fp16 activation=gelu", {**FEW, "columns_per_warp": 4, "warps_along_k": 2, "unroll": 1}),
    ("3x515x520 bf16 layout=interleaved", {**FEW, "columns_per_warp": 2, "warps_along_k": 1, "unroll": 2}),
    ("4x3000x4096 bf16 pre", {**FEW, "threads_per_cta": 512, "columns_per_warp": 8, "unroll": 1}),
    (
        "3x333x2048 fp16 pre layout=interleaved activation=gelu_tanh",
        {**FEW, "threads_per_cta": 64, "columns_per_warp": 2, "warps_along_k": 1, "unroll": 4},
    ),
    (
        "1x64x7176 bf16 activation=relu pre",
        {**FEW, "columns_per_warp": 2, "warps_along_k": 4, "unroll": 2, "cluster_k": 4},
    ),
    ("4x63x7176 fp16", {**FEW, "columns_per_warp": 8, "warps_along_k": 4, "unroll": 1, "cluster_k": 4}),
    ("1x1x8 bf16", {"algorithm": "few_rows"}),
    ("2x1000x4096 bf16 layout=split pre", {"algorithm": "few_rows"}),
)
KNOBS: dict[str, Any] = {"tile_shape_mn": (128, 128), "mma_warpgroups": 2, "cluster_shape_mn": (2, 1)}
BROKEN = {
    "gates are what they multiply": Broken(
        "    frag[v] = acc[rep",
        "    frag[v] = acc[UP + rep",
        r"out\[\d+.* should be",
    ),
    "halves one row too close": Broken(
        "cutlass.Int64(places) *",
        "cutlass.Int64(places - 1) *",
        r"\[\d+.* should be",
    ),
    "wrong activation": Broken("x * -1.4426950408889634", "x * 1.4426950408889634", r"out\[\d+.* should be"),
    "end of k left out": Broken(
        "cute.ceil_div(g_a.shape[1], TILE_K)",
        "(g_a.shape[1] // TILE_K)",
        r"\[\d+.* should be",
    ),
    "last columns unwritten": Broken(
        "cutlass.max(m_d.shape[1] - D_N, 0)",
        "cutlass.max(m_d.shape[1] - D_N - 8, 0)",
        r"never written",
    ),
}
#: Of the second output.
BROKEN_PRE = {
    "one output half written": Broken(
        "for half in cutlass.range_constexpr(2):\n        out.store(",
        "for half in cutlass.range_constexpr(1):\n        out.store(",
        r"pre: \d+ of \d+ elements .*never written",
    ),
}


#: Of kernels of few rows, with both outputs.
FEW_WRONG = r"(?:out|pre)\[\d+.* should be"
BROKEN_FEW = {
    "gates are what they multiply": Broken(
        "gate = sums[2 * result, 0]", "gate = sums[2 * result + 1, 0]", FEW_WRONG
    ),
    "halves one row too close": Broken("pair + half * n", "pair + half * (n - 1)", FEW_WRONG),
    "one warp's part of k": Broken("up += sums[2 * result + 1, other]", "up += 0.0", FEW_WRONG),
    "end of k left out": Broken("* STRIDE) < vectors:", "* STRIDE) < 0:", r"\[\d+.* should be"),
    "columns beyond the last written": Broken(
        "row < m and column < n:", "row < m:", r"should be|outside of the output"
    ),
    "one output half written": Broken("        m_p[row, column] = out[0]\n", "", r"pre: .*never written"),
}


def _case(line: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    problem = parse_problem(f"gated_gemm {line}")
    space = find_space("gated_gemm", ARCH, algorithm=changes.get("algorithm", ""))
    config = space.default(problem).replace(**changes)
    space.require(problem, config)
    return problem, config


PAIRS = [_case(*given) for given in (*GIVEN, *FEW_ROWS)] if GPU is not None else []
CASES = {f"{problem} | {config}": (problem, config) for problem, config in PAIRS}
MUTANTS = mutants(
    ("gated_gemm 700x2048x1032 bf16", KNOBS, BROKEN),
    ("gated_gemm 700x2048x1032 bf16 pre", KNOBS, BROKEN_PRE),
    ("gated_gemm 3x2001x1096 bf16 pre", {"algorithm": "few_rows"}, BROKEN_FEW),
)
test_a_config_computes_the_product = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_the_operator_agrees_with_torch_eager_and_compiled(layout: str) -> None:
    import torch

    import cutegen

    x = torch.randn(3, 50, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2 * 1024, 2048, device="cuda", dtype=torch.bfloat16) / 32
    both = x.double() @ w.double().T
    gate, up = (both[..., ::2], both[..., 1::2]) if layout == "interleaved" else both.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up

    def step(x: torch.Tensor) -> torch.Tensor:
        return cutegen.gated_gemm(x, w, layout=layout)

    for run in (step, torch.compile(step, fullgraph=True)):
        assert torch.allclose(run(x).double(), want, rtol=2**-7, atol=1e-3)
    out, pre = cutegen.gated_gemm(x, w, layout=layout, return_pre=True)
    assert torch.allclose(pre.double(), both, rtol=2**-7, atol=1e-3)
    assert torch.equal(out, step(x))


@pytest.mark.usefixtures("own_kernels")
def test_gradients_agree_with_torch_eager_and_compiled() -> None:
    """Through the pre-activations, our gate's backward kernel, and two products."""
    import torch

    import cutegen

    x = torch.randn(200, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(2 * 512, 1024, device="cuda", dtype=torch.bfloat16) / 32).requires_grad_()
    weight = torch.randn(200, 512, device="cuda", dtype=torch.bfloat16)
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, w)]
    gate, up = (wide[0] @ wide[1].T).chunk(2, -1)
    (torch.nn.functional.silu(gate) * up * weight.double()).sum().backward()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return cutegen.gated_gemm(x, w)

    for run in (step, torch.compile(step, fullgraph=True)):
        x.grad = w.grad = None
        run(x, w).backward(weight)
        for leaf, want in zip((x, w), wide, strict=True):
            assert leaf.grad is not None and want.grad is not None
            assert torch.allclose(leaf.grad.double(), want.grad, rtol=2**-6, atol=float(want.grad.std()) / 32)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("m", [1, 100])
def test_weights_may_lie_in_either_order_and_far_apart(m: int) -> None:
    """One kernel finds both weights, wherever they are; gradients are those of torch."""
    import torch

    import cutegen

    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    room = torch.randn(3 * 512, 1024, device="cuda", dtype=torch.bfloat16) / 32
    far = [torch.empty(2**28, device="cuda", dtype=torch.uint8) for _ in range(3)]
    for gate, up in ((room[:512], room[1024:]), (room[1024:], room[:512]), (room[:512], room[1024:].clone())):
        leaves = [leaf.detach().requires_grad_() for leaf in (x, gate, up)]
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        found = cutegen.gated_gemm(leaves[0], leaves[1], up=leaves[2])
        want = torch.nn.functional.silu(wide[0] @ wide[1].T) * (wide[0] @ wide[2].T)
        assert torch.allclose(found.double(), want, rtol=2**-7, atol=1e-3)
        found.sum().backward()
        want.sum().backward()
        for leaf, right in zip(leaves, wide, strict=True):
            assert leaf.grad is not None and right.grad is not None
            spread = float(right.grad.std())
            assert torch.allclose(leaf.grad.double(), right.grad, rtol=2**-6, atol=spread / 32)
    assert len(far) == 3
