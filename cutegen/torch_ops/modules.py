"""Layers of a model that call cutegen: ``torch.nn.Linear`` swapped in place, and back.

A swapped layer never refuses: what no kernel computes, torch does, counted with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import CutegenError, FrozenError
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops.gemm import linear
from cutegen.torch_ops.gemm import prepare as prepare_gemm

if TYPE_CHECKING:
    import torch

__all__ = ["Swapped", "optimize", "prepare", "restore", "unfit"]

_ROW_BYTES = 16  # what TMA asks of addresses and pitches
_DEVICE = "cuda"
_AUTOCAST = "autocast casts fp32 parameters, and torch keeps the casts"


@dataclass(frozen=True)
class Swapped:
    """What :func:`optimize` did.

    Attributes:
        layers: Names of the layers that call cutegen now.
        skipped: Names of other linear layers, with the reason.
    """

    layers: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)


def optimize(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    *,
    fuse_wgrad: bool = False,
) -> Swapped:
    """Let the linear layers of ``model`` call :func:`cutegen.linear`, in place.

    Parameters, buffers, hooks, names and ``state_dict`` stay what they are; the layers are still instances of
    ``torch.nn.Linear``, and copy and pickle. A call that no kernel answers is computed by torch and counted:
    :func:`cutegen.counters`. Do it before wrapping in FSDP, before adapters such as LoRA or after them.

    Args:
        model: Any module.
        filter_fn: Whether to swap a layer, from the layer and its qualified name; all by default.
        fuse_wgrad: As for :func:`cutegen.linear`.
    """
    import torch

    layers, skipped, ours = [], {}, _linear_class()
    for name, module in model.named_modules():
        own = isinstance(module, ours)
        if not isinstance(module, torch.nn.Linear) or (own and module.fuse_wgrad is not None):
            continue
        if type(module) is not torch.nn.Linear and not own:
            skipped[name] = f"its class is {type(module).__name__}, which may compute something else"
        elif filter_fn is not None and not filter_fn(module, name):
            skipped[name] = "filter_fn said no"
        else:
            if not own:
                module.__class__ = ours
            vars(module)["fuse_wgrad"] = fuse_wgrad
            layers.append(name)
    return Swapped(tuple(layers), skipped)


def restore(model: torch.nn.Module) -> int:
    """Undo :func:`optimize`; return how many layers call torch again.

    They are ``torch.nn.Linear`` again, but for those above which FSDP2 or a parametrisation has put a class.
    """
    import torch

    found, ours = 0, _linear_class()
    for module in model.modules():
        if isinstance(module, ours) and vars(module).pop("fuse_wgrad", None) is not None:
            found += 1
            if type(module) is ours:
                module.__class__ = torch.nn.Linear
    return found


@cache
def _linear_class() -> Any:
    """Return the class of swapped layers: made once, as its base class is torch's."""
    import torch

    compiler: Any = torch.compiler
    note = compiler.assume_constant_result(fallbacks.count)  # while tracing, called once

    class Linear(torch.nn.Linear):
        """A linear layer that calls cutegen where a kernel takes the operands."""

        fuse_wgrad: bool | None = None  # None: restored, below a class of somebody else

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            weight, bias, fuse_wgrad = self.weight, self.bias, self.fuse_wgrad
            if fuse_wgrad is None:
                return super().forward(input)
            if torch.compiler.is_compiling():
                reason = unfit(input, weight, bias)
                if not reason:
                    return linear(input, weight, bias)
                note(reason)
                return torch.nn.functional.linear(input, weight, bias)
            return _call(input, weight, bias, fuse_wgrad)

    Linear.__module__, Linear.__qualname__ = __name__, "Linear"  # how pickle finds it
    return Linear


def _call(x: Any, w: Any, bias: Any, fuse_wgrad: bool) -> torch.Tensor:
    """Return the result of an eager call, by cutegen or by torch."""
    import torch

    if w.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        reason = _AUTOCAST
    else:
        reason = fallbacks.known(_kind, x, w, bias)
    if not reason:
        try:
            return linear(x, w, bias, fuse_wgrad=fuse_wgrad)
        except FrozenError:  # asked for by freeze(on_miss="error")
            raise
        except (CutegenError, NotImplementedError) as error:  # the latter from classes such as DTensor
            reason = unfit(x, w, bias) or _unaligned(x, w) or str(error)
            fallbacks.refuse(_kind(x, w, bias), reason)
    fallbacks.count(reason)
    return torch.nn.functional.linear(x, w, bias)


def _unaligned(x: Any, w: Any) -> str:
    names = [name for name, tensor in (("input", x), ("weight", w)) if tensor.data_ptr() % _ROW_BYTES]
    return f"the {names[0]} does not start at a multiple of 16 bytes" if names else ""


def _kind(x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
    return (
        *(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15),
        *(w.shape, w.stride(), w.dtype, w.device, w.data_ptr() & 15),
        None if bias is None else (bias.dtype, bias.device, bias.stride()),
    )


def unfit(x: Any, w: Any, bias: Any) -> str:
    """Return why no kernel takes these operands, as far as torch knows it while tracing; else nothing."""
    import torch

    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"the input is {x.dtype}; kernels take torch.bfloat16 and torch.float16"
    if w.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return f"input and parameters differ in dtype: {x.dtype}, {w.dtype}"
    if x.device.type != _DEVICE:
        return f"the input is on {x.device.type}"
    if x.numel() == 0:
        return "the input is empty"
    for name, tensor in (("input", x), ("weight", w)):
        size = tensor.element_size()
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return f"the {name} is not contiguous along its rows"
        if tensor.shape[-1] * size % _ROW_BYTES:
            return f"rows of the {name} do not start at multiples of 16 bytes"
    return ""


def __getattr__(name: str) -> Any:
    if name == "Linear":
        return _linear_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    prepare_gemm()
    _linear_class()
