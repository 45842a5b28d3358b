"""What the manifest of a deployment says of declared families, and of the calls that their kernels answer.

A call is known by what its tensors tell: sizes, dtypes, and whether rows are aligned. The options and sizes
that no tensor tells are given by name.
"""

from __future__ import annotations

from collections.abc import Hashable

from cutegen.digest import Json
from cutegen.dtypes import TMA_ALIGN_BYTES, TORCH_DTYPES
from cutegen.families.declared import DeclaredFamily, DeclaredProblem, multiple
from cutegen.families.declared.arguments import NONE
from cutegen.family import Option

__all__ = ["call_of", "describe", "same_call", "why_no_call"]

_TENSORS = ("in", "out", "inout")


def describe(family: DeclaredFamily) -> dict[str, Json]:
    """Return what the loader must know of a family to bind arguments by name."""
    return {
        "arguments": [
            {
                "name": a.name,
                "kind": a.kind,
                "dims": list(a.dims),
                "optional": bool(a.when),
                **({"anywhere": True} if a.anywhere else {}),
                **({"align_bytes": a.align_bytes} if a.align_bytes != TMA_ALIGN_BYTES else {}),
                "may_alias": list(a.may_alias),
            }
            for a in family.declared_arguments
        ],
        "sizes": {size.name: size.default for size in family.sizes},
        "options": {
            option.name: False if option.is_flag else option.default or NONE
            for option in family.named_options
        },
    }


def call_of(problem: DeclaredProblem) -> dict[str, Json]:
    """Return what the loader knows a call of ``problem`` by."""
    options = dict(problem.options)
    return {
        "sizes": list(problem.sizes.values()),
        "dtypes": {a.name: a.dtype for a in problem.declared.arguments(problem)},
        "options": {
            option.name: options[option.name] or _of_nothing(option)
            for option in problem.declared.named_options
        },
        "unaligned": problem.unaligned,
    }


def same_call(problem: DeclaredProblem) -> Hashable:
    """Return a value that two problems share if no call can tell them apart."""
    return problem.family, str(call_of(problem))


def why_no_call(problem: DeclaredProblem) -> str:
    """Return why no call of a deployment can pose ``problem``; empty if one can."""
    names = {a.name for a in problem.declared.declared_arguments}
    named = [option.name for option in problem.declared.named_options]
    untold = [*named, *_untold_sizes(problem.declared)]
    for name in untold:
        if name in names:
            return f"a call would give both the argument {name} and an option or size of that name"
    for argument in problem.declared.arguments(problem):
        if argument.kind in _TENSORS and argument.dtype not in TORCH_DTYPES:
            return f"torch has no dtype {argument.dtype}, so no call poses it"
    return ""


def _untold_sizes(family: DeclaredFamily) -> list[str]:
    told = {multiple(dim)[1] for a in family.declared_arguments for dim in a.dims}
    return [size.name for size in family.sizes if size.name not in told]


def _of_nothing(option: Option) -> str | bool:
    return False if option.is_flag else NONE
