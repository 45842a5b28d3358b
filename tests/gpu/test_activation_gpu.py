"""Activations on a real GPU: every activation against fp64, broken kernels, the operator."""

from __future__ import annotations

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER
from pointwise_kernels import KNOBS, STORES, WRONG_SLOPE

from cutegen.families.pointwise import ACTIVATIONS

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "activation 600x16384 bf16",
    "activation 2000x8192 bf16",
    "activation 2000x5120 fp16 activation=gelu_tanh",
    "activation 777x4096 fp32 activation=silu",
    "activation 3000x2880 bf16 activation=relu_squared",
    "activation 1x14336 bf16 activation=relu",
    "activation 700x1001 bf16",
    "activation 300x2880 bf16 unaligned",
    "activation_backward 600x16384 bf16",
    "activation_backward 2000x8192 bf16",
    "activation_backward 2000x5120 fp16 activation=gelu_tanh",
    "activation_backward 777x4096 fp32 activation=silu",
    "activation_backward 3000x2880 bf16 activation=relu_squared",
    "activation_backward 333x17 fp32 activation=relu",
)
FORWARD, BACKWARD = "activation 1024x4104 bf16", "activation_backward 1024x4104 bf16 activation=silu"
VALUES = {
    **STORES,
    "another activation": Broken("1.0 + 0.26 * ", "1.0 + 0.27 * ", r"out\[\d+.* should be"),
}
GRADIENTS = {
    "wrong slope": WRONG_SLOPE,
    "the activation itself": Broken("slope(value)[1]", "slope(value)[0]", r"dx\[\d+.* should be"),
}
MUTANTS = mutants((FORWARD, KNOBS, VALUES), (BACKWARD, KNOBS, GRADIENTS))
CASES = cases(LINES, 3)
test_a_config_computes_the_activation = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operator_and_its_gradient_agree_with_torch(activation: str) -> None:
    import torch

    import cutegen
    from cutegen.families.pointwise import activated

    x = torch.randn(3, 50, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    want, got = activated(activation, wide), cutegen.activate(x, activation)
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-4)
    grad = torch.randn_like(got)
    got.backward(grad)
    want.backward(grad.double())
    assert x.grad is not None and wide.grad is not None
    assert torch.allclose(x.grad.double(), wide.grad, rtol=2**-8, atol=1e-4)
    extremes = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 3e18, float("nan"), 1.0]], device="cuda")
    found = cutegen.activate(extremes, activation)
    assert torch.allclose(found, activated(activation, extremes), rtol=1e-5, equal_nan=True)
