"""Rotary embeddings on a real GPU: every style, table and norm against fp64, broken kernels, the operator."""

from __future__ import annotations

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "rope 4096x32x8x128x64x1 bf16",
    "rope 4096x32x8x128x64x9000 bf16 table=positions norm",
    "rope 1000x128x1x192x32x4096 bf16 style=interleaved table=positions index=int32",
    "rope 999x16x16x256x32x1 fp16 table_dtype=same",
    "rope 777x28x4x80x16x1 fp32 style=interleaved inverse",
    "rope 777x7x3x192x32x1 bf16 norm",
    "rope 777x7x3x192x32x1 bf16 norm style=interleaved",
    "rope 77x7x3x50x13x1 bf16 norm",
    "rope 333x5x2x33x9x1 fp32",
    "rope 1x32x8x128x64x1 bf16",
    "rope 300x32x8x128x64x1 bf16 unaligned",
)
PLAIN, NORMED, PART = (
    "rope 1000x32x8x128x64x1 bf16",
    "rope 1000x32x8x128x64x300 bf16 table=positions norm",
    "rope 1000x8x2x192x32x1 bf16",
)
BELOW = "            store(below, of_head(y, token, head, low), policy)\n"
LAST = "            if place == tokens - 1 and head == heads - 1:\n"
FIFTH = "            if place == 5 and head == HEADS_K and lane == 0:\n"  # one of q
KNOBS = {"heads_per_thread": 2}
TURNS = {
    "last keys unwritten": Broken(
        "(groups_of(heads) * lanes) - 1) // THREADS + 1",
        "(groups_of(heads) * lanes) - 1) // THREADS",
        r"(q_out|k_out): \d+ of \d+ elements .*never written",
    ),
    "a head left out": Broken(
        "place < tokens and head < heads:",
        "place < tokens and head < heads and head + place != 31:",
        r"(q_out|k_out): \d+ of \d+ elements .*never written",
    ),
    "beyond the last head": Broken(
        BELOW,
        BELOW + LAST + "                y[token, head, D] = X(0.0)\n",
        r"elements outside of the output were written",
    ),
    "input modified": Broken(
        BELOW,
        BELOW + FIFTH + "                x[token, 0, 3] = X(77.0)\n",
        r"wrote its input q, first at \(5, 0, 3\)",
    ),
    "turned the other way": Broken("a * c - b * s for", "a * c + b * s for", r"_out\[\d+.* should be"),
    "the next token's table": Broken(
        "row = cutlass.Int64(token)",
        "row = cutlass.Int64(token ^ 1)",
        r"_out\[\d+.* should be",
    ),
}
NORMS = {
    "a position too far": Broken("positions[token])", "positions[token]) + 1", r"_out\[\d+.* should be"),
    "eps compiled in": Broken("+ eps, fastmath", "+ 1e-6, fastmath", r"_out\[\d+.* should be"),
    "sum over half a head": Broken(
        "threads_in_group=LANES",
        "threads_in_group=LANES // 2",
        r"_out\[\d+.* should be",
    ),
}
TAILS = {
    "tail not copied": Broken(
        "    k_tail_end = q_tail_end + copies(k, k_out, HEADS_K)\n",
        "    k_tail_end = q_tail_end\n",
        r"k_out: \d+ of \d+ elements .*never written, first at \(0, 0, 64\)",
    ),
}
MUTANTS = mutants((PLAIN, KNOBS, TURNS), (NORMED, KNOBS, NORMS), (PART, KNOBS, TAILS))
CASES = cases(LINES, 3)
test_a_config_turns_heads = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
def test_a_packed_projection_is_turned_in_place() -> None:
    """Like new tensors; the values and what is not turned stay as they are; the gradient turns back."""
    import torch

    import cutegen

    heads = torch.randn(2, 500, 12, 128, device="cuda", dtype=torch.bfloat16)
    before = heads.clone()
    q, k = heads[:, :, :8], heads[:, :, 8:10]
    angles = torch.arange(500, device="cuda")[:, None] / 10000 ** (torch.arange(32, device="cuda") / 32)
    cos, sin = angles.cos(), angles.sin()
    want = cutegen.rope(q, k, cos, sin)
    cutegen.rope_(q, k, cos, sin)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])
    assert torch.equal(heads[:, :, 10:], before[:, :, 10:])
    assert torch.equal(heads[..., 64:], before[..., 64:])
    a, b = before[:, :, :8, :32].double(), before[:, :, :8, 32:64].double()
    c, s = cos.double()[:, None], sin.double()[:, None]
    assert torch.allclose(q[..., :32].double(), a * c - b * s, rtol=2**-7, atol=1e-3)
    x = torch.randn(2, 500, 8, 128, device="cuda", requires_grad=True)
    y, _ = cutegen.rope(x, k.float(), cos, sin)
    y.square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 2 * x, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch makes an empty graph first, and warns of it
@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_compiles(mode: str) -> None:
    """torch.compile traces it without a break, in place too, and a step reuses its memory."""
    import torch

    import cutegen

    packed = torch.randn(64, 12, 128, device="cuda", dtype=torch.bfloat16)
    cos, sin = (torch.randn(64, 64, device="cuda") for _ in range(2))

    def step(packed: torch.Tensor) -> torch.Tensor:
        heads = packed * 2
        q, k = cutegen.rope_(heads[:, :8], heads[:, 8:10], cos, sin)
        return q.sum(1) + k.sum(1) + heads[:, 10:].sum(1)

    run = torch.compile(step, mode=mode, fullgraph=True)
    want = step(packed)
    for _ in range(4):
        assert torch.allclose(run(packed).float(), want.float(), rtol=2**-6, atol=0.25)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("texts", [1, 3])
def test_a_model_of_others_turns_by_a_kernel(texts: int) -> None:
    """As torch does, with gradients, and in a CUDA graph."""
    import copy

    import model_of_others as others
    import torch

    import cutegen

    torch.manual_seed(0)
    model = others.Model().to("cuda", torch.bfloat16)
    twin = copy.deepcopy(model)
    assert cutegen.optimize(model).ropes == ("rotary_emb",)
    width = others.HEADS * others.EXTENT
    x = torch.randn(texts, 50, width, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(50, device="cuda")[None]
    cutegen.reset_counters()
    found, want = model(x, at), twin(x, at)
    assert torch.allclose(found.float(), want.float(), rtol=2**-5, atol=2**-4)
    assert not any("rotary" in reason for reason in cutegen.counters()["fallbacks"])
    found.float().square().sum().backward()
    want.float().square().sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None
        assert (own.grad - other.grad).float().norm() <= 2**-5 * other.grad.float().norm()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x, at)
        graph.replay()
    assert torch.equal(captured, found)
    cutegen.restore(model)
