"""SwiGLU of what one projection made, forward and backward, without a tensor for the activation."""

import torch

import cutegen

torch.manual_seed(0)
x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
gate_and_up = torch.nn.Linear(1024, 2 * 2816, bias=False, device="cuda", dtype=torch.bfloat16)
down = torch.nn.Linear(2816, 1024, bias=False, device="cuda", dtype=torch.bfloat16)

y = down(cutegen.swiglu(gate_and_up(x)))
y.float().square().mean().backward()
grad = gate_and_up.weight.grad
assert grad is not None
print(y.shape, grad.float().norm().item())

gate, up = gate_and_up(x).detach().chunk(2, dim=-1)
with torch.no_grad():
    print(torch.equal(cutegen.swiglu(gate, up), cutegen.swiglu(torch.cat([gate, up], -1))))
    cutegen.geglu(gate, up, approximate="tanh", out=up)  # in place of one of both
    cutegen.activate(gate, "relu_squared", out=gate)  # without a gate
