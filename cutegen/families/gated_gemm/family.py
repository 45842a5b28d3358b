"""Gated GEMMs as a declared family: ``out = act(x @ w_gate.T) * (x @ w_up.T)`` in one kernel.

The rows of both weights are in one ``w``: the gate's above the other's, or interleaved. Accumulation and the
epilogue are in fp32, the result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cutegen.arch import Arch
from cutegen.dtypes import TMA_ALIGN_BYTES
from cutegen.errors import ProblemError
from cutegen.families.compiled import compile_for_one_problem
from cutegen.families.declared import (
    DeclaredFamily,
    DeclaredProblem,
    integers,
    read,
    rounding_error,
    scratch,
    write,
)
from cutegen.families.gated.family import ACTIVATIONS, LAYOUTS
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.families.gated_gemm.strategy import GatedGemmStrategy
from cutegen.families.gemm.family import FEW_ROWS, GEMM
from cutegen.families.gemm.knobs import KNOBS
from cutegen.families.gemm.problem import mended
from cutegen.families.gemm.tail_shapes import tail_problems
from cutegen.family import Baseline, Inputs, Option, Size, StandIn, Tensors
from cutegen.strategy import Strategy

if TYPE_CHECKING:
    import torch

__all__ = ["GATED_GEMM", "HALF_IS_GATES", "WEIGHT_LAYOUTS", "GatedGemm"]

#: How the rows of the two weights lie in one tensor.
WEIGHT_LAYOUTS = LAYOUTS[:2]


def _parted(both: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of gates, and those that they gate."""
    if layout == "interleaved":
        return both[:, ::2], both[:, 1::2]
    low, high = both.chunk(2, -1)
    return low, high


def _whole(w: torch.Tensor | None, gate: torch.Tensor | None, up: torch.Tensor | None) -> torch.Tensor:
    """Return all rows of the weights in one tensor: the gate's, where they are apart, above the others."""
    import torch

    return torch.cat([t for t in (gate, up) if t is not None]) if w is None else w


def _weights(inputs: Inputs) -> torch.Tensor:
    return _whole(*(inputs.tensors.get(name) for name in ("w", "gate", "up")))


def _reference(
    x: torch.Tensor,
    w: torch.Tensor | None,
    gate: torch.Tensor | None,
    up: torch.Tensor | None,
    activation: str,
    layout: str,
) -> dict[str, torch.Tensor]:
    """Return outputs in fp64, and how far fp32 accumulation and evaluating the activation may move them."""
    from cutegen.families.gemm.reference import EVALUATION, SLOPE, sum_error
    from cutegen.families.gemm.stand_in import activation as function_of

    w = _whole(w, gate, up)
    both = x @ w.T
    off = x.norm(dim=1)[:, None] * w.norm(dim=1) * sum_error(x.shape[1])
    (gates, ups), (gate_off, up_off) = _parted(both, layout), _parted(off, layout)
    activated, slope = function_of(activation)(gates), SLOPE[activation]
    gate_off = slope * gate_off + EVALUATION[activation] * gates.abs()
    moved = gate_off * (ups.abs() + up_off) + activated.abs() * up_off
    return {"out": activated * ups, "out error": moved, "pre": both, "pre error": off}


def _scale(problem: DeclaredProblem, tensors: Mapping[str, torch.Tensor], awkward: bool) -> None:
    """Make gates of about 1, where activations bend; by a power of two, which is exact."""
    for name in tensors.keys() & {"w", "gate", "up"}:
        tensors[name].mul_(2.0 ** -round(math.log2(problem.k) / 2))


def _tolerance(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    return rounding_error(str(problem.dtype), want)


def _baselines(problem: DeclaredProblem) -> Mapping[str, Baseline]:
    """Return the GEMM with a compiled gate behind it, and both compiled together."""
    import torch

    from cutegen.families.gemm.stand_in import activation as function_of

    act, layout = function_of(str(problem.activation)), str(problem.layout)

    def gated(products: Sequence[torch.Tensor]) -> torch.Tensor:
        gate, up = _parted(products[0], layout) if len(products) == 1 else products
        return act(gate) * up

    def whole(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        products = [x @ w.T for w in weights]
        return gated(products), torch.cat(products, -1) if problem.pre else None

    def weights(inputs: Inputs) -> list[torch.Tensor]:
        return [inputs.tensors[name] for name in ("w", "gate", "up") if name in inputs.tensors]

    gate_compiled, whole_compiled = compile_for_one_problem(gated), compile_for_one_problem(whole)

    def in_two(inputs: Inputs, outputs: Tensors) -> Tensors:
        x, given, both = inputs.tensors["x"], weights(inputs), outputs.get("pre")
        if problem.pre and both is None:
            both = x.new_empty((len(x), 2 * problem.n))
        rooms = [None] * len(given) if both is None else both.chunk(len(given), -1)
        products = [torch.mm(x, w.T, out=room) for w, room in zip(given, rooms, strict=True)]
        out = gate_compiled(products)
        return {"out": out} if both is None else {"out": out, "pre": both}

    def in_one(inputs: Inputs, outputs: Tensors) -> Tensors:
        out, both = whole_compiled(inputs.tensors["x"], *weights(inputs))
        return {"out": out, "pre": both} if problem.pre else {"out": out}

    return {"torch.mm, torch.compile": in_two, "torch.compile": in_one}


_NAMES = (
    "tile_shape_mn tile_k cluster_shape_mn mma_warpgroups pingpong swap_ab use_tma_store use_pdl stream_k "
    "split_k swizzle_size raster_along_m algorithm rows_per_cta threads_per_cta columns_per_warp "
    "warps_along_k unroll cluster_k"
)
_KNOBS = {knob: KNOBS[knob] for knob in _NAMES.split()}
#: What the knob ``tile_shape_mn`` of gated GEMMs means beside what it means of others.
HALF_IS_GATES = " Half of its columns, of its rows with swap_ab, are gates; the output has half as many."
_KNOBS["tile_shape_mn"] += HALF_IS_GATES
_KNOBS["columns_per_warp"] += " Half of them are gates; the output has half as many."


class GatedGemm(DeclaredFamily):
    """The declared family, with the GEMM's tails, limits and performance model."""

    metric = "TFLOP/s"
    algorithms = (FEW_ROWS,)

    def problem(self, sizes: Mapping[str, int], options: Mapping[str, str | bool]) -> DeclaredProblem:
        """Return the problem of sizes and options by name; raises :class:`ProblemError`."""
        problem, step = super().problem(sizes, options), TMA_ALIGN_BYTES // 2
        if problem.k % step:
            raise ProblemError(
                f"k={problem.k} must be a multiple of {step}, for rows of x and w start at multiples of "
                f"{TMA_ALIGN_BYTES} bytes; {mended('k', problem.k, step)}"
            )
        plain_gemm(problem)  # refuses sizes that a GEMM does not take
        return problem

    def tails(self, problem: DeclaredProblem) -> Sequence[DeclaredProblem]:
        """Return sizes that leave remainders for every tile."""
        like = tail_problems(replace(plain_gemm(problem), n=problem.n))
        found = (problem.with_sizes(m=tail.m, n=tail.n, k=tail.k) for tail in like)
        return [tail for tail in found if tail.signature == problem.signature]

    def stand_in(self, problem: DeclaredProblem) -> StandIn:
        """Return torch's GEMM and the rest in fp32, rounded once."""
        from cutegen.families.gemm.stand_in import activation as function_of
        from cutegen.families.gemm.stand_in import exact_product

        act, layout = function_of(str(problem.activation)), str(problem.layout)

        def compute(inputs: Inputs, outputs: Tensors) -> None:
            both = exact_product(inputs.tensors["x"], _weights(inputs).T, batched=False)
            gate, up = _parted(both, layout)
            outputs["out"].copy_(act(gate) * up)
            if "pre" in outputs:
                outputs["pre"].copy_(both)

        return compute

    def strategy(self, arch: Arch, algorithm: str = "") -> Strategy | None:
        """Return the GEMM's performance model, if it is known for ``arch``."""
        return GatedGemmStrategy.of(arch, algorithm)

    def is_fitted(self, problem: DeclaredProblem, arch: Arch) -> bool:
        """Return whether a recorded sweep says how fast such GEMMs are."""
        return GEMM.is_fitted(plain_gemm(problem), arch)

    def files(self) -> Sequence[Path]:
        """Return what the GEMM's candidates depend on, for ours are chosen as they are."""
        return GEMM.files()


GATED_GEMM = GatedGemm(
    "gated_gemm",
    "act(x @ w_gate.T) * (x @ w_up.T)",
    sizes=(Size("m", "rows of x"), Size("n", "columns of out"), Size("k", "columns of x and w")),
    options=(
        Option("dtype", "of all tensors", ("bf16", "fp16"), "bf16"),
        Option("activation", "of the gate", ACTIVATIONS, "silu"),
        Option(
            "layout", "the gate's rows of w above the others, by turns, or of two tensors", LAYOUTS, "halves"
        ),
        Option("pre", "also write x @ w.T"),
    ),
    arguments=(
        read("x", "dtype", ("m", "k"), aligned=True),
        read("w", "dtype", ("2n", "k"), when=f"layout={','.join(WEIGHT_LAYOUTS)}", aligned=True),
        read("gate", "dtype", ("n", "k"), when="layout=split", aligned=True),
        read("up", "dtype", ("n", "k"), when="layout=split", aligned=True),
        write("out", "dtype", ("m", "n")),
        write("pre", "dtype", ("m", "2n"), when="pre"),
        scratch(),
        integers(),
    ),
    reference=_reference,
    rows="m",
    tolerance=_tolerance,
    adjust=_scale,
    baselines=_baselines,
    flops=lambda problem: 4 * problem.m * problem.n * problem.k,
    knobs=_KNOBS,
    examples=(
        "8192x14336x4096 bf16",
        "1024x28672x8192 bf16 layout=interleaved",
        "2048x9216x2304 fp16 activation=gelu_tanh pre",
        "16x14336x4096 bf16",
        "1x8192x16384 bf16",
        "333x1001x1024 bf16 activation=relu",
        "1024x14336x4096 bf16 layout=split",
        "256x128x65536 bf16 layout=interleaved pre",
    ),
)
