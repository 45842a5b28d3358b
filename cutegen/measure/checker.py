"""Runs kernels on poisoned outputs and compares them with the reference, on a problem and on its tails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cutegen.errors import LaunchError, MeasureError
from cutegen.families.registry import find_family
from cutegen.family import Baseline, Problem
from cutegen.measure.check import Verdict, verify
from cutegen.measure.check_set import CheckSet, new_check_set, require_idempotent
from cutegen.measure.cuda_graphs import Lane
from cutegen.measure.launch_errors import LAUNCH_ERRORS, brief
from cutegen.measure.operand_sets import Kernel, OpenProblem
from cutegen.measure.poisoned_output import PoisonedOutput
from cutegen.measure.scratch import Scratch
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["Checker", "launch_and_wait"]

#: Further runs for equal bits: more where runs are short, because races show rarely.
_REPEATS, _REPEATS_LARGE, _LARGE_FLOPS = 3, 1, 2e11


class Checker:
    """Checks kernels and baselines of one open problem; what a check needs is made once and kept.

    Args:
        opened: The problem.
        seed: Of inputs that are drawn for tail problems.
        device: Where tensors live.
        lane: How work is queued.
        scratch: Workspaces of kernels.
    """

    def __init__(
        self, opened: OpenProblem, seed: int, device: torch.device, lane: Lane, scratch: Scratch
    ) -> None:
        self._opened = opened
        self._seed = seed
        self._device = device
        self._lane = lane
        self._scratch = scratch
        self._sets: dict[Problem, CheckSet] = {}

    def check(self, kernel: Kernel, launch: Launch, problem: Problem, repeats: int | None = None) -> Verdict:
        """Run a kernel on poisoned outputs and compare with fp64, then ``repeats`` times for equal bits.

        Args:
            kernel: The function.
            launch: Its run-time arguments for ``problem``.
            problem: The open problem or a tail of it.
            repeats: None for more where runs are short.

        Raises:
            LaunchError: It did not run.
            CheckError: It wrote past its workspace, or left it in a state that the next launch cannot use.
        """
        if repeats is None:
            repeats = _REPEATS if problem.flops < _LARGE_FLOPS else _REPEATS_LARGE
        checks = self._check_set(problem)
        workspace = self._scratch.take(launch, poison=True)
        family = find_family(problem.family)
        any_order = family.any_order(problem)
        for run in checks.runs:
            bind_to = checks.calls(kernel, run, launch, workspace)
            call = self._launching(problem, bind_to)
            verdict = verify(call, run.outputs, checks.reference, repeats, any_order=any_order)
            if not verdict.ok:
                break
            if family.repeat == "idempotent" and checks.in_place:
                require_idempotent(call, run.outputs, checks.in_place)
        checks.inspect_inputs()
        if verdict.ok:
            self._scratch.inspect(launch)
        elif run.how:
            verdict = replace(verdict, reason=f"{verdict.reason}, with {run.how}")
        return replace(verdict, problem=str(problem))

    def is_right(self, baseline: Baseline) -> bool:
        """Return whether a baseline of the open problem stays within the error that kernels are allowed."""
        checks = self._check_set(self._opened.problem)

        def call(outputs: Mapping[str, PoisonedOutput]) -> None:
            written = {name: output.tensor for name, output in outputs.items()}
            for own, tensor in (baseline(checks.inputs, written) or {}).items():
                written[own].copy_(tensor)
            self._lane.synchronize()

        return verify(call, checks.runs[0].outputs, checks.reference, repeats=0).ok

    def _launching(
        self, problem: Problem, bind_to: Callable[[Mapping[str, PoisonedOutput]], Callable[[], None]]
    ) -> Callable[[Mapping[str, PoisonedOutput]], None]:
        return lambda outputs: launch_and_wait(self._lane, bind_to(outputs), f"launch on {problem}")

    def _check_set(self, problem: Problem) -> CheckSet:
        """Return what checks of ``problem`` need; tail problems have strided inputs and outputs."""
        if problem not in self._sets:
            drawn = self._opened.checked if problem == self._opened.problem else None
            try:
                self._sets[problem] = new_check_set(problem, drawn, self._seed, self._device)
            except RuntimeError as error:
                raise MeasureError(f"cannot set up the check of {problem}: {brief(error)}") from error
        return self._sets[problem]


def launch_and_wait(lane: Lane, call: Callable[[], None], what: str) -> None:
    """Make ``call`` and wait for it.

    Raises:
        LaunchError: It failed; the message begins with ``what``.
    """
    try:
        call()
        lane.synchronize()
    except LAUNCH_ERRORS as error:
        raise LaunchError(f"{what} failed: {brief(error)}") from error
