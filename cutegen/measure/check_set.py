"""What checking candidates on one problem needs: inputs, a reference, and the ways to call a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegen.errors import CheckError
from cutegen.families.registry import find_family
from cutegen.family import Argument, Inputs, Problem, Reference, Tensors, bind
from cutegen.measure.operand_sets import Kernel, bound
from cutegen.measure.poisoned_output import PoisonedOutput, first_difference, same_bits
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["BindTo", "CheckSet", "Run", "new_check_set", "require_idempotent"]

#: Poisoned outputs to a call of a kernel that writes them.
BindTo = Callable[[Mapping[str, PoisonedOutput]], Callable[[], None]]


@dataclass(frozen=True)
class Run:
    """One way to call a kernel in a check: its outputs, twice, and which inputs they alias.

    Attributes:
        outputs: Two sets of poisoned outputs by name.
        aliases: For each input that shares memory with an output, the name of that output.
        how: The aliasing, for messages; empty without any.
    """

    outputs: tuple[dict[str, PoisonedOutput], dict[str, PoisonedOutput]]
    aliases: Mapping[str, str]
    how: str = ""


@dataclass(frozen=True)
class CheckSet:
    """Everything that checking one problem needs; made when the first candidate is checked on it."""

    problem: Problem
    arguments: tuple[Argument, ...]
    inputs: Inputs
    pristine: Tensors
    reference: Reference
    runs: tuple[Run, ...]

    @property
    def in_place(self) -> tuple[str, ...]:
        """The arguments that kernels update."""
        return tuple(a.name for a in self.arguments if a.kind == "inout")

    def calls(self, kernel: Kernel, run: Run, launch: Launch, workspace: torch.Tensor | None) -> BindTo:
        """Return what makes calls of a kernel with the arguments of a run."""
        inputs = {**self.inputs.tensors, **self.inputs.scalars}

        def bind_to(outputs: Mapping[str, PoisonedOutput]) -> Callable[[], None]:
            written = {name: output.tensor for name, output in outputs.items()}
            aliased = {name: written[output] for name, output in run.aliases.items()}
            arguments = bind(self.arguments, {**inputs, **written, **aliased}, launch, workspace)
            return bound(kernel, arguments)

        return bind_to

    def inspect_inputs(self) -> None:
        """Do nothing if the inputs are unchanged; if not, restore them.

        Raises:
            CheckError: The kernel wrote one of its inputs.
        """
        written = []
        for name, before in self.pristine.items():
            after = self.inputs.tensors[name]
            if not same_bits(before, after):
                written.append(f"{name}, first at {first_difference(before, after)}")
                after.copy_(before)
        if written:
            raise CheckError(f"wrote its input {'; its input '.join(written)}")


def new_check_set(problem: Problem, drawn: Inputs | None, seed: int, device: torch.device) -> CheckSet:
    """Return what checks of a problem need.

    Args:
        problem: What candidates compute.
        drawn: Its inputs; None for a tail problem, whose inputs and outputs are then strided.
        seed: Of what is drawn.
        device: Where.
    """
    import torch

    family = find_family(problem.family)
    arguments = family.arguments(problem)
    generator = torch.Generator(device=device).manual_seed(seed)
    inputs = family.inputs(problem, generator, awkward=True) if drawn is None else drawn
    pristine = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    return CheckSet(
        problem=problem,
        arguments=arguments,
        inputs=inputs,
        pristine=pristine,
        reference=family.reference(problem, Inputs(pristine, inputs.scalars)),
        runs=tuple(_runs(arguments, inputs, device, gaps=drawn is None)),
    )


def _runs(
    arguments: Sequence[Argument], inputs: Inputs, device: torch.device, *, gaps: bool
) -> Iterator[Run]:
    """Yield the ways to call a kernel: outputs apart from all inputs, then each as what it may alias."""
    written = [a for a in arguments if a.kind in ("out", "inout")]

    def poisoned(initial: Mapping[str, torch.Tensor]) -> dict[str, PoisonedOutput]:
        return {a.name: PoisonedOutput(a, device, gaps=gaps, initial=initial.get(a.name)) for a in written}

    in_place = {a.name: inputs.tensors[a.name] for a in written if a.kind == "inout"}
    yield Run((poisoned(in_place), poisoned(in_place)), {})
    for argument in written:
        for name in argument.may_alias:
            initial = {**in_place, argument.name: inputs.tensors[name]}
            how = f"{argument.name} in the place of {name}"
            yield Run((poisoned(initial), poisoned(initial)), {name: argument.name}, how)


def require_idempotent(
    call: Callable[[Mapping[str, PoisonedOutput]], None],
    outputs: tuple[dict[str, PoisonedOutput], dict[str, PoisonedOutput]],
    names: Sequence[str],
) -> None:
    """Do nothing if a kernel that is run on its own results leaves them as they are.

    Raises:
        CheckError: It changes one.
    """
    once, again = outputs
    for name in names:
        again[name].tensor.copy_(once[name].tensor)
    call(again)
    changed = next((name for name in names if not once[name].same_bits(again[name])), "")
    if changed:
        raise CheckError(
            f"run on its own result it changes {changed}, which idempotent kernels do not; declare "
            "repeat='bounded' if values stay in their range, else repeat='restore'"
        )
