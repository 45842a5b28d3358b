"""The operators as torch knows them: schemas, implementations and shapes for ``torch.compile`` and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutegen.operands import TORCH_DTYPES, out_dtype_name

if TYPE_CHECKING:
    import torch
    from torch import library as registry

__all__ = ["register"]

_OPTIONS = (
    "Tensor? c, float alpha, float beta, Tensor? bias, str activation, ScalarType? out_dtype, str? config, "
    "Tensor? scale_a, Tensor? scale_b, bool fast_accum, bool any_order"
)
GEMM = f"gemm(Tensor a, Tensor b, {_OPTIONS}) -> Tensor"
GEMM_OUT = f"gemm_out(Tensor a, Tensor b, Tensor(a!) out, {_OPTIONS}) -> ()"

#: Registrations end when their library object does.
_libraries: list[registry.Library] = []


def register(run: Callable[..., torch.Tensor]) -> None:
    """Register ``cutegen::gemm`` and ``cutegen::gemm_out``, both running ``run`` on real tensors.

    Args:
        run: ``(a, b, out, *options)`` to the result, options as in the schema.
    """
    import torch
    from torch import library as registry

    api: Any = registry  # not annotated in all versions

    def gemm(a: Any, b: Any, *options: Any) -> torch.Tensor:
        return run(a, b, None, *options)

    def gemm_out(a: Any, b: Any, out: Any, *options: Any) -> None:
        run(a, b, out, *options)

    library = api.Library("cutegen", "DEF")
    # Kernels depend on strides, so a compiler must not choose others for the operands.
    strict = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    for schema, implementation, shapes in ((GEMM, gemm, _gemm_shape), (GEMM_OUT, gemm_out, _gemm_out_shape)):
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, strict))
        library.impl(name, implementation, "CompositeExplicitAutograd")
        api.register_fake(f"cutegen::{name}", shapes, lib=library)
    _libraries.append(library)


def _gemm_shape(a: Any, b: Any, *options: Any) -> torch.Tensor:
    """The result's shape, dtype and device, without computing; sizes may be symbols."""
    import torch

    _check(a, b)
    dtype = getattr(torch, TORCH_DTYPES[out_dtype_name(a.dtype, options[5])])
    result: torch.Tensor = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)
    return result


def _gemm_out_shape(a: Any, b: Any, out: Any, *options: Any) -> None:
    """Nothing new comes out; only the sizes must fit."""
    _check(a, b)
    _require(out.dim() == a.dim(), lambda: f"out has {out.dim()} dimensions but a has {a.dim()}")


def _check(a: Any, b: Any) -> None:
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
