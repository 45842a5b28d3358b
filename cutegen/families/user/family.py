"""The family of a declared kernel: what every family says, from what its declaration says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cutegen.digest import digest
from cutegen.errors import FamilyError
from cutegen.families.declared import DeclaredFamily, DeclaredProblem, integers, multiple, scratch
from cutegen.families.declared import with_gaps as _with_gaps
from cutegen.families.user.adapter import adapter_values
from cutegen.families.user.call_text import call_text, construct_text, require_texts
from cutegen.families.user.checking_code import checking_code
from cutegen.families.user.closure import Closure, Opening, file_identity, find_closure
from cutegen.families.user.declaration import Kernel, Named, free
from cutegen.families.user.scope import Scope
from cutegen.family import Argument, Baseline, Inputs, Option, Size, Tensors

if TYPE_CHECKING:
    import torch

    from cutegen.arch import Arch
    from cutegen.family import Repeat
    from cutegen.space import Config, Value

__all__ = ["UserFamily"]

#: Free sizes of the small problem on which candidates are checked where nothing says which rows are
#: independent: one that may be the last of a tensor, and so decide its alignment, and others.
_SMALL, _SMALL_ODD = 48, 37


class UserFamily(DeclaredFamily):
    """A declared kernel as a family.

    Args:
        kernel: The declaration.
        path: Its file; what it names is looked for beside it.

    Raises:
        FamilyError: The declaration contradicts itself, or lacks a reference.
    """

    default_is_its_authors = True

    def __init__(self, kernel: Kernel, path: Path) -> None:
        self.kernel = kernel
        self.path = path
        functions = kernel.functions
        if "reference" not in functions.single:
            raise FamilyError(
                "there is no reference; write a function that says what is right under @kernel.reference"
            )
        if all(argument.kind in ("in", "scalar") for argument in kernel.arguments):
            raise FamilyError(
                "no argument is an output, so there would be nothing to check; "
                "declare what the kernel writes by write() or update()"
            )
        require_texts(kernel)
        arguments = [*kernel.arguments]
        arguments += [integers()] if functions.integers else []
        arguments += [scratch()] if kernel.scratch else []
        super().__init__(
            kernel.name,
            kernel.meaning,
            sizes=tuple(Size(name, name, free=kind == free) for name, kind in kernel.sizes.items()),
            options=tuple(_option(name, values) for name, values in kernel.options.items()),
            arguments=tuple(arguments),
            reference=self._no_reference,
            rows=kernel.rows,
            examples=kernel.examples,
            repeat=cast("Repeat", kernel.repeat or "restore"),
        )

    # -- problems

    def tails(self, problem: DeclaredProblem) -> Sequence[DeclaredProblem]:
        """Return the problems that were declared, else few rows, else small free sizes."""
        if self.kernel.tails:
            return [problem.with_sizes(**tail) for tail in self.kernel.tails]
        if self.kernel.rows:
            return super().tails(problem)
        last = {multiple(a.dims[-1])[1] for a in self.declared_arguments if a.dims}
        sizes = {
            name: self._whole(name, _SMALL if name in last else _SMALL_ODD)
            for name, kind in self.kernel.sizes.items()
            if kind == free
        }
        if not sizes:
            return []
        for factor in (1, 2, 4, 8):  # rows of parts, such as n/128 scales, may need more to stay aligned
            tail = problem.with_sizes(**{n: v * factor if n in last else v for n, v in sizes.items()})
            if tail.unaligned == problem.unaligned:
                return [tail]
        return [problem.with_sizes(**sizes)]

    def _whole(self, size: str, value: int) -> int:
        """Return the least extent from ``value`` on of which every declared part, as ``n/128``, is whole."""
        axes = [multiple(dim) for a in self.declared_arguments for dim in a.dims]
        part = math.lcm(*(times.denominator for times, name in axes if name == size))
        return -(-value // part) * part

    def any_order(self, problem: Any) -> bool:
        """Return whether the declaration allows results whose last bits differ."""
        return self.kernel.any_order

    def count_bytes(self, problem: DeclaredProblem) -> int:
        """Return the bytes as declared, else those of all tensors."""
        declared = self.kernel.functions.single.get("bytes")
        return super().count_bytes(problem) if declared is None else _count(declared, self._scope(problem))

    def count_flops(self, problem: DeclaredProblem) -> int:
        """Return the operations as declared, else four for each element that is read."""
        declared = self.kernel.functions.single.get("flops")
        return super().count_flops(problem) if declared is None else _count(declared, self._scope(problem))

    def _scope(self, problem: DeclaredProblem) -> Scope:
        return Scope(self.kernel, {}, problem)

    # -- the check, and what is compared

    def inputs(
        self, problem: DeclaredProblem, generator: torch.Generator, *, awkward: bool = False
    ) -> Inputs:
        """Return the declared values, and normal ones for the rest."""
        drawn = super().inputs(problem, generator, awkward=awkward)
        declared = self.kernel.functions.single.get("inputs")
        if declared is None:
            return drawn
        given = declared.value(self._with(self._scope(problem), {"generator": generator}))
        if not isinstance(given, Mapping):
            raise declared.refused(f"returned {type(given).__name__}; it returns tensors by name")
        arguments = {a.name: a for a in self.arguments(problem)}
        unknown = [name for name in given if name not in drawn.tensors]
        if unknown:
            raise FamilyError(f"inputs() gives {unknown[0]}; it may give {', '.join(drawn.tensors)}")
        made = {
            name: _like(arguments[name], tensor, drawn.tensors[name], awkward)
            for name, tensor in given.items()
        }
        return Inputs({**drawn.tensors, **made}, drawn.scalars)

    def _with(self, scope: Scope, more: Mapping[str, Any]) -> Callable[[str], Any]:
        return lambda name: more[name] if name in more else scope(name)

    def _no_reference(self, **values: Any) -> Mapping[str, torch.Tensor]:
        raise AssertionError("the reference of a declared kernel is asked with its problem")

    def call_reference(
        self, problem: DeclaredProblem, values: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        """Return the declared reference on the arguments that it names."""
        reference = self.kernel.functions.single["reference"]
        return self._by_name(problem, reference, reference.value(self._with(self._scope(problem), values)))

    def _by_name(self, problem: DeclaredProblem, function: Named, found: Any) -> dict[str, Any]:
        """Return what a function of arguments, sizes and options found, outputs by name."""
        if isinstance(found, Mapping):
            return dict(found)
        outputs = [a.name for a in self.arguments(problem) if a.kind in ("out", "inout")]
        if len(outputs) != 1:
            raise FamilyError(
                f"{function.function.__name__}() returns one value, but {self.name} has the outputs "
                f"{', '.join(outputs)}; return a dictionary"
            )
        return {outputs[0]: found}

    def allowed(self, problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
        """Return the allowed error as declared, else that of rounding and of a sum."""
        declared = self.kernel.functions.single.get("tolerance")
        if declared is None:
            return super().allowed(problem, output, want)
        allowed = declared.value(self._with(self._scope(problem), {"output": output, "want": want}))
        if hasattr(allowed, "expand_as"):
            return cast("torch.Tensor", allowed)
        if not isinstance(allowed, (int, float)):
            raise declared.refused(f"returned {allowed!r}; it returns a tensor or a number")
        return want.new_full(want.shape, float(allowed))

    def baselines(self, problem: DeclaredProblem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return the declared baselines."""
        absent = {a.name: None for a in self.kernel.arguments if a.kind in ("in", "inout", "scalar")}

        def called(function: Named) -> Baseline:
            def call(inputs: Inputs, outputs: Tensors) -> Tensors:
                values = {**absent, **inputs.tensors, **inputs.scalars}
                return self._by_name(problem, function, function(self._with(self._scope(problem), values)))

            return call

        return {name: called(function) for name, function in self.kernel.functions.baselines.items()}

    # -- kernels

    @cached_property
    def closure(self) -> Closure:
        """The modules that the kernel is made of, as they are when this is first asked for."""
        kernel = self.kernel
        module = kernel.entry.partition(":")[0]
        try:
            return find_closure(module, self.path.parent, kernel.modules, kernel.environment)
        except FamilyError as error:
            raise FamilyError(f"{self.path}, line {kernel.line}: {error}") from error

    def opening(self, arch: Arch) -> Opening | None:
        """Return what the child that compiles must know; None for a kernel that stands alone."""
        if not self.kernel.entry:
            return None
        closure = self.closure
        return Opening(
            (str(self.path.parent),),
            bool(closure.wants_torch),
            closure.files,
            closure.packages,
            closure.environment,
            self.kernel.sm_count or arch.nominal_sm_count,
        )

    def identity(self) -> str:
        """Return a digest of what kernels depend on beside template, problem and config."""
        kernel = self.kernel
        if not kernel.entry:
            return ""
        arguments = [repr(argument) for argument in kernel.arguments]
        return digest(
            [
                kernel.entry,
                construct_text(kernel) or "",
                call_text(kernel),
                kernel.launch,
                kernel.meaning,
                arguments,
                list(kernel.functions.integers),
                kernel.scratch,
                kernel.sm_count or 0,
                kernel.takes_stream,
                self._checked_by(),
                {name: str(value) for name, value in kernel.constants.items()},
                [list(pair) for pair in (*self.closure.modules, *self.closure.variables())],
            ]
        )

    def _checked_by(self) -> str:
        """Return a digest of what says what is right, and of how it is measured where that is declared."""
        found = checking_code(self.path)
        return digest([found, self.kernel.repeat]) if self.kernel.repeat else found

    def render_values(
        self, problem: Any, config: Config, derived: Mapping[str, Value], arch: Arch
    ) -> Mapping[str, Any]:
        """Return what the template of adapters asks for, as ``adapter``."""
        if not self.kernel.entry:
            return {}
        arguments: tuple[Argument, ...] = self.arguments(problem)
        adapter = {
            **adapter_values(self.kernel, problem, {**config, **derived}, arguments),
            "modules": self.closure.modules,
            "checked_by": self._checked_by(),
            "variables": self.closure.variables(),
            "sm_count": self.kernel.sm_count or arch.nominal_sm_count,
        }
        return {"adapter": adapter}

    def declaration(self) -> str:
        """Return a digest of the syntax tree of the declaration file."""
        return file_identity(self.path)


def _option(name: str, values: Sequence[str] | bool) -> Option:
    if values is False:
        return Option(name, name)
    if not isinstance(values, (tuple, list)) or not all(isinstance(value, str) for value in values):
        raise FamilyError(f"option {name} is {values!r}; it must be a list of texts, or False for a flag")
    return Option(name, name, tuple(values), values[0])


def _count(function: Named, scope: Scope) -> int:
    """Return how many operations or bytes a declared function counts."""
    found = function.value(scope)
    if not isinstance(found, (int, float)) or not 0 <= found < math.inf:
        raise function.refused(f"returned {found!r}; it returns a number from 0 on")
    return int(found)


def _like(argument: Argument, given: Any, drawn: torch.Tensor, awkward: bool) -> torch.Tensor:
    """Return given values as the tensor that would have been drawn: its place, dtype, shape and strides."""
    if not hasattr(given, "to"):
        raise FamilyError(f"inputs() gives {argument.name} as {type(given).__name__}; it must be a tensor")
    if tuple(given.shape) != argument.shape:
        raise FamilyError(
            f"inputs() gives {argument.name} of shape {tuple(given.shape)}; it must be {argument.shape}"
        )
    values = given.to(device=drawn.device, dtype=drawn.dtype).contiguous()
    if not drawn.is_floating_point() and not values.to(given.dtype).equal(given.to(drawn.device)):
        raise FamilyError(
            f"inputs() gives {argument.name} in {given.dtype}, with values that {drawn.dtype} cannot hold"
        )
    return _with_gaps(values, argument) if awkward and len(argument.shape) > 1 else values
