"""Calls with fake tensors, counted while somebody records: shapes of a large model without its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutegen.errors import OperandError
from cutegen.families.calls import describe_call
from cutegen.families.declared import DeclaredFamily
from cutegen.families.gemm.operands import Request, describe
from cutegen.runtime.recorder import note

if TYPE_CHECKING:
    from cutegen.torch_ops.gemm_plan import Options

__all__ = ["note_family_call", "note_gemm"]


class _Stand:
    """What the checks of operands ask of a tensor, for one that has no memory; it counts as aligned."""

    def __init__(self, tensor: Any) -> None:
        self.shape = tuple(map(_number, tensor.shape))
        self.dtype, self.device, self.layout = tensor.dtype, tensor.device, tensor.layout
        self._stride = tuple(map(_number, tensor.stride()))
        self._bytes = tensor.element_size()

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return int(self._bytes)

    def numel(self) -> int:
        found = 1
        for size in self.shape:
            found *= size
        return found

    def get_device(self) -> int:
        return -1 if self.device.index is None else int(self.device.index)

    def data_ptr(self) -> int:
        return 0

    def is_neg(self) -> bool:
        return False


def _number(size: Any) -> int:
    """Return a size; of a symbol the value that it was seen with, since asking for it would add a guard.

    Raises:
        OperandError: It was seen with none.
    """
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    if hint is None:
        raise OperandError(f"size {size} is a symbol without a value")
    return int(hint)


def _is_compiling() -> bool:
    """Return whether a compiler traces: what it traces is no call, and its graph's calls will be counted."""
    import torch

    return torch._guards.TracingContext.try_get() is not None


def _stand(tensor: Any) -> Any:
    return None if tensor is None else _Stand(tensor)


def note_gemm(a: Any, b: Any, out: Any, options: Options) -> None:
    """Count a GEMM of fake tensors; one that no kernel takes is none."""
    if _is_compiling():
        return
    c, alpha, beta, bias, activation, out_dtype, _, more = options
    scale_a, scale_b, fast_accum, any_order = more or (None, None, False, False)
    try:
        shown = [_stand(tensor) for tensor in (a, b, out, c, bias, scale_a, scale_b)]
        a, b, out, c, bias, scale_a, scale_b = shown
        factors = (scale_a, scale_b, fast_accum, any_order)
        request = Request(a, b, out, c, alpha, beta, bias, activation, out_dtype, *factors)
        problem = describe(request, device_type=a.device.type).problem
    except OperandError:
        return
    if problem is not None:
        note(problem)


def note_family_call(
    family: DeclaredFamily,
    tensors: Mapping[str, Any],
    wanted: frozenset[str],
    named: Mapping[str, Any],
) -> None:
    """Count a call of a declared family with fake tensors; one that no kernel takes is none."""
    if _is_compiling():
        return
    try:
        stands = {name: _stand(tensor) for name, tensor in tensors.items()}
        device = next(iter(stands.values())).device
        problem = describe_call(family, stands, wanted, named, device_type=device.type)
    except OperandError:
        return
    note(problem)
