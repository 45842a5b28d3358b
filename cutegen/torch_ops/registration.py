"""The operators as torch knows them: schemas, implementations and shapes for ``torch.compile`` and export.

``cutegen::gemm`` returns a new tensor. ``cutegen::gemm.out`` is the same GEMM into a given one, with the
tag by which Inductor finds it: from torch 2.14 on, Inductor replaces ``gemm`` by it and plans the memory of
the result. ``cutegen::gemm_into`` is what a traced call with ``out=`` becomes. It returns nothing, so every
supported torch can functionalize it, and Inductor lets it write into the caller's memory; for an operator
with the tag ``out``, Inductor would add a buffer and a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from cutegen.dtypes import TORCH_DTYPES
from cutegen.families.gemm.operands import Request, check_traced, out_dtype_name
from cutegen.runtime.recorder import is_recording
from cutegen.torch_ops.fake_calls import note_gemm
from cutegen.torch_ops.flop_formulas import give_formulas
from cutegen.torch_ops.gemm_gradient import backward_of_operator, setup_operator
from cutegen.torch_ops.gemm_plan import Options, as_text
from cutegen.torch_ops.gemm_transforms import map_operator

if TYPE_CHECKING:
    import torch
    from torch import library as registry

__all__ = ["pack", "register", "unpack"]

#: Optional tensors of a GEMM, in the order in which they are passed.
_EXTRAS = ("c", "bias", "scale_a", "scale_b")

# When Inductor replaces gemm by gemm.out it passes the tensors first and everything else, None included,
# behind them, whatever the places in the schema (torch 2.14 and 2.15, torch/_inductor/ir.py,
# FallbackKernel.create). So the tensors that are given come first, then None for the others, and ``extras``
# names what is what.
_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? extra0, Tensor? extra1, Tensor? extra2, Tensor? extra3, str extras, "
    "float alpha, float beta, str activation, ScalarType? out_dtype, str? config, bool fast_accum, "
    "bool any_order"
)
GEMM = f"gemm({_ARGUMENTS}) -> Tensor"
GEMM_OUT = f"gemm.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)"
GEMM_INTO = f"gemm_into(Tensor(a!) out, {_ARGUMENTS}) -> ()"

#: Registrations end when their library object does.
_libraries: list[registry.Library] = []


def pack(options: Options) -> tuple[Any, ...]:
    """Return what the operators take behind a and b, for the options of a GEMM; torch can trace this."""
    c, alpha, beta, bias, activation, out_dtype, config, more = options
    scale_a, scale_b, fast_accum, any_order = more or (None, None, False, False)
    given = [(n, t) for n, t in zip(_EXTRAS, (c, bias, scale_a, scale_b), strict=True) if t is not None]
    tensors = [tensor for _, tensor in given] + [None] * (len(_EXTRAS) - len(given))
    names = " ".join([name for name, _ in given])
    text = None if config is None else as_text(config)
    return (*tensors, names, float(alpha), float(beta), activation, out_dtype, text, fast_accum, any_order)


def unpack(arguments: tuple[Any, ...]) -> Options:
    """Return the options for which :func:`pack` returned ``arguments``, in its order."""
    names, alpha, beta, activation, out_dtype, config, fast_accum, any_order = arguments[4:]
    c = bias = scale_a = scale_b = None
    if names:
        c, bias, scale_a, scale_b = _order(names)((*arguments[:4], None))
    plain = scale_a is None and scale_b is None and not fast_accum and not any_order
    more = None if plain else (scale_a, scale_b, fast_accum, any_order)
    return c, alpha, beta, bias, activation, out_dtype, config, more


@cache
def _order(names: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return the function that puts the four tensors named ``names``, and None behind them, into order."""
    given = names.split()
    return itemgetter(*(given.index(name) if name in given else len(_EXTRAS) for name in _EXTRAS))


def register(run: Callable[..., torch.Tensor]) -> None:
    """Register ``cutegen::gemm``, ``cutegen::gemm.out`` and ``cutegen::gemm_into``, running ``run``.

    Args:
        run: ``(a, b, out, *arguments)`` to the result, with the arguments behind b as in the schemas.
    """
    from torch import library as registry

    api: Any = registry  # not annotated in all versions

    def gemm(a: Any, b: Any, *arguments: Any) -> torch.Tensor:
        return run(a, b, None, *arguments)

    def gemm_out(a: Any, b: Any, *arguments: Any, out: Any) -> torch.Tensor:
        return run(a, b, out, *arguments)

    def gemm_into(out: Any, a: Any, b: Any, *arguments: Any) -> None:
        run(a, b, out, *arguments)

    library = api.Library("cutegen", "DEF")
    for schema, implementation, shapes, tags in (
        (GEMM, gemm, _gemm_shape, _tags()),
        (GEMM_OUT, gemm_out, _gemm_out_shape, (*_tags(), *_out_tags())),
        (GEMM_INTO, gemm_into, _gemm_into_shape, _tags()),
    ):
        name = schema.partition("(")[0]
        library.define(schema, tags=tags)
        library.impl(name, implementation, "CompositeExplicitAutograd")
        api.register_fake(f"cutegen::{name}", shapes, lib=library)
    # Before anything can trace the operator: torch keeps what it finds then, and would lose gradients.
    api.register_autograd("cutegen::gemm", backward_of_operator, setup_context=setup_operator, lib=library)
    api.register_vmap("cutegen::gemm", map_operator, lib=library)
    _libraries.append(library)
    for name in ("gemm", "gemm_into"):  # now: the hash of torch.ops.cutegen.gemm changes with each overload
        give_formulas(name)


def _tags() -> tuple[torch.Tag, ...]:
    """Return the tags of all operators.

    Kernels depend on strides, so a compiler must not choose others for the operands.
    """
    import torch

    strict = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    return torch.Tag.pt2_compliant_tag, strict


def _out_tags() -> tuple[torch.Tag, ...]:
    """Return the tag by which Inductor finds out overloads, where that works.

    Inductor looks for the tag ``out_variant`` in torch 2.12 and for ``out`` from 2.13 on. With either version
    compilation fails where an size is a symbol (FallbackKernel.create makes a layout of SymInts); 2.14 has
    mended that.
    """
    import torch

    return (torch.Tag.out,) if torch.__version__ >= "2.14" else ()


def _gemm_shape(a: Any, b: Any, *arguments: Any) -> torch.Tensor:
    """The result's shape, dtype and device, without computing; sizes may be symbols."""
    import torch

    _check(a, b, None, arguments)
    if is_recording():
        note_gemm(a, b, None, unpack(arguments))
    *_, out_dtype, _, _, _ = arguments
    dtype = getattr(torch, TORCH_DTYPES[out_dtype_name(a.dtype, out_dtype)])
    result: torch.Tensor = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
    return result


def _gemm_out_shape(a: Any, b: Any, *arguments: Any, out: Any) -> torch.Tensor:
    """Nothing new comes out; only the operands must fit."""
    _check(a, b, out, arguments)
    _require(out.dim() == a.dim(), lambda: f"out has {out.dim()} dimensions but a has {a.dim()}")
    if is_recording():
        note_gemm(a, b, out, unpack(arguments))
    result: torch.Tensor = out
    return result


def _gemm_into_shape(out: Any, a: Any, b: Any, *arguments: Any) -> None:
    _gemm_out_shape(a, b, *arguments, out=out)


def _check(a: Any, b: Any, out: Any, arguments: tuple[Any, ...]) -> None:
    """Raise what an eager call would; sizes that are symbols are demanded of torch."""
    c, alpha, beta, bias, activation, out_dtype, _, more = unpack(arguments)
    alpha, beta = (number if isinstance(number, float) else 1.0 for number in (alpha, beta))  # no symbols
    check_traced(Request(a, b, out, c, alpha, beta, bias, activation, out_dtype, *(more or ())))
    _require(
        a.dim() in (2, 3) and a.dim() == b.dim(),
        lambda: f"a and b have {a.dim()} and {b.dim()} dimensions; both must have 2, or both 3",
    )
    _require(a.shape[-1] == b.shape[-2], lambda: f"a has {a.shape[-1]} columns but b has {b.shape[-2]} rows")


def _require(holds: Any, message: Callable[[], str]) -> None:
    """Demand what ``holds`` says, which may be a symbol that torch then remembers."""
    import torch

    check: Any = torch._check
    check(holds, message)
