"""A family from a declaration: sizes, options, arguments, a reference in a few lines; the rest follows.

::

    FAMILY = DeclaredFamily(
        "rmsnorm",
        "root-mean-square norm of rows",
        sizes=(Size("m", "rows"), Size("n", "columns", free=False)),
        options=(Option("dtype", "of x and y", ("bf16", "fp16", "fp32"), "bf16"),),
        arguments=(
            read("x", "dtype", ("m", "n")),
            write("y", "dtype", ("m", "n")),
            scalar("eps", "fp32", (1e-6, 0.25)),
        ),
        reference=rms_norm,
        rows="m",
    )
"""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from cutegen.dtypes import DTYPE_BYTES, TMA_ALIGN_BYTES, TORCH_DTYPES, short_dtype, torch_dtype
from cutegen.errors import FamilyError, ProblemError, UsageError
from cutegen.family import (
    Argument,
    Baseline,
    Chunk,
    Family,
    Inputs,
    Kind,
    Option,
    Repeat,
    Size,
    StandIn,
    Tensors,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "Declared",
    "DeclaredFamily",
    "DeclaredProblem",
    "DeclaredReference",
    "DeclaredSignature",
    "integers",
    "multiple",
    "read",
    "rounding_error",
    "scalar",
    "scratch",
    "update",
    "with_gaps",
    "write",
]

#: The word of a problem whose rows do not start at multiples of 16 bytes although their length is one.
UNALIGNED = "unaligned"
#: Values of an option that holds a dtype: that of option ``dtype``; or that what it describes is absent,
#: which is the empty text in problems and signatures.
SAME, NONE = "same", "none"
#: Sizes are passed to kernels as 32-bit integers.
_MOST = 2**31 - 1
#: Elements compared at a time: some temporaries of 128 MB in fp64.
_CHUNK = 2**24
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


@dataclass(frozen=True)
class Declared:
    """An argument as it is declared; build one with :func:`read`, :func:`write` and their like.

    Attributes:
        name: Its name.
        kind: What the kernel does with it.
        dtype: A short name of a dtype, or the option that holds one, or ``same``: that of option ``dtype``.
        dims: The sizes of its axes, in order; ``2n`` for an axis of twice the size ``n``, ``n/128`` for a
            128th of it, which must be whole.
        when: What says whether it is there: an option that is a flag, or whose value may be ``none``; or an
            option and the values with which it is there, such as ``layout=halves,interleaved``. Empty for
            always.
        may_alias: As :class:`cutegen.family.Argument` has it.
        values: Of a scalar: what it is in most runs, and in the check on awkward sizes.
        below: Of a tensor of integers: the size that those drawn for it stay below; empty for 128.
        aligned: Whether kernels take it only with rows that start at multiples of 16 bytes.
        anywhere: Whether its rows may start anywhere in every problem.
    """

    name: str
    kind: Kind
    dtype: str = ""
    dims: tuple[str, ...] = ()
    when: str = ""
    may_alias: tuple[str, ...] = ()
    values: tuple[float, float] = (1.0, -0.5)
    below: str = ""
    aligned: bool = False
    anywhere: bool = False

    def is_present(self, options: Mapping[str, str | bool]) -> bool:
        """Return whether a problem of these options has it."""
        option, equals, values = self.when.partition("=")
        return not option or (options[option] in values.split(",") if equals else bool(options[option]))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape in a problem of these sizes.

        Raises:
            ProblemError: A part of a size is not whole.
        """
        return tuple(_extent(times, size, sizes[size]) for times, size in map(multiple, self.dims))


def _extent(times: Fraction, size: str, value: int) -> int:
    """Return the extent of an axis; a size may be a symbol of torch, which integers alone multiply."""
    if times.denominator == 1:
        return times.numerator * value
    if value % times.denominator:
        raise ProblemError(f"{size}={value} must be a multiple of {times.denominator}")
    return times.numerator * value // times.denominator


def multiple(dim: str) -> tuple[Fraction, str]:
    """Return how many times which size an axis is: ``2n`` is twice ``n``, and ``n/128`` a 128th of it."""
    parts = re.fullmatch("([0-9]*)(.*?)(?:/([1-9][0-9]*))?", dim)
    assert parts is not None
    return Fraction(int(parts[1] or 1), int(parts[3] or 1)), parts[2]


def read(
    name: str,
    dtype: str,
    dims: Sequence[str],
    *,
    when: str = "",
    below: str = "",
    aligned: bool = False,
    anywhere: bool = False,
) -> Declared:
    """Declare a tensor that kernels only read; its integers, such as places in another, stay below a size.

    Its rows may start anywhere in problems that say ``unaligned``, unless it is always ``aligned``; in all of
    them if ``anywhere``.
    """
    return Declared(name, "in", dtype, tuple(dims), when, below=below, aligned=aligned, anywhere=anywhere)


def write(
    name: str, dtype: str, dims: Sequence[str], *, when: str = "", may_alias: Sequence[str] = ()
) -> Declared:
    """Declare a tensor that kernels write completely; it may be one of the inputs in ``may_alias``."""
    return Declared(name, "out", dtype, tuple(dims), when, tuple(may_alias))


def update(name: str, dtype: str, dims: Sequence[str], *, when: str = "") -> Declared:
    """Declare a tensor that kernels read and write in place."""
    return Declared(name, "inout", dtype, tuple(dims), when)


def scalar(name: str, dtype: str, values: tuple[float, float], *, when: str = "") -> Declared:
    """Declare a number that the caller gives.

    The second of the values must change the result by more than its rounding: a kernel in which the first is
    compiled is found by it.
    """
    return Declared(name, "scalar", dtype, (), when, (), values)


def scratch(name: str = "workspace") -> Declared:
    """Declare where among the arguments the workspace comes, if a launch needs one."""
    return Declared(name, "scratch")


def integers(name: str = "launch") -> Declared:
    """Declare where among the arguments the integers of a launch come."""
    return Declared(name, "launch", "int32")


@dataclass(frozen=True)
class DeclaredSignature:
    """The compiled-in part of a declared problem.

    Templates read fixed sizes and options as attributes: ``sig.n``, ``sig.dtype``.

    Attributes:
        family: Name of the family.
        fixed: The sizes that are compiled in.
        options: Every option; flags are True or False.
        unaligned: Whether rows may start anywhere, not only at multiples of 16 bytes.
    """

    family: str
    fixed: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str | bool], ...]
    unaligned: bool

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for key, value in (*self.fixed, *self.options):
            if key == name:
                return value
        raise AttributeError(f"{self.family} has no fixed size and no option {name!r}")


@dataclass(frozen=True)
class DeclaredProblem:
    """A problem of a declared family. Its sizes and options are attributes too, such as ``problem.n``."""

    declared: DeclaredFamily = field(repr=False)
    size_items: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str | bool], ...]
    unaligned: bool

    @property
    def family(self) -> str:
        """Name of the family."""
        return self.declared.name

    @property
    def sizes(self) -> dict[str, int]:
        """Every size by name."""
        return dict(self.size_items)

    @property
    def signature(self) -> DeclaredSignature:
        """Sizes that are not free, options, and whether rows are aligned."""
        free = {size.name for size in self.declared.sizes if size.free}
        fixed = tuple((name, value) for name, value in self.size_items if name not in free)
        return DeclaredSignature(self.family, fixed, self.options, self.unaligned)

    @property
    def flops(self) -> int:
        """Floating-point operations, as the family counts them."""
        return self.declared.count_flops(self)

    @property
    def min_bytes(self) -> int:
        """Bytes of all tensors, of those that are updated in place twice."""
        return self.declared.count_bytes(self)

    def with_sizes(self, **sizes: int) -> DeclaredProblem:
        """Return the same kind of problem with some sizes changed; raises :class:`ProblemError`."""
        words = {
            **{name: NONE if value == "" else value for name, value in self.options},
            UNALIGNED: self.unaligned and not self.declared.is_odd(self),
        }
        return self.declared.problem({**self.sizes, **sizes}, words)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for key, value in (*self.size_items, *self.options):
            if key == name:
                return value
        raise AttributeError(f"{self.family} has no size and no option {name!r}")

    def __str__(self) -> str:
        words = [self.family, "x".join(str(value) for _, value in self.size_items)]
        for option in self.declared.options:
            value = getattr(self, option.name) if option.name != UNALIGNED else False
            if option.is_flag:
                words += [option.name] if value else []
            elif option.name == "dtype":
                words.append(str(value))
            elif value != option.default:
                words.append(f"{option.name}={value or NONE}")
        if self.unaligned and not self.declared.is_odd(self):
            words.append(UNALIGNED)
        return " ".join(words)


def _may_be_absent(when: str, options: Mapping[str, Option]) -> bool:
    name, equals, values = when.partition("=")
    option = options.get(name)
    if option is None or not equals:
        return option is not None and (option.is_flag or NONE in option.values)
    return {*option.values} > {*values.split(",")}


def _dtype_of(declared: Declared, options: Mapping[str, str | bool]) -> str:
    named = str(options.get(declared.dtype, declared.dtype))
    return str(options["dtype"]) if named == SAME else named


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
        self.options = (*options, Option(UNALIGNED, "rows do not start at multiples of 16 bytes"))
        self.declared_arguments = arguments
        self._reference = reference
        self._rows = rows
        self._tolerance = tolerance or _default_tolerance
        self._adjust = adjust
        self._baselines = baselines
        self._flops = flops
        self._min_bytes = min_bytes
        self._examples = tuple(examples)
        self._tail_rows = tuple(tail_rows)
        self.knobs = dict(knobs or {})
        self.repeat = repeat
        self._require_consistent()

    def _require_consistent(self) -> None:
        sizes = [size.name for size in self.sizes]
        if self._rows and self._rows not in sizes:
            raise FamilyError(
                f"family {self.name}: rows={self._rows!r} is no size; sizes: {', '.join(sizes)}"
            )
        seen: set[str] = set()
        for argument in self.declared_arguments:
            mistake = "it is named twice" if argument.name in seen else self._mistake(argument, sizes)
            if mistake:
                raise FamilyError(f"family {self.name}, argument {argument.name}: {mistake}")
            seen.add(argument.name)

    def _mistake(self, argument: Declared, sizes: Sequence[str]) -> str:
        """Return what is wrong with the declaration of an argument; empty if nothing is."""
        options = {option.name: option for option in self.options}
        if not argument.name.isidentifier() or keyword.iskeyword(argument.name):
            return "the name is no Python identifier, such as weight"
        unknown = [dim for times, dim in map(multiple, argument.dims) if dim not in sizes or not times]
        if unknown:
            return f"no size is called {unknown[0]!r}; sizes: {', '.join(sizes)}"
        if argument.below and argument.below not in sizes:
            return f"below={argument.below!r} is no size; sizes: {', '.join(sizes)}"
        if argument.dtype and argument.dtype not in DTYPE_BYTES and argument.dtype not in options:
            return f"dtype {argument.dtype!r} is neither an option nor of {', '.join(TORCH_DTYPES)}"
        if argument.when and not _may_be_absent(argument.when, options):
            return f"when={argument.when!r} is no flag, no option that may be none, and no value of an option"
        inputs = [other.name for other in self.declared_arguments if other.kind == "in"]
        if not {*inputs}.issuperset(argument.may_alias):
            return f"it may alias inputs only; inputs: {', '.join(inputs)}"
        if argument.kind not in ("in", "out", "inout"):
            return ""
        if not argument.dims:
            return f"a tensor has at least one size; sizes: {', '.join(sizes)}"
        first = self._rows == argument.dims[0] or argument.kind == "in"
        later = [size for _, size in map(multiple, argument.dims[1:])]
        if self._rows and (not first or self._rows in later):
            return (
                f"rows={self._rows!r} must be its first size, because rows are independent of each other; "
                "leave rows out where they are not"
            )
        return ""

    @property
    def named_options(self) -> tuple[Option, ...]:
        """The options that no tensor of a call tells, by its dtype or by being there."""
        told = {UNALIGNED, *(a.when for a in self.declared_arguments)}
        told |= {a.dtype for a in self.declared_arguments if a.kind in ("in", "out", "inout")}
        return tuple(option for option in self.options if option.name not in told)

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
                raise ProblemError(f"unknown word {word!r} in problem {line!r}; valid: {', '.join(options)}")
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
        """Return whether rows that follow one another do not start at multiples of 16 bytes."""
        return any(
            len(a.shape) > 1 and a.shape[-1] * DTYPE_BYTES[a.dtype] % TMA_ALIGN_BYTES
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
                _dtype_of(a, options),
                a.shape(sizes),
                aligned=a.aligned or not (a.anywhere or problem.unaligned),
                may_alias=tuple(name for name in a.may_alias if name in names),
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
            a.name: _draw(a, generator, below=below[a.name], gaps=awkward)
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
            values[name] = (tensor[low:high] if self._has_rows(name) else tensor).double()
        values.update(inputs.scalars)
        try:
            found = self.call_reference(problem, values)
        except FamilyError:
            raise
        except Exception as error:  # the reference is the user's code: it may raise anything
            raise FamilyError(
                f"the reference of {self.name} raised {type(error).__name__}: {error}"
            ) from error
        for argument in self.arguments(problem):
            if argument.kind not in ("out", "inout"):
                continue
            shape = argument.shape
            shape = (high - low, *shape[1:]) if self._has_rows(argument.name) else shape
            got = None if argument.name not in found else tuple(found[argument.name].shape)
            if got != shape:
                raise FamilyError(
                    f"the reference of {self.name} gives {argument.name} of shape {got}; it must be {shape}"
                )
        return found

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


def _shifted(low: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda index: (index[0] + low, *index[1:])


def rounding_error(dtype: str, want: torch.Tensor) -> torch.Tensor:
    """Return what rounding ``want`` to ``dtype`` may cost: half a unit in the last place of each element.

    Integers must be exact.

    Raises:
        FamilyError: Nothing is known about the dtype.
    """
    if "int" in dtype:
        return want.new_full(want.shape, 0.25)
    if dtype not in _ROUNDING:
        raise FamilyError(f"no tolerance is known for outputs of {dtype}; give the family one of its own")
    relative, least = _ROUNDING[dtype]
    return want.abs().mul_(relative).add_(least)


def _default_tolerance(problem: DeclaredProblem, output: str, want: torch.Tensor) -> torch.Tensor:
    """Rounding, and the error of a sum in fp32 along the longest dimension that is read."""
    arguments = {a.name: a for a in problem.declared.arguments(problem)}
    dtype = arguments[output].dtype
    if "int" in dtype:
        return rounding_error(dtype, want)
    return rounding_error(dtype, want).add_(want.abs().mul_(_sum_units(problem)))


def _sum_units(problem: DeclaredProblem) -> float:
    """Return the relative error of a sum in fp32 along the longest dimension.

    A tree of partial sums errs by log2 of the terms; 8 more units of 2**-24 are left for what follows.
    """
    shapes = [a.shape for a in problem.declared.arguments(problem) if a.shape]
    return (math.log2(max((shape[-1] for shape in shapes), default=1)) + 8) * 2.0**-24


def _draw(argument: Argument, generator: torch.Generator, *, below: int, gaps: bool) -> torch.Tensor:
    """Return normal values; with ``gaps``, rows have NaN between them."""
    import torch

    dtype, device = torch_dtype(argument.dtype), generator.device
    if dtype.is_floating_point:
        values = torch.randn(argument.shape, dtype=torch.float32, device=device, generator=generator)
        values = values.to(dtype)
    else:
        top = min(below - 1, torch.iinfo(dtype).max)
        values = torch.randint(0, top + 1, argument.shape, dtype=dtype, device=device, generator=generator)
    return values if not gaps or len(argument.shape) < 2 else with_gaps(values, argument)


def with_gaps(values: torch.Tensor, argument: Argument) -> torch.Tensor:
    """Return a copy of ``values``, of two dimensions or more, with NaN (0 for integers) between its rows."""
    import torch

    dtype, device = values.dtype, values.device
    extra = 3 if not argument.aligned else TMA_ALIGN_BYTES // dtype.itemsize
    width = argument.shape[-1] + extra
    if not argument.aligned and width * dtype.itemsize % TMA_ALIGN_BYTES == 0:
        width += 1
    fill = math.nan if dtype.is_floating_point else 0
    whole = torch.full((*argument.shape[:-1], width), fill, dtype=dtype, device=device)
    whole[..., : argument.shape[-1]] = values
    return whole[..., : argument.shape[-1]]
