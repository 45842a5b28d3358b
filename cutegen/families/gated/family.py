"""Gated activations as declared families: ``out = act(gate) * up``, and the gradients of gate and up.

Gate and up are two tensors, the halves of one, or take turns in the rows of one. Arithmetic is in fp32 and
every output is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, write
from cutegen.families.pointwise import (
    KNOBS,
    activated,
    allowed_error,
    chain_rule,
    eager_and_compiled,
    slope,
)
from cutegen.family import Baseline, Option, Size, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["ACTIVATIONS", "GATED", "GATED_BACKWARD", "LAYOUTS"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
LAYOUTS = ("halves", "interleaved", "split")
_PACKED = "layout=halves,interleaved"
_SPLIT = "layout=split"


def _unpacked(
    x: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up, whichever way they are given."""
    if x is None:
        assert gate is not None and up is not None
        return gate, up
    if layout == "interleaved":
        return x[..., ::2], x[..., 1::2]
    low, high = x.chunk(2, -1)
    return low, high


def _packed(dgate: torch.Tensor, dup: torch.Tensor, layout: str) -> dict[str, torch.Tensor]:
    """Return the gradients as outputs, in the layout of what they are of."""
    import torch

    if layout == "split":
        return {"dgate": dgate, "dup": dup}
    if layout == "halves":
        return {"dx": torch.cat([dgate, dup], -1)}
    return {"dx": torch.stack([dgate, dup], -1).flatten(-2)}


def _reference(
    x: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    activation: str,
    layout: str,
) -> dict[str, torch.Tensor]:
    gates, ups = _unpacked(x, gate, up, layout)
    return {"out": activated(activation, gates) * ups}


def _reference_backward(
    dout: torch.Tensor,
    x: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    activation: str,
    layout: str,
) -> dict[str, torch.Tensor]:
    gates, ups = _unpacked(x, gate, up, layout)
    dgate, dup = dout * ups * slope(activation, gates), dout * activated(activation, gates)
    return _packed(dgate, dup, layout)


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the expression in torch: eager, and compiled."""
    activation, layout = str(problem.activation), str(problem.layout)

    def gated(x: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None) -> Tensors:
        gates, ups = _unpacked(x, gate, up, layout)
        return {"out": activated(activation, gates) * ups}

    return eager_and_compiled(gated, "x", "gate", "up")


def _baselines_backward(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the gradients written down in torch: eager by autograd's formulas, and compiled."""
    activation, layout = str(problem.activation), str(problem.layout)

    def gradients(
        dout: torch.Tensor,
        x: torch.Tensor | None,
        gate: torch.Tensor | None,
        up: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        gates, ups = _unpacked(x, gate, up, layout)
        dgate, dup = chain_rule(activation, dout * ups, gates), dout * activated(activation, gates)
        return _packed(dgate, dup, layout)

    return eager_and_compiled(gradients, "dout", "x", "gate", "up")


_SIZES = (Size("m", "rows"), Size("n", "elements of a row of the output", free=False))
_OPTIONS = (
    Option("dtype", "of all tensors", ("bf16", "fp16", "fp32"), "bf16"),
    Option("activation", "of the gate", ACTIVATIONS, "silu"),
    Option("layout", "gate and up side by side, by turns, or in two tensors", LAYOUTS, "halves"),
)
_EXAMPLES = (
    "8192x14336 bf16",
    "8192x14336 bf16 layout=split",
    "4096x2880 bf16 layout=interleaved",
    "2048x9216 fp16 activation=gelu_tanh",
    "333x4096 fp32 activation=gelu layout=split",
    "64x14336 bf16",
    "1x14336 bf16",
    "77x1001 bf16 activation=relu",
    "1000x4099 fp16 layout=interleaved",
)

GATED = DeclaredFamily(
    "gated",
    "gated activation of each element, act(gate) * up",
    sizes=_SIZES,
    options=_OPTIONS,
    arguments=(
        read("x", "dtype", ("m", "2n"), when=_PACKED),
        read("gate", "dtype", ("m", "n"), when=_SPLIT),
        read("up", "dtype", ("m", "n"), when=_SPLIT),
        write("out", "dtype", ("m", "n"), may_alias=("gate", "up")),
    ),
    reference=_reference,
    rows="m",
    tolerance=allowed_error,
    baselines=_baselines,
    knobs=KNOBS,
    examples=_EXAMPLES,
)

GATED_BACKWARD = DeclaredFamily(
    "gated_backward",
    "gradients of gated activations, act(gate) * up",
    sizes=_SIZES,
    options=_OPTIONS,
    arguments=(
        read("dout", "dtype", ("m", "n")),
        read("x", "dtype", ("m", "2n"), when=_PACKED),
        read("gate", "dtype", ("m", "n"), when=_SPLIT),
        read("up", "dtype", ("m", "n"), when=_SPLIT),
        write("dx", "dtype", ("m", "2n"), when=_PACKED, may_alias=("x",)),
        write("dgate", "dtype", ("m", "n"), when=_SPLIT, may_alias=("gate",)),
        write("dup", "dtype", ("m", "n"), when=_SPLIT, may_alias=("up",)),
    ),
    reference=_reference_backward,
    rows="m",
    tolerance=allowed_error,
    baselines=_baselines_backward,
    knobs=KNOBS,
    examples=_EXAMPLES,
)
