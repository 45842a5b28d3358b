"""Linear layers that call :func:`cutegen.linear`: one class above torch's, which tells no module apart."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import CutegenError, FrozenError
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops import gemm as state
from cutegen.torch_ops.gemm import linear
from cutegen.torch_ops.swaps import has_hooks, is_recorded

if TYPE_CHECKING:
    import torch

__all__ = ["linear_class", "plain_weight", "unfit"]

_ROW_BYTES = 16  # what TMA asks of addresses and pitches
_DEVICE = "cuda"
_AUTOCAST = "autocast casts fp32 parameters, and torch keeps the casts"
_RECORDED = "torch.jit.trace or forward-mode gradients hear torch's operators only"
#: Where the class is found by pickle.
_HOME = "cutegen.torch_ops.modules"


@cache
def linear_class() -> Any:
    """Return the class of swapped layers: made once, as its base class is torch's."""
    import torch

    compiler: Any = torch.compiler
    note = compiler.assume_constant_result(fallbacks.count)  # while tracing, called once

    class Linear(torch.nn.Linear):
        """A linear layer that calls cutegen where a kernel takes the operands."""

        fuse_wgrad: bool | None = None  # None: restored, below a class of somebody else

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            weight, bias, fuse_wgrad = self.weight, self.bias, self.fuse_wgrad
            if fuse_wgrad is None or not isinstance(input, torch.Tensor):
                return super().forward(input)
            if torch.compiler.is_compiling():
                reason = unfit(input, weight, bias)
                if not reason:
                    return linear(input, weight, bias)
                note(reason)
                return torch.nn.functional.linear(input, weight, bias)
            return _call(input, weight, bias, fuse_wgrad)

    Linear.__module__, Linear.__qualname__ = _HOME, "Linear"
    return Linear


def _call(x: Any, w: Any, bias: Any, fuse_wgrad: bool) -> torch.Tensor:
    """Return the result of an eager call, by cutegen or by torch."""
    import torch

    transformed = state.is_transforming()  # tensors have no memory then, by which calls are told apart
    reason, kind = _cast(x, w), _kind
    if reason == _AUTOCAST and fuse_wgrad and _accumulates(w):
        reason, kind = "", _cast_kind  # torch's own call would leave main_grad as it is
    if not reason and not transformed:
        reason = _RECORDED if is_recorded() else fallbacks.known(kind, x, w, bias)
    if not reason:
        try:
            return linear(x, w, bias, fuse_wgrad=fuse_wgrad)
        except FrozenError:  # asked for by freeze(on_miss="error")
            raise
        except (CutegenError, NotImplementedError) as error:  # the latter from classes such as DTensor
            why = "" if kind is _cast_kind else unfit(x, w, bias) or ("" if transformed else _unaligned(x, w))
            reason = why or str(error)
            if not transformed:
                fallbacks.refuse(kind(x, w, bias), reason)
    fallbacks.count(reason)
    return torch.nn.functional.linear(x, w, bias)


def _accumulates(w: Any) -> bool:
    """Return whether autograd is to add the gradient of a weight to a buffer of its own."""
    return state.is_grad_enabled() and w.requires_grad and getattr(w, "main_grad", None) is not None


def _cast(x: Any, w: Any) -> str:
    """Return why autocast lets torch compute a layer; else nothing."""
    import torch

    if not torch.is_autocast_enabled(_DEVICE) or x.device.type != _DEVICE:
        return ""
    if w.dtype == torch.float32:
        return _AUTOCAST
    wanted = torch.get_autocast_dtype(_DEVICE)
    return "" if w.dtype == wanted else f"autocast casts parameters of {w.dtype} to {wanted}"


def _unaligned(x: Any, w: Any) -> str:
    names = [name for name, tensor in (("input", x), ("weight", w)) if tensor.data_ptr() % _ROW_BYTES]
    return f"the {names[0]} does not start at a multiple of 16 bytes" if names else ""


def _kind(x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
    return (
        *(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15),
        *(w.shape, w.stride(), w.dtype, w.device, w.data_ptr() & 15),
        None if bias is None else (bias.dtype, bias.device, bias.stride()),
    )


def _cast_kind(x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
    """As :func:`_kind`, of calls whose fp32 operands are cast to the dtype of autocast."""
    import torch

    return torch.get_autocast_dtype(_DEVICE), *_kind(x, w, bias)


def unfit(x: Any, w: Any, bias: Any) -> str:
    """Return why no kernel takes these operands, as far as torch knows it while tracing; else nothing."""
    import torch

    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the input is {x.dtype}; kernels take torch.bfloat16 and torch.float16"
    if w.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return f"input and parameters differ in dtype: {x.dtype}, {w.dtype}"
    if x.device.type != _DEVICE:
        return f"the input is on {x.device.type}"
    if reason := _cast(x, w):
        return reason
    if x.numel() == 0:
        return "the input is empty"
    for name, tensor in (("input", x), ("weight", w)):
        size = tensor.element_size()
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return f"the {name} is not contiguous along its rows"
        if tensor.shape[-1] * size % _ROW_BYTES:
            return f"rows of the {name} do not start at multiples of 16 bytes"
    return ""


def plain_weight(layer: Any) -> Any:
    """Return the weight of a layer of which a kernel may compute more than the GEMM; else None.

    It is swapped and nothing else: no hooks listen, nobody has put a class above it or parametrised it, there
    is no bias, its weight is one tensor in memory, and autograd adds the gradient to no other one.
    """
    if type(layer) is not linear_class() or layer.fuse_wgrad is not False or "forward" in vars(layer):
        return None
    weight = layer._parameters.get("weight")
    if weight is None or layer.bias is not None or has_hooks(layer) or hasattr(weight, "__tensor_flatten__"):
        return None
    return weight
