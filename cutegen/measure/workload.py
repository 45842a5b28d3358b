"""Operands of a problem as torch tensors: memory order by layout, seeded values, NaN in the padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegen.check import require_reference
from cutegen.problem import DTYPE_BYTES, LAYOUTS, TMA_ALIGN_BYTES, TORCH_DTYPES, Problem
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["ALPHA", "BETA", "SCALE_A", "SCALE_B", "Workload", "torch_dtype"]

#: Factors for problems with alpha and beta: exact in every dtype, and neither 0 nor 1.
ALPHA, BETA = 1.25, -0.5
#: Factors of the operands, for problems with scales: far from 1, so that a missing one shows.
SCALE_A, SCALE_B = 0.75, 1.5


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of cutegen's short name."""
    import torch

    dtype: torch.dtype = getattr(torch, "float32" if name == "tf32" else TORCH_DTYPES[name])
    return dtype


@dataclass(frozen=True)
class Workload:
    """Inputs of one launch.

    Attributes:
        problem: What they pose.
        a: ``(m, k)`` or ``(batch, m, k)``.
        b: ``(k, n)`` or ``(batch, k, n)``.
        c: Like the output, for problems with beta.
        bias: One value per column or per row, for problems with a bias.
        scales: Of A and of B, one fp32 value each, for problems with scales.
    """

    problem: Problem
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    bias: torch.Tensor | None
    scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def fill(cls, problem: Problem, generator: torch.Generator, *, padded: bool = False) -> Workload:
        """Allocate operands, uniform in [-1, 1).

        Args:
            problem: What they pose.
            generator: Source of the values; its device is where they live.
            padded: Leave 16 bytes between rows of A and B and a row between batches, all filled with NaN, so
                that a kernel that reads beyond the operand shows.

        Raises:
            ProblemError: There is no reference for such operands.
        """
        require_reference(problem)
        p = problem
        axis_a, axis_b = LAYOUTS[p.layout]
        ab, out = torch_dtype(p.ab_dtype), torch_dtype(p.out_dtype)
        pad = TMA_ALIGN_BYTES // DTYPE_BYTES[p.ab_dtype] if padded else 0
        a = _matrix(p, (p.m, p.k), axis_a == "m", ab, generator, pad)
        b = _matrix(p, (p.k, p.n), axis_b == "k", ab, generator, pad)
        c = bias = None
        if p.epilogue.beta:
            c = cls.new_output(p, generator.device)
            c.copy_(_values(tuple(c.shape), out, generator))
        if p.epilogue.bias:
            bias = _values((p.n if p.epilogue.bias == "n" else p.m,), out, generator)
        return cls(p, a, b, c, bias, _scales(generator.device) if p.epilogue.scale else None)

    @property
    def factors(self) -> tuple[float, float]:
        """What the product and C are multiplied by."""
        epilogue = self.problem.epilogue
        scale = SCALE_A * SCALE_B if epilogue.scale else 1.0
        return scale * (ALPHA if epilogue.alpha else 1.0), BETA if epilogue.beta else 0.0

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

    def arguments(self, d: torch.Tensor, launch: Launch, workspace: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the arguments of a kernel, in the order of its calling convention."""
        epilogue = self.problem.epilogue
        scales = self.scales or (None, None)
        tensors = [x for x in (self.c, self.bias, *scales, workspace) if x is not None]
        factors = [*([ALPHA] if epilogue.alpha else []), *([BETA] if epilogue.beta else [])]
        return (self.a, self.b, d, *tensors, *launch.scalars, *factors)


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
    values = values.to(dtype)
    if pad:
        poison = math.nan if dtype.is_floating_point else 127
        size = (problem.batch, outer + 1, inner + pad)
        whole = torch.full(size, poison, dtype=dtype, device=generator.device)
        whole[:, :outer, :inner].copy_(values)
        values = whole[:, :outer, :inner]
    values = values.transpose(1, 2) if along_rows else values
    return values if problem.batch > 1 else values[0]


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
