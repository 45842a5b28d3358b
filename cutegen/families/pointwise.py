"""Activations of one value: they and their derivatives, what error is allowed, and what torch offers.

Families whose kernels activate element by element share this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cutegen.families.compiled import compile_for_one_problem
from cutegen.families.declared import DeclaredProblem, rounding_error
from cutegen.family import Baseline, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["ACTIVATIONS", "KNOBS", "activated", "allowed_error", "chain_rule", "eager_and_compiled", "slope"]

#: As problems name them: silu, gelu exact and by the tanh approximation, relu and its square.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")

#: Error of an activation and its derivative in fp32, relative to the result: that of ex2.approx and
#: rcp.approx, of 2 units of 2**-23 each (PTX ISA), of the argument of the exponential, of at most 2**5, and
#: of the operations around them.
_RELATIVE = 2.0**-18
#: The same relative to the factors, for what cancels: 1 + erf, and the sum in a derivative. The inputs of the
#: check are normal: of 2**31 values none is expected above 6.5, so a product of three stays below 2**8.1.
_ABSOLUTE = 2.0**-22 * 6.5**3


def activated(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return an activation of ``x``, element by element."""
    import torch

    if name == "silu":
        return torch.nn.functional.silu(x)
    if name == "relu":
        return torch.relu(x)
    if name == "relu_squared":
        return torch.relu(x).square()
    return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def slope(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the derivative of an activation."""
    import torch

    if name == "relu":
        return (x > 0).to(x.dtype)
    if name == "relu_squared":
        return 2 * torch.relu(x)
    if name == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if name == "gelu":
        density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * c * (1 + 3 * 0.044715 * x.square())


def chain_rule(name: str, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``grad * slope(name, x)`` by the operators that autograd takes."""
    import torch

    aten = torch.ops.aten
    if name == "silu":
        return aten.silu_backward(grad, x)  # type: ignore[no-any-return]
    if name == "relu":
        return aten.threshold_backward(grad, x, 0)  # type: ignore[no-any-return]
    if name == "relu_squared":
        return grad * 2 * torch.relu(x)
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return aten.gelu_backward(grad, x, approximate=approximate)  # type: ignore[no-any-return]


def allowed_error(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    """Return the error allowed of a product of up to three factors, one an activation or its slope."""
    allowed = rounding_error(str(problem.dtype), want)
    return allowed.add_(want.abs().mul_(_RELATIVE)).add_(_ABSOLUTE)


def eager_and_compiled(function: Callable[..., Tensors], *names: str) -> Mapping[str, Baseline]:
    """Return the baselines of an expression written down in torch: eager, and compiled for one problem.

    Args:
        function: Takes tensors, or None, and returns the outputs by name.
        names: Of the inputs that it takes.
    """

    def called(run: Callable[..., Tensors]) -> Baseline:
        return lambda inputs, outputs: run(*(inputs.tensors.get(name) for name in names))

    return {"torch eager": called(function), "torch.compile": called(compile_for_one_problem(function))}


#: For each knob of the kernels what it does and when it pays.
KNOBS = {
    "threads": "Threads of a CTA. Small CTAs start and end sooner; large ones are fewer to schedule.",
    "access_bytes": (
        "Bytes of one memory access of a thread. Narrow ones let results leave earlier, and take more "
        "instructions. Single elements where rows are not aligned."
    ),
    "vectors_per_thread": (
        "Accesses of up to 16 bytes per thread and tensor at a time. Several keep more loads in flight; one "
        "spreads few rows over more threads."
    ),
    "ctas_per_sm": (
        "Persistent CTAs per SM; 0 launches one CTA per tile. Persistent CTAs start once, but the start of "
        "one no longer overlaps with the end of another, which costs more on an H200."
    ),
    "pdl": (
        "Programmatic dependent launch: start while the previous kernel in the stream ends, and let the next "
        "kernel start as soon as there is room (early). Pays for short kernels between others that do so, as "
        "in a model with cutegen's layers; behind others it costs 0.2 to 0.3 us. off launches without it."
    ),
}
