"""Operands of a problem as torch tensors: memory order by layout, seeded values, NaN in the padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegen.dtypes import DTYPE_BYTES, TMA_ALIGN_BYTES, torch_dtype
from cutegen.errors import ProblemError
from cutegen.families.gemm import block_scaled as blockscaled
from cutegen.families.gemm.problem import BLOCK_SCALED, FACTOR_BLOCK, LAYOUTS, BlockScaling, Problem
from cutegen.family import Inputs

if TYPE_CHECKING:
    import torch

__all__ = ["ALPHA", "BETA", "SCALE_A", "SCALE_B", "Workload", "make_inputs", "times_factors"]

#: Factors for problems with alpha and beta: exact in every dtype, and neither 0 nor 1.
ALPHA, BETA = 1.25, -0.5
#: Other factors for awkward problems, so that a kernel in which one is compiled shows.
_AWKWARD_ALPHA, _AWKWARD_BETA = -0.75, 1.5
#: Factors of the operands, for problems with scales: far from 1, so that a missing one shows.
SCALE_A, SCALE_B = 0.75, 1.5


@dataclass(frozen=True)
class Workload:
    """Inputs of one launch.

    Attributes:
        problem: What they pose.
        a: ``(m, k)`` or ``(batch, m, k)``; ``k / 2`` bytes where two elements share one.
        b: ``(k, n)`` or ``(batch, k, n)``, likewise.
        c: Like the output, for problems with beta.
        bias: One value per column or per row, for problems with a bias.
        scales: Of A and of B: one fp32 value each, for problems with scales; all tiles of scale factors as
            they lie in memory, for block-scaled operands; factors of blocks, ``(m, k / 128)`` and
            ``(k / 128, n / 128)``, for operands that have them, their columns contiguous.
    """

    problem: Problem
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    bias: torch.Tensor | None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def fill(cls, problem: Problem, generator: torch.Generator, *, padded: bool = False) -> Workload:
        """Allocate operands, uniform in [-1, 1); packed ones hold every code, scale factors vary.

        Args:
            problem: What they pose.
            generator: Source of the values; its device is where they live.
            padded: Leave 16 bytes between rows of A and B and a row between batches, all filled with NaN (the
                largest numbers where there is none), so that a kernel that reads beyond the operand shows;
                fill up tiles of scale factors with large numbers, else with zeros.

        Raises:
            ProblemError: The problem has scale factors along k and others as well.
        """
        p = problem
        out = torch_dtype(p.out_dtype)
        scales = _scales(generator.device) if p.epilogue.scale else None
        if p.ab_dtype in BLOCK_SCALED:
            a, b, scales = _block_scaled(p, generator, padded=padded)
        else:
            axis_a, axis_b = LAYOUTS[p.layout]
            ab = torch_dtype(p.ab_dtype)
            pad = TMA_ALIGN_BYTES // DTYPE_BYTES[p.ab_dtype] if padded else 0
            a = _matrix(p, (p.m, p.k), axis_a == "m", ab, generator, pad)
            b = _matrix(p, (p.k, p.n), axis_b == "k", ab, generator, pad)
        c = bias = None
        if p.epilogue.beta:
            c = cls.new_output(p, generator.device)
            c.copy_(_values(tuple(c.shape), out, generator))
        if p.has_factors:
            of_a, of_b = p.factor_shapes
            # torch._scaled_mm takes those of A without gaps, those of B in columns of a multiple of 4.
            scales = (
                _factors(of_a, 1, generator, padded=padded),
                _factors(of_b, 4, generator, padded=padded),
            )
        if p.epilogue.bias:
            bias = _values((p.n if p.epilogue.bias == "n" else p.m,), out, generator)
        return cls(p, a, b, c, bias, scales)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B as the numbers that they stand for: themselves, or decoded to fp32 (with factors of
        blocks: to fp64)."""
        if self.problem.has_factors and self.scales is not None:
            return times_factors(self.a, self.scales[0]), times_factors(self.b, self.scales[1])
        scaling = BLOCK_SCALED.get(self.problem.ab_dtype)
        if scaling is None or self.scales is None:
            return self.a, self.b
        stored = (self.a, self.b.transpose(-1, -2))
        three = (x if x.dim() == 3 else x.unsqueeze(0) for x in stored)
        a, b = (blockscaled.decode(x, y, scaling) for x, y in zip(three, self.scales, strict=True))
        b = b.transpose(1, 2)
        return (a, b) if self.problem.batch > 1 else (a[0], b[0])

    @classmethod
    def of(cls, problem: Problem, inputs: Inputs) -> Workload:
        """Return the operands that are in ``inputs``."""
        tensors = inputs.tensors
        scales = (tensors["scale_a"], tensors["scale_b"]) if "scale_a" in tensors else None
        return cls(problem, tensors["a"], tensors["b"], tensors.get("c"), tensors.get("bias"), scales)

    @staticmethod
    def new_output(problem: Problem, device: torch.device) -> torch.Tensor:
        """Return an output tensor without values, at the pitch that the problem asks for."""
        import torch

        p = problem
        aligned = p.n * DTYPE_BYTES[p.out_dtype] % TMA_ALIGN_BYTES == 0
        pitch = p.n + 1 if p.unaligned_out and aligned else p.n
        rows = torch.empty((p.batch, p.m, pitch), dtype=torch_dtype(p.out_dtype), device=device)
        whole = rows[:, :, : p.n]
        return whole if p.batch > 1 else whole[0]


def make_inputs(problem: Problem, generator: torch.Generator, *, awkward: bool) -> Inputs:
    """Return the operands of ``problem`` by name; see :meth:`cutegen.family.Family.inputs`."""
    load = Workload.fill(problem, generator, padded=awkward)
    scales = load.scales or (None, None)
    given = {"a": load.a, "b": load.b, "c": load.c, "bias": load.bias}
    given |= dict(zip(("scale_a", "scale_b"), scales, strict=True))
    factors = (_AWKWARD_ALPHA, _AWKWARD_BETA) if awkward else (ALPHA, BETA)
    epilogue = problem.epilogue
    scalars = {name: x for name, x in zip(("alpha", "beta"), factors, strict=True) if getattr(epilogue, name)}
    return Inputs({name: tensor for name, tensor in given.items() if tensor is not None}, scalars)


def _matrix(
    problem: Problem,
    shape: tuple[int, int],
    along_rows: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
    pad: int,
) -> torch.Tensor:
    """Return a matrix (or a batch of them) that is contiguous along its rows' or its columns' index."""
    import torch

    outer, inner = reversed(shape) if along_rows else shape
    # Halves have the 10 bits of fraction that the MMA reads of an fp32 value.
    drawn = torch.float16 if problem.ab_dtype == "tf32" else dtype
    values = _values((problem.batch, outer, inner), drawn, generator, small=problem.out_dtype == "fp16")
    values = _surrounded(values.to(dtype), pad)
    values = values.transpose(1, 2) if along_rows else values
    return values if problem.batch > 1 else values[0]


def _surrounded(values: torch.Tensor, pad: int) -> torch.Tensor:
    """Return the values with ``pad`` poisoned elements behind each row and such a row behind each batch."""
    import torch

    if not pad:
        return values
    poison = math.nan if values.is_floating_point() else 127  # as bytes of e2m1: -6 and 6
    batch, outer, inner = values.shape
    whole = torch.full((batch, outer + 1, inner + pad), poison, dtype=values.dtype, device=values.device)
    whole[:, :outer, :inner].copy_(values)
    return whole[:, :outer, :inner]


def _block_scaled(
    p: Problem, generator: torch.Generator, *, padded: bool
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return A, B and their scale factors."""
    if p.epilogue.scale:
        raise ProblemError(f"{p} has scale factors along k already; one for each operand goes into alpha")
    scaling = BLOCK_SCALED[p.ab_dtype]
    pad = TMA_ALIGN_BYTES if padded else 0  # an element of what is stored is a byte
    a, b = (
        _surrounded(blockscaled.draw((p.batch, rows, p.k), scaling, generator), pad) for rows in (p.m, p.n)
    )
    b = b.transpose(1, 2)
    scales = tuple(_tiles(p, rows, scaling, generator, padded=padded) for rows in (p.m, p.n))
    return (a, b, (scales[0], scales[1])) if p.batch > 1 else (a[0], b[0], (scales[0], scales[1]))


def _factors(shape: tuple[int, int], step: int, generator: torch.Generator, *, padded: bool) -> torch.Tensor:
    """Return fp32 factors between 1/2 and 2 in contiguous columns, which start at multiples of ``step``.

    If padded, they start 3 elements later than that, behind NaN.
    """
    import torch

    rows, columns = shape
    pitch = -(-rows // step) * step + (3 if padded else 0)
    whole = torch.full((columns, pitch), math.nan if padded else 0.0, device=generator.device)
    whole[:, :rows].uniform_(0.5, 2.0, generator=generator)
    return whole[:, :rows].t()


def times_factors(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the elements of an operand times the factors of their blocks, in fp64."""
    for dim, size in enumerate(x.shape):
        if factors.shape[dim] != size:
            factors = factors.repeat_interleave(FACTOR_BLOCK, dim).narrow(dim, 0, size)
    return x.double() * factors


def _tiles(
    p: Problem, rows: int, scaling: BlockScaling, generator: torch.Generator, *, padded: bool
) -> torch.Tensor:
    """Return the scale factors of an operand as they lie in memory."""
    import torch

    drawn = blockscaled.draw_scales((p.batch, rows, p.k // scaling.block), scaling, generator)
    laid = blockscaled.lay_out(drawn, blockscaled.padding(scaling.scale, poisoned=padded))
    return laid.view(torch.float8_e8m0fnu if scaling.scale == "e8m0" else torch.float8_e4m3fn)


def _values(
    size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, *, small: bool = False
) -> torch.Tensor:
    """Return uniform values; ``small`` keeps sums of 8-bit integers within the range of fp16."""
    import torch

    device = generator.device
    if not dtype.is_floating_point:
        top = 1000 if dtype == torch.int32 else 4 if small else 127
        return torch.randint(-top, top + 1, size, dtype=dtype, device=device, generator=generator)
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    return torch.empty(size, dtype=wide, device=device).uniform_(-1, 1, generator=generator).to(dtype)


def _scales(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.tensor([SCALE_A], device=device), torch.tensor([SCALE_B], device=device)
