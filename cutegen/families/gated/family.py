"""Gated activations as declared families: ``out = act(gate) * up``, and the gradients of gate and up.

Gate and up are two tensors, the halves of one, or take turns in the rows of one. Arithmetic is in fp32 and
every output is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutegen.families.declared import DeclaredFamily, DeclaredProblem, read, rounding_error, write
from cutegen.family import Baseline, Inputs, Option, Size, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["ACTIVATIONS", "GATED", "GATED_BACKWARD", "LAYOUTS"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
LAYOUTS = ("halves", "interleaved", "split")
_PACKED = "layout=halves,interleaved"
_SPLIT = "layout=split"

#: Error of an activation and its derivative in fp32, relative to the result: that of ex2.approx and
#: rcp.approx, of 2 units of 2**-23 each (PTX ISA), of the argument of the exponential, of at most 2**5, and
#: of the operations around them.
_RELATIVE = 2.0**-18
#: The same relative to the factors, for what cancels: 1 + erf, and the sum in a derivative. The inputs of the
#: check are normal: of 2**31 values none is expected above 6.5, so a product of three stays below 2**8.1.
_ABSOLUTE = 2.0**-22 * 6.5**3


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


def _apply(name: str, x: torch.Tensor) -> torch.Tensor:
    import torch

    if name == "silu":
        return torch.nn.functional.silu(x)
    if name == "relu":
        return torch.relu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def _slope(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the derivative of an activation."""
    import torch

    if name == "relu":
        return (x > 0).to(x.dtype)
    if name == "silu":
        s = torch.sigmoid(x)
        return s * (1 + x * (1 - s))
    if name == "gelu":
        density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * c * (1 + 3 * 0.044715 * x.square())


def _reference(
    x: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    activation: str,
    layout: str,
) -> dict[str, torch.Tensor]:
    gates, ups = _unpacked(x, gate, up, layout)
    return {"out": _apply(activation, gates) * ups}


def _reference_backward(
    dout: torch.Tensor,
    x: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    activation: str,
    layout: str,
) -> dict[str, torch.Tensor]:
    import torch

    gates, ups = _unpacked(x, gate, up, layout)
    dgate, dup = dout * ups * _slope(activation, gates), dout * _apply(activation, gates)
    if layout == "split":
        return {"dgate": dgate, "dup": dup}
    if layout == "halves":
        return {"dx": torch.cat([dgate, dup], -1)}
    return {"dx": torch.stack([dgate, dup], -1).flatten(-2)}


def _tolerance(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    allowed = rounding_error(str(problem.dtype), want)
    return allowed.add_(want.abs().mul_(_RELATIVE)).add_(_ABSOLUTE)


def _compiled(function: object) -> object:
    import torch

    # Shapes that another problem compiled must not make this one's symbolic.
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)  # type: ignore[call-overload]


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the expression in torch: eager, and compiled."""
    activation, layout = str(problem.activation), str(problem.layout)

    def gated(x: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor:
        gates, ups = _unpacked(x, gate, up, layout)
        return _apply(activation, gates) * ups

    def called(function: object) -> Baseline:
        def call(inputs: Inputs, outputs: Tensors) -> Tensors:
            given = inputs.tensors
            return {"out": function(given.get("x"), given.get("gate"), given.get("up"))}  # type: ignore[operator]

        return call

    return {"torch eager": called(gated), "torch.compile": called(_compiled(gated))}


def _baselines_backward(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the gradients written down in torch: eager by autograd's formulas, and compiled."""
    import torch

    activation, layout = str(problem.activation), str(problem.layout)

    def derived(dout: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        aten = torch.ops.aten
        if activation == "silu":
            return aten.silu_backward(dout, gates)  # type: ignore[no-any-return]
        if activation == "relu":
            return aten.threshold_backward(dout, gates, 0)  # type: ignore[no-any-return]
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return aten.gelu_backward(dout, gates, approximate=approximate)  # type: ignore[no-any-return]

    def gradients(
        dout: torch.Tensor,
        x: torch.Tensor | None,
        gate: torch.Tensor | None,
        up: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        gates, ups = _unpacked(x, gate, up, layout)
        dgate, dup = derived(dout * ups, gates), dout * _apply(activation, gates)
        if layout == "split":
            return {"dgate": dgate, "dup": dup}
        if layout == "halves":
            return {"dx": torch.cat([dgate, dup], -1)}
        return {"dx": torch.stack([dgate, dup], -1).flatten(-2)}

    def called(function: object) -> Baseline:
        def call(inputs: Inputs, outputs: Tensors) -> Tensors:
            given = inputs.tensors
            found: Tensors = function(  # type: ignore[operator]
                given["dout"], given.get("x"), given.get("gate"), given.get("up")
            )
            return found

        return call

    return {"torch eager": called(gradients), "torch.compile": called(_compiled(gradients))}


_KNOBS = {
    "threads": "Threads of a CTA. Few start and end sooner; many leave less to the scheduler of CTAs.",
    "vectors_per_thread": (
        "Accesses of up to 16 bytes that a thread makes to each tensor at a time. Several keep more loads in "
        "flight; one spreads few rows over more threads."
    ),
    "ctas_per_sm": (
        "CTAs for each multiprocessor that take one tile after another; 0 for a CTA to every tile. Saves "
        "their start, and loses the overlap of the start of one with the end of another, which costs more on "
        "an H200."
    ),
    "streamed": (
        "Mark loads and stores as not read again soon, so that they leave the caches first. May pay where "
        "something else in the cache is worth keeping; by itself it costs some percent on an H200."
    ),
    "pdl": (
        "Programmatic dependent launch: start up while the kernel before it in the stream ends, and let the "
        "kernel after it start up as soon as there is room (early). Pays for short kernels that follow one "
        "another; off launches without it."
    ),
}

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
    "act(gate) * up",
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
    tolerance=_tolerance,
    baselines=_baselines,
    knobs=_KNOBS,
    examples=_EXAMPLES,
)

GATED_BACKWARD = DeclaredFamily(
    "gated_backward",
    "gradients of act(gate) * up",
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
    tolerance=_tolerance,
    baselines=_baselines_backward,
    knobs=_KNOBS,
    examples=_EXAMPLES,
)
