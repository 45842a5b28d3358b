"""What computes a GEMM while its kernel is being compiled: PyTorch, as exact as the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutegen.families.gemm.problem import BLOCK_SCALED, FACTOR_BLOCK, Problem
from cutegen.family import Inputs, StandIn, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["activation", "exact_product", "factored_product", "make_stand_in"]

Activation = Callable[["torch.Tensor"], "torch.Tensor"]


def make_stand_in(problem: Problem, *, plain: bool) -> StandIn | None:
    """Return what computes ``problem``; None if torch has no dtype for its operands.

    The GEMM is in fp32 (in fp64 for int8, whose accumulators fp32 does not hold), and so is what is fused
    behind it; the result is rounded once.

    Args:
        problem: What to compute.
        plain: Torch's own calls, in the dtype of the result, are good enough.
    """
    import torch

    if problem.ab_dtype in BLOCK_SCALED or problem.ab_dtype == "tf32":
        return None
    batched = problem.batch > 1
    product: Callable[..., Any] = torch.bmm if batched else torch.mm
    epilogue = problem.epilogue

    def library_calls(inputs: Inputs, outputs: Tensors) -> None:
        given, scalars, out = inputs.tensors, inputs.scalars, outputs["out"]
        extra = given["c"] if epilogue.beta else given["bias"] if epilogue.bias else None
        if extra is None and not epilogue.alpha:
            product(given["a"], given["b"], out=out)
        else:
            fused: Callable[..., Any] = torch.baddbmm if batched else torch.addmm
            beta, alpha = (scalars.get(name, 1.0) for name in ("beta", "alpha"))
            addend, beta = (out, 0.0) if extra is None else (extra, beta)
            fused(addend, given["a"], given["b"], beta=beta, alpha=alpha, out=out)
        _activate(epilogue.activation, out)

    def compute(inputs: Inputs, outputs: Tensors) -> None:
        given, scalars, out = inputs.tensors, inputs.scalars, outputs["out"]
        if problem.has_factors:
            value = factored_product(given["a"], given["b"], given["scale_a"], given["scale_b"])
        else:
            value = exact_product(given["a"], given["b"], batched=batched)
        if epilogue.scale:
            value *= given["scale_a"] * given["scale_b"]
        if epilogue.alpha:
            value *= scalars["alpha"]
        if epilogue.beta:
            value += scalars["beta"] * given["c"].float()
        if epilogue.bias:
            bias = given["bias"].float()
            value += bias[:, None] if epilogue.bias == "m" else bias
        out.copy_(activation(epilogue.activation)(value))

    return library_calls if plain else compute


def _activate(name: str, out: torch.Tensor) -> None:
    """Apply the function called ``name`` in place, as a program without cutegen would."""
    import torch

    if name == "relu":
        out.relu_()
    elif name == "silu":
        torch.nn.functional.silu(out, inplace=True)
    elif name:
        out.copy_(activation(name)(out))


def activation(name: str) -> Activation:
    """Return the function called ``name``; the empty name changes nothing."""
    import torch

    functions: dict[str, Activation] = {
        "": lambda x: x,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    return functions[name]


def factored_product(a: Any, b: Any, scale_a: Any, scale_b: Any) -> torch.Tensor:
    """Return the GEMM of operands whose blocks have factors, block of k by block of k, in fp32."""
    import torch

    value = torch.zeros((a.shape[0], b.shape[1]), device=a.device)
    columns = scale_b.repeat_interleave(FACTOR_BLOCK, 1)[:, : b.shape[1]]
    for at in range(scale_a.shape[1]):
        terms = slice(at * FACTOR_BLOCK, (at + 1) * FACTOR_BLOCK)
        value.addcmul_(
            exact_product(a[:, terms], b[terms], batched=False), scale_a[:, at, None] * columns[at]
        )
    return value


def exact_product(a: Any, b: Any, *, batched: bool) -> torch.Tensor:
    """Return the GEMM accumulated in fp32, in fp64 for integers."""
    import torch

    multiply: Any = torch.bmm if batched else torch.mm
    if a.dtype == torch.int8:
        found: torch.Tensor = multiply(a.double(), b.double())
        return found
    if a.dtype.itemsize == 1:
        a, b = a.bfloat16(), b.bfloat16()  # which holds every value of 8 bits
    # torch before 2.8 lacks it, and has it for CUDA only.
    mixed = getattr(torch.ops.aten.bmm if batched else torch.ops.aten.mm, "dtype", None)
    wide: torch.Tensor
    wide = mixed(a, b, torch.float32) if a.is_cuda and mixed is not None else multiply(a.float(), b.float())
    return wide
