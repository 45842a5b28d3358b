"""What kernels of a declared family are checked against, and the errors that they are allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cutegen.errors import FamilyError
from cutegen.families.declared.problem import DeclaredProblem
from cutegen.family import Chunk, Inputs

if TYPE_CHECKING:
    import torch

    from cutegen.families.declared.family import DeclaredFamily

__all__ = ["DeclaredReference", "as_numbers", "default_tolerance", "in_fp64", "rounding_error"]

#: Half a unit in the last place, and half of the smallest subnormal number, of the output types.
#: Source: IEEE 754 binary16, 32 and 64; bfloat16; OCP FP8 for e4m3 and e5m2.
_ROUNDING = {
    "bf16": (2.0**-8, 2.0**-134),
    "fp16": (2.0**-11, 2.0**-25),
    "fp32": (2.0**-24, 2.0**-150),
    "fp64": (2.0**-53, 2.0**-1075),
    "e4m3": (2.0**-4, 2.0**-10),
    "e5m2": (2.0**-3, 2.0**-17),
}


class DeclaredReference:
    """A declared reference on some inputs; every element of every output is compared."""

    def __init__(self, family: DeclaredFamily, problem: DeclaredProblem, inputs: Inputs) -> None:
        self._family = family
        self._problem = problem
        self._inputs = inputs

    def compared(self, output: str) -> float:
        """Return 1: everything is compared."""
        return 1.0

    def chunks(self, output: str, got: torch.Tensor) -> Iterator[Chunk]:
        """Yield some rows of an output beside what they should be."""
        count, step = self._family.rows_of(self._problem, output)
        whole = count == 1 and step == 1
        for low in range(0, count, step):
            high = min(low + step, count)
            found = self._family.wanted(self._problem, self._inputs, low, high)
            want, terms = found[output], found.get(f"{output} terms")
            part = got if whole else got[low:high]
            allowed = self._family.allowed(self._problem, output, want)
            if terms is not None:
                allowed = allowed + terms * _sum_units(self._problem)
            if f"{output} error" in found:
                allowed = allowed + found[f"{output} error"]
            yield Chunk(part.double(), want, allowed, _shifted(low))


def in_fp64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an input as references take it, and may change it: numbers in fp64, but a mask is
    applied, so it stays one."""
    import torch

    return tensor.to(torch.bool if tensor.dtype == torch.bool else torch.float64, copy=True)


def as_numbers(found: torch.Tensor) -> torch.Tensor:
    """Return what a reference gives as numbers in fp64, which are compared: 0 and 1 for truth values."""
    return found.double()


def _shifted(low: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda index: (index[0] + low, *index[1:])


def rounding_error(dtype: str, want: torch.Tensor) -> torch.Tensor:
    """Return what rounding ``want`` to ``dtype`` may cost: half a unit in the last place of each element.

    Integers and truth values must be exact.

    Raises:
        FamilyError: Nothing is known about the dtype.
    """
    if _is_exact(dtype):
        return want.new_full(want.shape, 0.25)
    if dtype not in _ROUNDING:
        raise FamilyError(f"no tolerance is known for outputs of {dtype}; give the family one of its own")
    relative, least = _ROUNDING[dtype]
    return want.abs().mul_(relative).add_(least)


def _is_exact(dtype: str) -> bool:
    return "int" in dtype or dtype == "bool"


def default_tolerance(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    """Rounding, and the error of a sum in fp32 along the longest dimension that is read."""
    arguments = {a.name: a for a in problem.declared.arguments(problem)}
    dtype = arguments[output].dtype
    if _is_exact(dtype):
        return rounding_error(dtype, want)
    return rounding_error(dtype, want).add_(want.abs().mul_(_sum_units(problem)))


def _sum_units(problem: DeclaredProblem) -> float:
    """Return the relative error of a sum in fp32 along the longest dimension.

    A tree of partial sums errs by log2 of the terms; 8 more units of 2**-24 are left for what follows.
    """
    shapes = [a.shape for a in problem.declared.arguments(problem) if a.shape]
    return (math.log2(max((shape[-1] for shape in shapes), default=1)) + 8) * 2.0**-24
