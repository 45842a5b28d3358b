"""The GEMM under ``torch.func``: ``vmap`` makes a batch of mapped operands, ``grad`` finds the formula."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.torch_ops.gemm_gradient import backward_of, setup_operator

if TYPE_CHECKING:
    import torch

__all__ = ["are_active", "map_operator", "transformed_gemm"]

_TENSORS = 6  # a, b and four optional ones come first
_NAMES, _CONFIG = 6, 11


@cache
def are_active() -> Callable[[], bool]:
    """Return what tells whether a transform of ``torch.func`` is at work."""
    import torch

    found: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
    return found


def transformed_gemm(*arguments: Any) -> torch.Tensor:
    """Return what the operator ``cutegen::gemm`` returns, while a transform is at work."""
    found: torch.Tensor = _function().apply(*arguments)
    return found


@cache
def _function() -> Any:
    """Return the autograd function that transforms can look into: made once, as its base class is torch's.

    The formula that is registered with the operator is none: torch.func does not take those.
    """
    import torch

    class Gemm(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> torch.Tensor:
            found: torch.Tensor = torch.ops.cutegen.gemm.default(*arguments)
            return found

        setup_context = staticmethod(setup_operator)
        backward = staticmethod(backward_of(transformed_gemm))

    return Gemm


def map_operator(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    """Return the results of ``cutegen::gemm`` for mapped operands, and the axis that counts them.

    Rows of a mapped A are rows of one GEMM, if B is not mapped; a mapped B makes it a batched one. What is
    batched before, has a config of its own, or maps a vector, is computed one by one.
    """
    import torch

    gemm = torch.ops.cutegen.gemm.default
    size = info.batch_size
    found = [
        tensor if dim is None or tensor is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(arguments[:_TENSORS], in_dims, strict=False)
    ]
    rest, names = arguments[_TENSORS:], arguments[_NAMES].split()
    is_mapped = [dim is not None for dim in in_dims[:_TENSORS]]
    a, b, *extras = found
    vectors = [mapped for name, mapped in zip(names, is_mapped[2:], strict=False) if name != "c"]
    rank = a.dim() - is_mapped[0]
    with_column = "bias" in names and extras[names.index("bias")].dim() > 1
    if rank != 2 or any(vectors) or with_column or arguments[_CONFIG] is not None:
        alone = [
            gemm(*(t[at] if m else t for t, m in zip(found, is_mapped, strict=True)), *rest)
            for at in range(size)
        ]
        return torch.stack(alone), 0
    if "c" in names:
        at = names.index("c")
        extras[at] = (extras[at] if is_mapped[2 + at] else extras[at].expand(size, -1, -1)).contiguous()
    if is_mapped[1]:
        a = a if is_mapped[0] else a.expand(size, -1, -1).contiguous()
        return gemm(a, b, *extras, *rest), 0
    rows = a.shape[1] if is_mapped[0] else a.shape[0]
    flat = a.reshape(size * rows, -1) if is_mapped[0] else a.repeat(size, 1)
    if "c" in names:
        extras[names.index("c")] = extras[names.index("c")].flatten(0, 1)
    return gemm(flat, b, *extras, *rest).unflatten(0, (size, rows)), 0
