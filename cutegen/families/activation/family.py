"""Activations as declared families: ``out = act(x)``, and the gradient of ``x``.

Arithmetic is in fp32 and every output is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, write
from cutegen.families.pointwise import (
    ACTIVATIONS,
    KNOBS,
    activated,
    allowed_error,
    chain_rule,
    eager_and_compiled,
    slope,
)
from cutegen.family import Baseline, Option, Size

if TYPE_CHECKING:
    import torch

__all__ = ["ACTIVATION", "ACTIVATION_BACKWARD"]


def _reference(x: torch.Tensor, activation: str) -> dict[str, torch.Tensor]:
    return {"out": activated(activation, x)}


def _reference_backward(dout: torch.Tensor, x: torch.Tensor, activation: str) -> dict[str, torch.Tensor]:
    return {"dx": dout * slope(activation, x)}


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return torch's own functions: eager, and compiled."""
    name = str(problem.activation)
    return eager_and_compiled(lambda x: {"out": activated(name, x)}, "x")


def _baselines_backward(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the operators of torch's autograd: eager, and compiled."""
    name = str(problem.activation)
    return eager_and_compiled(lambda dout, x: {"dx": chain_rule(name, dout, x)}, "dout", "x")


_SIZES = (Size("m", "rows"), Size("n", "elements of a row", free=False))
_OPTIONS = (
    Option("dtype", "of all tensors", ("bf16", "fp16", "fp32"), "bf16"),
    Option("activation", "of each element", ACTIVATIONS, "gelu"),
)
_EXAMPLES = (
    "8192x16384 bf16",
    "8192x14336 bf16 activation=silu",
    "2048x9216 fp16 activation=gelu_tanh",
    "333x4096 fp32",
    "1000x4099 fp16 activation=relu_squared",
    "64x14336 bf16 activation=relu",
    "1x14336 bf16",
)

ACTIVATION = DeclaredFamily(
    "activation",
    "activation of each element, act(x)",
    sizes=_SIZES,
    options=_OPTIONS,
    arguments=(
        read("x", "dtype", ("m", "n")),
        write("out", "dtype", ("m", "n"), may_alias=("x",)),
    ),
    reference=_reference,
    rows="m",
    tolerance=allowed_error,
    baselines=_baselines,
    knobs=KNOBS,
    examples=_EXAMPLES,
)

ACTIVATION_BACKWARD = DeclaredFamily(
    "activation_backward",
    "gradient of activations, act(x)",
    sizes=_SIZES,
    options=_OPTIONS,
    arguments=(
        read("dout", "dtype", ("m", "n")),
        read("x", "dtype", ("m", "n")),
        write("dx", "dtype", ("m", "n"), may_alias=("dout", "x")),
    ),
    reference=_reference_backward,
    rows="m",
    tolerance=allowed_error,
    baselines=_baselines_backward,
    knobs=KNOBS,
    examples=_EXAMPLES,
)
