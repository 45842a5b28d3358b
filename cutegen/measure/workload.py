"""Operands of a problem as torch tensors: memory order by layout, seeded values, NaN in the padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegen.problem import DTYPE_BYTES, LAYOUTS, TMA_ALIGN_BYTES, Problem
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["ALPHA", "BETA", "Workload", "torch_dtype"]

#: Factors for problems with alpha and beta: exact in every dtype, and neither 0 nor 1.
ALPHA, BETA = 1.25, -0.5


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of cutegen's short name."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


@dataclass(frozen=True)
class Workload:
    """Inputs of one launch.

    Attributes:
        problem: What they pose.
        a: ``(m, k)`` or ``(batch, m, k)``.
        b: ``(k, n)`` or ``(batch, k, n)``.
        c: Like the output, for problems with beta.
        bias: One value per column or per row, for problems with a bias.
    """

    problem: Problem
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def fill(cls, problem: Problem, generator: torch.Generator, *, padded: bool = False) -> Workload:
        """Allocate operands, uniform in [-1, 1).

        Args:
            problem: What they pose.
            generator: Source of the values; its device is where they live.
            padded: Leave 16 bytes between rows of A and B and a row between batches, all filled with NaN, so
                that a kernel that reads beyond the operand shows.
        """
        p = problem
        axis_a, axis_b = LAYOUTS[p.layout]
        ab, out = torch_dtype(p.ab_dtype), torch_dtype(p.out_dtype)
        pad = TMA_ALIGN_BYTES // DTYPE_BYTES[p.ab_dtype] if padded else 0
        a = _matrix(p, (p.m, p.k), axis_a == "m", ab, generator, pad)
        b = _matrix(p, (p.k, p.n), axis_b == "k", ab, generator, pad)
        c = bias = None
        if p.epilogue.beta:
            c = cls.new_output(p, generator.device).uniform_(-1, 1, generator=generator)
        if p.epilogue.bias:
            bias = _values((p.n if p.epilogue.bias == "n" else p.m,), out, generator)
        return cls(p, a, b, c, bias)

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
        tensors = [x for x in (self.c, self.bias, workspace) if x is not None]
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
    size = (problem.batch, outer + (1 if pad else 0), inner + pad)
    whole = torch.full(size, math.nan, dtype=dtype, device=generator.device) if pad else None
    if whole is None:
        values = _values((problem.batch, outer, inner), dtype, generator)
    else:
        values = whole[:, :outer, :inner]
        values.copy_(_values((problem.batch, outer, inner), dtype, generator))
    values = values.transpose(1, 2) if along_rows else values
    return values if problem.batch > 1 else values[0]


def _values(size: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    import torch

    return torch.empty(size, dtype=dtype, device=generator.device).uniform_(-1, 1, generator=generator)
