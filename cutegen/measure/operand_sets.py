"""Operands and outputs of the open problem, in rotation, with its baselines and captured graphs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cutegen.families.registry import find_family
from cutegen.family import Baseline, Inputs, Problem, Tensors, bind
from cutegen.measure.context import OVERLAPPING
from cutegen.measure.engine import Prepared
from cutegen.measure.overlapping_kernel import rewriter_on
from cutegen.measure.poisoned_output import new_output
from cutegen.measure.predecessor import Predecessor, add_nothing
from cutegen.measure.sizing import Rotation, plan_launches
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["COPY", "Kernel", "OpenProblem", "bound", "rotating"]

#: Name of the reference of problems that have no correct baseline.
COPY = "copy of as many bytes"
Kernel = Callable[..., None]


class OpenProblem:
    """Operands, outputs, baselines and graphs of the open problem."""

    def __init__(self, problem: Problem, seed: int, rotation: Rotation, device: torch.device) -> None:
        import torch

        family = find_family(problem.family)
        self.problem = problem
        self.rotation = rotation
        self.arguments = family.arguments(problem)
        generator = torch.Generator(device=device).manual_seed(seed)
        self.inputs = [family.inputs(problem, generator) for _ in range(rotation.sets)]
        self.outputs = [self._new_outputs(inputs, device) for inputs in self.inputs]
        in_place = {
            a.name: self.inputs[0].tensors[a.name].clone() for a in self.arguments if a.kind == "inout"
        }
        #: Inputs of checks: measuring changes the tensors that kernels update in place.
        self.checked = replace(self.inputs[0], tensors={**self.inputs[0].tensors, **in_place})
        #: Each tensor that is restored before a replay, with its values.
        self.kept = [
            (inputs.tensors[name], inputs.tensors[name].clone())
            for inputs in self.inputs
            for name in (in_place if family.repeat == "restore" else ())
        ]
        #: The captured graph that restores them; None if there are none.
        self.restoring: Any = None
        self.baselines = dict(family.baselines(problem, self.inputs[0], self.outputs[0]))
        self._copy = _copy_of_as_many_bytes(problem, device)
        self.predecessors: dict[str, Predecessor] = {}
        self.graphs: dict[tuple[Any, ...], Prepared] = {}
        self.reference = ""
        self.writes_outputs = True
        self.time_us = math.nan

    def _new_outputs(self, inputs: Inputs, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what a launch writes: new tensors, and the inputs that it updates in place."""
        written = [a for a in self.arguments if a.kind in ("out", "inout")]
        return {a.name: new_output(a, device) if a.kind == "out" else inputs.tensors[a.name] for a in written}

    def restore(self) -> None:
        """Restore the tensors that kernels update in place."""
        for tensor, values in self.kept:
            tensor.copy_(values)

    def launches(self) -> int:
        """Return the launches of one graph: one on each operand set if tensors are restored in between."""
        return self.rotation.sets if self.kept else plan_launches(self.time_us, self.rotation.sets)

    def baseline_calls(self, name: str, count: int) -> list[Callable[[], None]]:
        """Return calls of a baseline, rotating through the operand sets."""
        call = rotating(self.baselines.get(name, self._copy), self.rotation.sets)
        sets = list(zip(self.inputs, self.outputs, strict=True))
        return [bound(call, sets[i % self.rotation.sets]) for i in range(count)]

    def kernel_calls(
        self, kernel: Kernel, launch: Launch, workspace: torch.Tensor | None, count: int
    ) -> list[Callable[[], None]]:
        """Return calls of a kernel, rotating likewise."""
        argument_sets = [
            bind(self.arguments, {**load.tensors, **load.scalars, **out}, launch, workspace)
            for load, out in zip(self.inputs, self.outputs, strict=True)
        ]
        return [bound(kernel, argument_sets[i % len(argument_sets)]) for i in range(count)]

    def predecessor(self, context: str, l2_bytes: int, device: torch.device) -> Predecessor:
        """Return what runs before launches in a context other than back to back."""
        if context not in self.predecessors:
            self.predecessors[context] = self._new_predecessor(context, l2_bytes, device)
        return self.predecessors[context]

    def _new_predecessor(self, context: str, l2_bytes: int, device: torch.device) -> Predecessor:
        if context == "alone":
            return Predecessor.of_nothing(device)
        name = find_family(self.problem.family).upstream_input(self.problem)
        rewrite = rewriter_on(device) if context == OVERLAPPING else add_nothing
        return Predecessor([inputs.tensors[name] for inputs in self.inputs], l2_bytes, rewrite)


def _copy_of_as_many_bytes(problem: Problem, device: torch.device) -> Baseline:
    """Return a copy that moves as many bytes as ``problem`` must, for problems without a baseline."""
    buffers: list[torch.Tensor] = []

    def copy(inputs: Inputs, outputs: Tensors) -> None:
        import torch

        if not buffers:
            half = max(4, problem.min_bytes // 2)
            buffers.extend(torch.zeros(half // 4, dtype=torch.float32, device=device) for _ in range(2))
        buffers[1].copy_(buffers[0])

    return copy


def rotating(call: Baseline, sets: int) -> Baseline:
    """Return ``call`` such that results that it allocates itself rotate through ``sets`` places as well.

    Each result is kept alive for ``sets - 1`` further calls. Otherwise the allocator would place every result
    where the one before it was, in the L2 cache, which calls that write the given outputs do not find.
    """
    kept: deque[Tensors | None] = deque(maxlen=sets - 1)

    def rotated(inputs: Inputs, outputs: Tensors) -> Tensors | None:
        found = call(inputs, outputs)
        kept.append(found)
        return found

    return rotated


def bound(kernel: Callable[..., object], arguments: tuple[Any, ...]) -> Callable[[], None]:
    def call() -> None:
        kernel(*arguments)

    return call
