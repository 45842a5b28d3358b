"""What must hold between the parts of a declaration of a family."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cutegen.dtypes import DTYPE_BYTES, TMA_ALIGN_BYTES, TORCH_DTYPES
from cutegen.errors import FamilyError
from cutegen.families.declared.arguments import NONE, SAME, Declared, multiple
from cutegen.family import Option

if TYPE_CHECKING:
    from cutegen.families.declared.family import DeclaredFamily

__all__ = ["require_consistent"]

#: What rows may start at multiples of: bytes.
_ALIGNMENTS = tuple(2**power for power in range(TMA_ALIGN_BYTES.bit_length()))


def require_consistent(family: DeclaredFamily, rows: str) -> None:
    """See that each argument is named once and refers to sizes and options that are there.

    Args:
        family: What is declared.
        rows: The size along which its problems are independent, if there is one.

    Raises:
        FamilyError: It is not so.
    """
    sizes = [size.name for size in family.sizes]
    if rows and rows not in sizes:
        raise FamilyError(f"family {family.name}: rows={rows!r} is no size; sizes: {', '.join(sizes)}")
    seen: set[str] = set()
    for argument in family.declared_arguments:
        mistake = "it is named twice" if argument.name in seen else _mistake(family, argument)
        mistake = mistake or _mistake_of_rows(argument, rows)
        if mistake:
            raise FamilyError(f"family {family.name}, argument {argument.name}: {mistake}")
        seen.add(argument.name)


def _mistake(family: DeclaredFamily, argument: Declared) -> str:
    """Return what is wrong with the declaration of an argument; empty if nothing is."""
    sizes = [size.name for size in family.sizes]
    options = {option.name: option for option in family.options}
    if not argument.name.isidentifier() or keyword.iskeyword(argument.name):
        return "the name is no Python identifier, such as weight"
    unknown = [dim for times, dim in map(multiple, argument.dims) if dim not in sizes or not times]
    if unknown:
        return f"no size is called {unknown[0]!r}; sizes: {', '.join(sizes)}"
    if argument.below and argument.below not in sizes:
        return f"below={argument.below!r} is no size; sizes: {', '.join(sizes)}"
    if argument.dtype and argument.dtype not in DTYPE_BYTES and argument.dtype not in options:
        return f"dtype {argument.dtype!r} is neither an option nor of {', '.join(TORCH_DTYPES)}"
    unknown = [
        value
        for option in family.options
        if option.name == argument.dtype and _is_tensor(argument)
        for value in option.values
        if value not in DTYPE_BYTES and value not in (SAME, NONE)
    ]
    if unknown:
        return (
            f"its dtype, option {argument.dtype}, may not be {unknown[0]!r}; valid: {', '.join(DTYPE_BYTES)}"
        )
    if argument.when and not _may_be_absent(argument.when, options):
        return f"when={argument.when!r} is no flag, no option that may be none, and no value of an option"
    inputs = [other.name for other in family.declared_arguments if other.kind == "in"]
    if not {*inputs}.issuperset(argument.may_alias):
        return f"it may alias inputs only; inputs: {', '.join(inputs)}"
    if argument.kind == "scalar" and argument.dtype == "bool":
        return "a scalar is a number; a flag is an option whose values are False"
    if argument.kind == "scalar" and not _is_pair_of_numbers(argument.values):
        return f"values are {argument.values!r}; give two numbers, the usual one and another, as (1.0, -0.5)"
    if _is_tensor(argument) and not argument.dims:
        return f"a tensor has at least one size; sizes: {', '.join(sizes)}"
    if type(argument.align_bytes) is not int or argument.align_bytes not in _ALIGNMENTS:
        valid = ", ".join(map(str, _ALIGNMENTS))
        return f"align_bytes={argument.align_bytes!r} must be a power of two, at most 16; valid: {valid}"
    return ""


def _mistake_of_rows(argument: Declared, rows: str) -> str:
    """Return what is wrong with a tensor of problems that are independent along a size."""
    if not rows or not _is_tensor(argument):
        return ""
    times, size = multiple(argument.dims[0])
    if size == rows and times != 1:
        return f"rows={rows!r} must be whole in its first size {argument.dims[0]!r}; leave rows out"
    first = rows == argument.dims[0] or argument.kind == "in"
    later = [size for _, size in map(multiple, argument.dims[1:])]
    if not first or rows in later:
        return (
            f"rows={rows!r} must be its first size, because rows are independent of each other; "
            "leave rows out where they are not"
        )
    return ""


def _is_pair_of_numbers(values: object) -> bool:
    return (
        isinstance(values, (tuple, list))
        and len(values) == 2
        and all(type(value) in (int, float) for value in values)
    )


def _is_tensor(argument: Declared) -> bool:
    return argument.kind in ("in", "out", "inout")


def _may_be_absent(when: str, options: Mapping[str, Option]) -> bool:
    name, equals, values = when.partition("=")
    option = options.get(name)
    if option is None or not equals:
        return option is not None and (option.is_flag or NONE in option.values)
    return {*option.values} > {*values.split(",")}
