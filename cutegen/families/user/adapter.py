"""From a declared kernel, a problem and a config to what the adapter's template fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cutegen.dtypes import DTYPE_BYTES, TMA_ALIGN_BYTES
from cutegen.families.declared.arguments import NONE, SAME, multiple
from cutegen.families.user.call_text import call_text, construct_text, names_in, rewritten
from cutegen.families.user.declaration import Kernel, free
from cutegen.family import Argument
from cutegen.space import Value

__all__ = ["adapter_values"]

#: The compiler's names of element types.
_TYPES = {
    "bf16": "cutlass.BFloat16",
    "fp16": "cutlass.Float16",
    "fp32": "cutlass.Float32",
    "tf32": "cutlass.TFloat32",
    "fp64": "cutlass.Float64",
    "e4m3": "cutlass.Float8E4M3FN",
    "e5m2": "cutlass.Float8E5M2",
    "e8m0": "cutlass.Float8E8M0FNU",
    "int8": "cutlass.Int8",
    "uint8": "cutlass.Uint8",
    "bool": "cutlass.Boolean",
    "int32": "cutlass.Int32",
    "int64": "cutlass.Int64",
}


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the adapter's ``launch``: its name, annotation, and the text of its stand-in."""

    name: str
    annotation: str
    fake: str


def adapter_values(
    kernel: Kernel, problem: Any, chosen: Mapping[str, Value], arguments: tuple[Argument, ...]
) -> dict[str, Any]:
    """Return what the template of adapters asks for.

    Args:
        kernel: What is adapted to.
        problem: Its sizes and options.
        chosen: Its knobs, those that are compiled in, and what is derived from them.
        arguments: Those that ``problem`` has.
    """
    module, _, name = kernel.entry.partition(":")
    parameters = [
        _parameter(a, kernel, problem) for a in arguments if a.kind in ("in", "out", "inout", "scalar")
    ]
    parameters += [_Parameter(n, "cutlass.Int32", "cutlass.Int32(1)") for n in kernel.functions.integers]
    if kernel.scratch:
        parameters.append(_Parameter(kernel.scratch, "cute.Tensor", _scratch()))
    return {
        "entry_module": module,
        "entry_name": name,
        "constants": _constants(kernel, problem, chosen),
        "construct": construct_text(kernel),
        "parameters": parameters,
        "extents": _extents(kernel, arguments),
        "call": _rewritten(kernel, call_text(kernel), arguments),
        "launch": _rewritten(kernel, kernel.launch, arguments),
        "takes_stream": kernel.takes_stream,
        "free_sizes": [
            name
            for name, kind in kernel.sizes.items()
            if kind == free and any(name in _dims(kernel, a) for a in arguments)
        ],
        "meaning": kernel.meaning,
    }


def _dims(kernel: Kernel, argument: Argument) -> tuple[str, ...]:
    return next((a.dims for a in kernel.arguments if a.name == argument.name), ())


def _parameter(argument: Argument, kernel: Kernel, problem: Any) -> _Parameter:
    if argument.kind == "scalar":
        return _Parameter(argument.name, _TYPES[argument.dtype], f"{_TYPES[argument.dtype]}(1)")
    width = DTYPE_BYTES[argument.dtype]
    aligned = argument.aligned and not problem.unaligned
    dims = _dims(kernel, argument)
    shape = [_extent(kernel, problem, *multiple(dim)) for dim in dims]
    step = max(1, argument.align_bytes // width) if aligned else 1
    strides = [f"cute.sym_int64(divisibility={step})" for _ in dims[1:]] + ["1"]
    starts = aligned and (len(dims) > 1 or argument.kind == "in")
    align = max(width, argument.align_bytes) if starts else width
    fake = (
        f"cute.runtime.make_fake_tensor({_TYPES[argument.dtype]}, ({', '.join(shape)},), "
        f"stride=({', '.join(strides)},), assumed_align={align})"
    )
    return _Parameter(argument.name, "cute.Tensor", fake)


def _extent(kernel: Kernel, problem: Any, times: Fraction, size: str) -> str:
    """Return the extent of an axis: a number, the symbol of a free size, or one of its own for another."""
    if kernel.sizes[size] != free:
        return str(times * problem.sizes[size])
    return size if times == 1 else "cute.sym_int()"


def _scratch() -> str:
    return (
        "cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), stride=(1,), "
        f"assumed_align={TMA_ALIGN_BYTES})"
    )


def _rewritten(kernel: Kernel, text: str, arguments: tuple[Argument, ...]) -> str:
    """Return a list of arguments, None for those that the problem lacks."""
    present = {argument.name for argument in arguments}
    absent = {a.name: "None" for a in kernel.arguments if a.name not in present}
    return rewritten(text, absent)


def _extents(kernel: Kernel, arguments: tuple[Argument, ...]) -> list[tuple[str, str]]:
    """Return the free sizes that the call names, each with the text of its value."""
    found = []
    named = (*names_in(call_text(kernel), "call"), *names_in(kernel.launch, "launch"))
    for size, kind in kernel.sizes.items():
        if kind == free and size in named:
            axes = [(*multiple(d), a.name, at) for a in arguments for at, d in enumerate(_dims(kernel, a))]
            of_size = (axis for axis in axes if axis[1] == size)
            times, _, name, at = min(of_size, key=lambda axis: (axis[0] < 1, axis[0]))
            scaled = f" // {times}" if times > 1 else f" * {1 / times}" if times < 1 else ""
            found.append((size, f"{name}.shape[{at}]{scaled}"))
    return found


def _constants(kernel: Kernel, problem: Any, chosen: Mapping[str, Value]) -> list[tuple[str, str]]:
    """Return name and text of everything that is compiled in."""
    found = [(name, str(problem.sizes[name])) for name, kind in kernel.sizes.items() if kind != free]
    found += [(name, _option(value, dict(problem.options))) for name, value in problem.options]
    found += [(name, repr(value)) for name, value in (*kernel.constants.items(), *chosen.items())]
    return found


def _option(value: str | bool, options: Mapping[str, str | bool]) -> str:
    """Return the text of an option's value: a type of the compiler for a dtype."""
    value = options["dtype"] if value == SAME else value
    if value in ("", NONE):
        return "None"
    return _TYPES.get(str(value), repr(value)) if isinstance(value, str) else repr(value)
