"""Gates on a real GPU: every layout and activation against fp64, broken kernels, the operator."""

from __future__ import annotations

from typing import Any

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER
from pointwise_kernels import KNOBS, STORES, WRONG_SLOPE

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "gated 600x14336 bf16",
    "gated 2000x5120 fp16 layout=interleaved activation=gelu",
    "gated 777x4096 fp32 layout=split activation=gelu_tanh",
    "gated 3000x2880 bf16 layout=split activation=relu",
    "gated 1x14336 bf16",
    "gated 700x1001 bf16 layout=interleaved",
    "gated 333x17 fp32",
    "gated 512x4099 bf16",
    "gated 100x4096 bf16 layout=split unaligned",
    "gated 300x2880 bf16 unaligned",
    "gated_backward 600x14336 bf16",
    "gated_backward 1200x14336 bf16",
    "gated_backward 2000x5120 bf16 layout=interleaved activation=gelu",
    "gated_backward 777x4096 fp32 layout=split activation=gelu_tanh",
    "gated_backward 3000x2880 fp16 activation=relu",
    "gated_backward 700x1001 bf16 layout=split",
    "gated_backward 333x17 fp32 layout=interleaved",
    "gated_backward 512x4099 bf16",
)
FORWARD, BACKWARD = "gated 1024x4104 bf16", "gated_backward 1024x4104 bf16 layout=interleaved"
GATES = {
    **STORES,
    "a vector left out": Broken(
        "if at < total:",
        "if at < total and at != 700:",
        r"out: 8 of \d+ elements .*never written, first at \(1, 1496\)",
    ),
    "gate and up exchanged": Broken(
        "return vector(start), vector(start + N * X.width // 8)",
        "return vector(start + N * X.width // 8), vector(start)",
        r"out\[\d+.* should be",
    ),
}
GRADIENTS = {
    "wrong slope": WRONG_SLOPE,
    "gradients exchanged": Broken(
        "zip(gates, ups, strict=True) for value in pair]\n    return both[:ELEMENTS]",
        "zip(ups, gates, strict=True) for value in pair]\n    return both[:ELEMENTS]",
        r"dx\[\d+.* should be",
    ),
    "half of a pair unwritten": Broken(
        "            store(dhigh, high, policy)\n",
        "            if at != 3:\n                store(dhigh, high, policy)\n",
        r"dx: 8 of \d+ elements .*never written, first at \(0, 56\)",
    ),
}
MUTANTS = mutants((FORWARD, KNOBS, GATES), (BACKWARD, KNOBS, GRADIENTS))
CASES = cases(LINES, 3)
test_a_config_computes_the_gate = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
def test_the_operator_and_its_gradient_agree_with_torch(layout: str) -> None:
    import torch

    import cutegen

    def parts(x: Any) -> tuple[Any, Any]:
        return (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)

    x = torch.randn(3, 50, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    gate, up = parts(wide)
    want = torch.nn.functional.silu(gate) * up
    got = cutegen.swiglu(*parts(x)) if layout == "split" else cutegen.swiglu(x, layout=layout)
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-4)
    grad = torch.randn_like(got)
    got.backward(grad)
    want.backward(grad.double())
    assert torch.allclose(x.grad.double(), wide.grad, rtol=2**-8, atol=1e-4)
    extremes = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 3e38, float("nan"), 1.0]], device="cuda")
    ones = torch.ones_like(extremes)
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        values = torch.nn.functional.gelu(extremes, approximate="tanh" if name == "gelu_tanh" else "none")
        values = {"silu": torch.nn.functional.silu, "relu": torch.relu}.get(name, lambda x, v=values: v)(
            extremes
        )
        assert torch.allclose(cutegen.gated(extremes, ones, name), values, rtol=1e-5, equal_nan=True), name


@pytest.mark.filterwarnings("ignore")  # torch makes an empty graph first, and warns of it
@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_compiles(mode: str) -> None:
    """torch.compile traces it without a break, forward and backward, and a step reuses its memory."""
    import torch

    import cutegen

    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return cutegen.swiglu(x * 2) + 1

    run = torch.compile(step, mode=mode, fullgraph=True)
    wide = x.detach().double().requires_grad_()
    gate, up = (2 * wide).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up + 1
    want.sum().backward()
    for _ in range(4):
        x.grad = None
        got = run(x)
        assert torch.allclose(got.double(), want, rtol=2**-6, atol=2**-6)
        got.sum().backward()
        assert x.grad is not None and torch.allclose(x.grad.double(), wide.grad, rtol=2**-6, atol=2**-6)
