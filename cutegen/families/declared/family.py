"""A family made of a declaration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cutegen.dtypes import DTYPE_BYTES, short_dtype
from cutegen.errors import FamilyError, ProblemError, UsageError
from cutegen.families.declared.arguments import NONE, Declared, dtype_of, multiple, row_starts
from cutegen.families.declared.consistent import require_consistent
from cutegen.families.declared.drawing import draw
from cutegen.families.declared.problem import UNALIGNED, DeclaredProblem
from cutegen.families.declared.reference import DeclaredReference, as_numbers, default_tolerance, in_fp64
from cutegen.families.options import refusal
from cutegen.family import Argument, Baseline, Family, Inputs, Option, Repeat, Size, StandIn, Tensors

if TYPE_CHECKING:
    import torch

__all__ = ["Adjust", "Baselines", "DeclaredFamily", "ReferenceFunction", "Tolerance"]

#: Sizes are passed to kernels as 32-bit integers.
_MOST = 2**31 - 1
#: Elements compared at a time: some temporaries of 128 MB in fp64.
_CHUNK = 2**24
#: Tensors in fp64 and numbers by argument name (None for what is absent) to the wanted outputs by name.
ReferenceFunction = Callable[..., Mapping[str, "torch.Tensor"]]
#: Problem, name of an output and what it should be, to the error that each element is allowed.
Tolerance = Callable[[DeclaredProblem, str, "torch.Tensor"], "torch.Tensor"]
#: Problem, drawn inputs by name, which it changes in place, and whether they are to be awkward.
Adjust = Callable[[DeclaredProblem, Mapping[str, Any], bool], None]
#: A problem to what PyTorch offers for it, by name.
Baselines = Callable[[DeclaredProblem], Mapping[str, Baseline]]


class DeclaredFamily(Family):
    """A family made of data and a few functions.

    Args:
        name: As in problem lines.
        meaning: What it computes, in one line.
        sizes: Its sizes.
        options: What else a problem may say. The one called ``dtype`` is always written.
        arguments: Of the kernels, in the order of their parameters.
        reference: Called with every argument by name, tensors in fp64, and with those of
            :attr:`named_options` that it has parameters for; returns the wanted outputs in fp64. Where an
            output ``y`` is a difference, it may return as ``y terms`` what cancels, whose error is allowed;
            and as ``y error`` what is allowed of each element beside the tolerance.
        rows: A size along which problems are independent: the reference is then worked out for some rows at a
            time, on the tensors that have it as their first dimension.
        tolerance: The allowed error; by default that of rounding and of adding up along the last dimension.
        adjust: Makes what is drawn, normal values and small integers, valid inputs, and harder ones where
            they are to be awkward; in place.
        baselines: What to compare with; none by default.
        flops: Counts operations; by default four for each element that is read.
        min_bytes: Counts the bytes that must cross device memory; by default those of all tensors.
        examples: Shapes and options of problems that between them reach every knob value.
        tail_rows: Values of ``rows`` on which candidates are checked besides the problem's own.
        knobs: For each knob of the space what it does and when it pays.
        repeat: How kernels that update tensors are timed, see :class:`cutegen.family.Family`.

    Raises:
        FamilyError: An argument is named twice or refers to a size or an option that is not there.
    """

    metric: Literal["TFLOP/s", "GB/s"] = "GB/s"

    def __init__(
        self,
        name: str,
        meaning: str,
        *,
        sizes: tuple[Size, ...],
        options: tuple[Option, ...],
        arguments: tuple[Declared, ...],
        reference: ReferenceFunction,
        rows: str = "",
        tolerance: Tolerance | None = None,
        adjust: Adjust | None = None,
        baselines: Baselines | None = None,
        flops: Callable[[DeclaredProblem], int] | None = None,
        min_bytes: Callable[[DeclaredProblem], int] | None = None,
        examples: Sequence[str] = (),
        tail_rows: Sequence[int] = (1, 37, 333),
        knobs: Mapping[str, str] | None = None,
        repeat: Repeat = "restore",
    ) -> None:
        self.name = name
        self.meaning = meaning
        self.sizes = sizes
        self.options = (*options, Option(UNALIGNED, f"rows do not start at {row_starts(arguments)}"))
        self.declared_arguments = arguments
        self._reference = reference
        self._rows = rows
        self._tolerance = tolerance or default_tolerance
        self._adjust = adjust
        self._baselines = baselines
        self._flops = flops
        self._min_bytes = min_bytes
        self._examples = tuple(examples)
        self._tail_rows = tuple(tail_rows)
        self.knobs = dict(knobs or {})
        self.repeat = repeat
        require_consistent(self, rows)

    @property
    def named_options(self) -> tuple[Option, ...]:
        """The options that no tensor of a call tells, by its dtype or by being there."""
        told = {UNALIGNED, *(a.when for a in self.declared_arguments)}
        told |= {a.dtype for a in self.declared_arguments if a.kind in ("in", "out", "inout")}
        return tuple(option for option in self.options if option.name not in told)

    @property
    def dtypes_of_outputs(self) -> tuple[Option, ...]:
        """The options that no input tells, only the dtype of an output: where that is made, calls name it."""
        told = {a.dtype for a in self.declared_arguments if a.kind in ("in", "inout")}
        held = {a.dtype for a in self.declared_arguments if a.kind == "out"} - told
        held -= {a.when for a in self.declared_arguments}
        return tuple(option for option in self.options if option.name in held)

    @property
    def named_sizes(self) -> tuple[Size, ...]:
        """The sizes that no input tells: where no given output does either, calls name them."""
        told = {
            multiple(dim)[1] for a in self.declared_arguments if a.kind in ("in", "inout") for dim in a.dims
        }
        return tuple(size for size in self.sizes if size.name not in told)

    # -- problems

    def parse(self, line: str) -> DeclaredProblem:
        """Return the problem that prints as ``line``."""
        name, _, rest = line.strip().partition(" ")
        words = rest.split()
        if name != self.name or not words:
            raise ProblemError(
                f"{line!r} is not a problem of {self.name}; write {self.name} {self.shape_form}"
            )
        options = {option.name: option for option in self.options}
        found: dict[str, str | bool] = {}
        for at, word in enumerate(words[1:]):
            key, equals, value = word.partition("=")
            named = self.option(key)
            key = named.name if named else key
            if at == 0 and not equals and "dtype" in options and key not in options:
                key, value, equals = "dtype", word, "="
            if key not in options or options[key].is_flag == bool(equals) or key in found:
                why = refusal(word, self.options, repeated=key in found)
                raise ProblemError(f"problem {line!r}: {why}")
            found[key] = True if options[key].is_flag else value
        try:
            return self.problem(self.parse_shape(words[0]), found)
        except UsageError as error:
            raise ProblemError(str(error)) from error

    def problem(self, sizes: Mapping[str, int], options: Mapping[str, str | bool]) -> DeclaredProblem:
        """Return the problem of sizes and options by name."""
        chosen: list[tuple[str, int]] = []
        for size in self.sizes:
            value = sizes.get(size.name, size.default)
            if type(value) is not int or not 1 <= value <= _MOST:
                raise ProblemError(f"{size.name}={value!r} must be an integer from 1 to {_MOST}")
            chosen.append((size.name, value))
        items = tuple((o.name, self._option(o, options)) for o in self.options if o.name != UNALIGNED)
        for argument in self.declared_arguments:
            argument.shape(dict(chosen))  # parts of sizes are whole
        problem = DeclaredProblem(self, tuple(chosen), items, bool(options.get(UNALIGNED)))
        return replace(problem, unaligned=problem.unaligned or self.is_odd(problem))

    def _option(self, option: Option, given: Mapping[str, str | bool]) -> str | bool:
        value = given.get(option.name, False if option.is_flag else option.default)
        if value == NONE and NONE in option.values:
            return ""
        if isinstance(value, str) and short_dtype(value) in option.values:
            return short_dtype(value)
        if not option.is_flag and value not in option.values and value != option.default:
            raise ProblemError(f"{option.name}={value!r} is not valid; valid: {', '.join(option.values)}")
        return value

    def is_odd(self, problem: DeclaredProblem) -> bool:
        """Return whether rows that follow one another do not start where aligned ones do."""
        return any(
            len(a.shape) > 1 and a.shape[-1] * DTYPE_BYTES[a.dtype] % a.align_bytes
            for a in self.arguments(problem)
            if not (self._declared(a.name).aligned or self._declared(a.name).anywhere)
        )

    def typical(self) -> Sequence[DeclaredProblem]:
        """Return the declared examples."""
        return [self.parse(f"{self.name} {example}") for example in self._examples]

    def tails(self, problem: DeclaredProblem) -> Sequence[DeclaredProblem]:
        """Return the problem with few rows."""
        if not self._rows:
            return ()
        return [problem.with_sizes(**{self._rows: count}) for count in sorted(self._tail_rows)]

    # -- kernels

    def arguments(self, problem: DeclaredProblem) -> tuple[Argument, ...]:
        """Return the declared arguments that ``problem`` has, with its sizes and dtypes."""
        sizes, options = problem.sizes, dict(problem.options)
        there = [a for a in self.declared_arguments if a.is_present(options)]
        names = {a.name for a in there}
        return tuple(
            Argument(
                a.name,
                a.kind,
                dtype_of(a, options),
                a.shape(sizes),
                aligned=a.aligned or not (a.anywhere or problem.unaligned),
                may_alias=tuple(name for name in a.may_alias if name in names),
                align_bytes=a.align_bytes,
            )
            for a in there
        )

    def count_bytes(self, problem: DeclaredProblem) -> int:
        """Return the bytes that must cross device memory: as declared, or those of all tensors."""
        if self._min_bytes is not None:
            return self._min_bytes(problem)
        tensors = [a for a in self.arguments(problem) if a.kind in ("in", "out", "inout")]
        return sum(
            math.prod(a.shape) * DTYPE_BYTES[a.dtype] * (2 if a.kind == "inout" else 1) for a in tensors
        )

    def count_flops(self, problem: DeclaredProblem) -> int:
        """Return the operations, as declared."""
        if self._flops is not None:
            return self._flops(problem)
        return 4 * sum(math.prod(a.shape) for a in self.arguments(problem) if a.kind in ("in", "inout"))

    # -- the check, and what is compared

    def inputs(
        self, problem: DeclaredProblem, generator: torch.Generator, *, awkward: bool = False
    ) -> Inputs:
        """Return normal values, and the declared scalars."""
        arguments = self.arguments(problem)
        below = {a.name: problem.sizes.get(a.below, 128) for a in self.declared_arguments}
        tensors = {
            a.name: draw(a, generator, below=below[a.name], gaps=awkward)
            for a in arguments
            if a.kind in ("in", "inout")
        }
        if self._adjust is not None:
            self._adjust(problem, tensors, awkward)
        present = {a.name for a in arguments}
        scalars = {
            a.name: a.values[1 if awkward else 0]
            for a in self.declared_arguments
            if a.kind == "scalar" and a.name in present
        }
        return Inputs(tensors, scalars)

    def reference(self, problem: DeclaredProblem, inputs: Inputs) -> DeclaredReference:
        """Return the declared reference on ``inputs``."""
        return DeclaredReference(self, problem, inputs)

    def wanted(
        self, problem: DeclaredProblem, inputs: Inputs, low: int, high: int
    ) -> Mapping[str, torch.Tensor]:
        """Return what the reference gives for rows ``low`` to ``high``, in fp64.

        Raises:
            FamilyError: It raises, lacks an output, or one has another shape than declared.
        """
        values: dict[str, Any] = {a.name: None for a in self.declared_arguments if a.kind != "out"}
        values = {k: v for k, v in values.items() if self._declared(k).kind in ("in", "inout", "scalar")}
        for name, tensor in inputs.tensors.items():
            values[name] = in_fp64(tensor[low:high] if self._has_rows(name) else tensor)
        values.update(inputs.scalars)
        try:
            found = self.call_reference(problem, values)
        except FamilyError:
            raise
        except Exception as error:  # the reference is the user's code: it may raise anything
            raise FamilyError(
                f"the reference of {self.name} raised {type(error).__name__}: {error}"
            ) from error
        written = [argument for argument in self.arguments(problem) if argument.kind in ("out", "inout")]
        for argument in written:
            shape = argument.shape
            shape = (high - low, *shape[1:]) if self._has_rows(argument.name) else shape
            given = found.get(argument.name)
            if given is not None and not hasattr(given, "double"):
                raise FamilyError(
                    f"the reference of {self.name} gives {argument.name} as {type(given).__name__}; "
                    "it must be a tensor"
                )
            got = None if given is None else tuple(given.shape)
            if got != shape:
                raise FamilyError(
                    f"the reference of {self.name} gives {argument.name} of shape {got}; it must be {shape}"
                )
        return {**found, **{argument.name: as_numbers(found[argument.name]) for argument in written}}

    def call_reference(
        self, problem: DeclaredProblem, values: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        """Return what the reference gives for ``problem`` on arguments by name."""
        return self._reference(**values, **self._named(problem))

    def _named(self, problem: DeclaredProblem) -> dict[str, str | bool]:
        """Return the named options that the reference has parameters for."""
        asked, chosen = inspect.signature(self._reference).parameters, dict(problem.options)
        return {o.name: chosen[o.name] for o in self.named_options if o.name in asked}

    def stand_in(self, problem: DeclaredProblem) -> StandIn:
        """Return the reference in fp64, for some rows at a time, rounded once."""

        def compute(inputs: Inputs, outputs: Tensors) -> None:
            counts = [self.rows_of(problem, name) for name in outputs]
            rows, step = max(count for count, _ in counts), min(step for _, step in counts)
            for low in range(0, rows, step):
                high = min(low + step, rows)
                found = self.wanted(problem, inputs, low, high)
                # An output may be an input, so all are rounded before any is written.
                rounded = {name: found[name].to(out.dtype, copy=True) for name, out in outputs.items()}
                for name, out in outputs.items():
                    (out[low:high] if self._has_rows(name) else out).copy_(rounded[name])

        return compute

    def allowed(self, problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
        """Return the error that each element of an output is allowed."""
        return self._tolerance(problem, output, want)

    def _declared(self, name: str) -> Declared:
        return next(a for a in self.declared_arguments if a.name == name)

    def _has_rows(self, name: str) -> bool:
        dims = self._declared(name).dims
        return bool(self._rows) and bool(dims) and dims[0] == self._rows

    def rows_of(self, problem: DeclaredProblem, output: str) -> tuple[int, int]:
        """Return how many rows an output has, and how many of them to compare at a time."""
        if not self._has_rows(output):
            return 1, 1
        count = problem.sizes[self._rows]
        widest = max(
            math.prod(a.shape[1:]) for a in self.arguments(problem) if a.shape and self._has_rows(a.name)
        )
        return count, max(1, _CHUNK // widest)

    def baselines(self, problem: DeclaredProblem, inputs: Inputs, outputs: Tensors) -> Mapping[str, Baseline]:
        """Return the declared baselines."""
        return {} if self._baselines is None else self._baselines(problem)
