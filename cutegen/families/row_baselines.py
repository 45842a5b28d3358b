"""What PyTorch offers for a family of kernels over rows: one expression, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cutegen.families.compiled import compile_for_one_problem
from cutegen.family import Baseline, Inputs, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["eager_and_compiled"]

#: Tensors by name (None for those that are not there) and numbers by name to the outputs by name.
Expression = Callable[[Mapping[str, Any], Mapping[str, float]], "dict[str, torch.Tensor]"]


def eager_and_compiled(name: str, expression: Expression) -> Mapping[str, Baseline]:
    """Return ``expression`` as a baseline called ``torch NAME``, and what ``torch.compile`` makes of it."""
    compiled = compile_for_one_problem(expression)

    def called(function: Expression) -> Baseline:
        def call(inputs: Inputs, outputs: Tensors) -> Tensors:
            found: Tensors = function(inputs.tensors, inputs.scalars)
            return found

        return call

    return {f"torch {name}": called(expression), f"torch.compile of {name}": called(compiled)}
