"""Layers of a model that call cutegen: linear layers, norms, gated MLPs and rotary embeddings, and back.

A swapped layer never refuses: what no kernel computes, torch does, counted with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import CutegenError, FrozenError, UsageError
from cutegen.torch_ops import fallbacks, swaps
from cutegen.torch_ops.gated_modules import gated_call
from cutegen.torch_ops.gates import prepare as prepare_gates
from cutegen.torch_ops.gemm import linear
from cutegen.torch_ops.gemm import prepare as prepare_gemm
from cutegen.torch_ops.norm_modules import norm_call
from cutegen.torch_ops.norms import prepare as prepare_norms
from cutegen.torch_ops.rope import prepare as prepare_rope
from cutegen.torch_ops.rotary_modules import let_functions_ask, rotary_call

if TYPE_CHECKING:
    import torch

__all__ = ["Swapped", "optimize", "prepare", "restore", "restore_one", "unfit"]

_ROW_BYTES = 16  # what TMA asks of addresses and pitches
_DEVICE = "cuda"
_NOT_WANTED = "filter_fn said no"
_NO_FUNCTION = "no function beside the classes of the model turns queries and keys by its tables"
_AUTOCAST = "autocast casts fp32 parameters, and torch keeps the casts"


@dataclass(frozen=True)
class Swapped:
    """What :func:`optimize` did.

    Attributes:
        layers: Names of the linear layers that call cutegen now.
        norms: Names of the norms that do.
        gates: Names of the gated MLPs that do.
        ropes: Names of the modules by whose tables queries and keys are turned by cutegen.
        skipped: Names of others of these kinds, with the reason.
    """

    layers: tuple[str, ...]
    norms: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    ropes: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)


def optimize(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    *,
    fuse_wgrad: bool = False,
) -> Swapped:
    """Let the linear layers, norms, gated MLPs and rotary embeddings of ``model`` call cutegen, in place.

    - ``torch.nn.Linear`` calls :func:`cutegen.linear`.
    - ``torch.nn.RMSNorm`` over one dimension, and any class with a weight and an eps whose forward computes
      the same, tried on three rows, call :func:`cutegen.rms_norm`.
    - Modules of two or three linear layers whose forward, traced, is ``down(act(gate(x)) * up(x))``, or the
      same with gate and up in one layer, call :func:`cutegen.gated` between their layers. ``act`` is silu,
      gelu in both forms, or relu.
    - Queries and keys are turned by :func:`cutegen.rope` where a module without parameters makes the tables,
      from positions, and a function (q, k, cos, sin, ...) turns by them, as in Transformers. The module is
      tried and its tables are marked; the function is tried, and replaced in the namespace of the model's
      classes by one that asks whether tables are marked, and is itself for those of other models.

    Parameters, buffers, hooks, names and ``state_dict`` stay what they are; modules are still instances of
    their classes, and copy and pickle. A call that no kernel answers is computed by torch and counted:
    :func:`cutegen.counters`. Where torch rounds between the steps of a norm or a gate, cutegen rounds once.
    Under torch.compile norms, gates and rotary embeddings are left to it. Do it before wrapping in FSDP,
    before adapters such as LoRA or after them.

    Args:
        model: Any module.
        filter_fn: Whether to swap a module of these kinds, from the module and its qualified name; all by
            default.
        fuse_wgrad: As for :func:`cutegen.linear`.

    Raises:
        UsageError: ``model`` is no module.
    """
    import torch

    _require_module(model)
    layers: list[str] = []
    found: dict[str, list[str]] = {"norms": [], "gates": [], "ropes": []}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            reason = _swap_linear(module, name, filter_fn, fuse_wgrad)
            if reason == "":
                layers.append(name)
            elif reason is not None:
                skipped[name] = reason
        elif not swaps.is_swapped(module):
            _swap_other(module, name, filter_fn, found, skipped)
    if found["ropes"] and not let_functions_ask(model):
        for name in found.pop("ropes"):
            swaps.unswap(model.get_submodule(name))
            skipped[name] = _NO_FUNCTION
    kinds = {kind: tuple(names) for kind, names in found.items()}
    return Swapped(tuple(layers), skipped=skipped, **kinds)


def _require_module(model: Any) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")


def _swap_linear(module: Any, name: str, filter_fn: Any, fuse_wgrad: bool) -> str | None:
    """Swap a linear layer; return nothing, or why it is left alone, or None if it was swapped before."""
    import torch

    ours = _linear_class()
    own = isinstance(module, ours)
    if own and module.fuse_wgrad is not None:
        return None
    if type(module) is not torch.nn.Linear and not own:
        return f"its class is {type(module).__name__}, which may compute something else"
    if filter_fn is not None and not filter_fn(module, name):
        return _NOT_WANTED
    if not own:
        module.__class__ = ours
    vars(module)["fuse_wgrad"] = fuse_wgrad
    return ""


def _swap_other(module: Any, name: str, filter_fn: Any, found: Any, skipped: dict[str, str]) -> None:
    """Swap a module if it is a norm or a gated MLP."""
    for kind, recognise in (("norms", norm_call), ("gates", gated_call), ("ropes", rotary_call)):
        call = recognise(module)
        if call is None:
            continue
        if isinstance(call, str):
            skipped[name] = call
        elif reason := swaps.why_not_swapped(module):
            skipped[name] = reason
        elif filter_fn is not None and not filter_fn(module, name):
            skipped[name] = _NOT_WANTED
        else:
            swaps.swap(module, call)
            found[kind].append(name)


def restore(model: torch.nn.Module) -> int:
    """Undo :func:`optimize`; return how many modules call torch again.

    They are of their classes again, but for those above which FSDP2 or a parametrisation has put a class.

    Raises:
        UsageError: ``model`` is no module.
    """
    _require_module(model)
    return sum(map(restore_one, model.modules()))


def restore_one(module: torch.nn.Module) -> bool:
    """Undo :func:`optimize` for one module, not for those in it; return whether it was swapped."""
    import torch

    ours = _linear_class()
    if not isinstance(module, ours):
        return swaps.unswap(module)
    if vars(module).pop("fuse_wgrad", None) is None:
        return False
    if type(module) is ours:
        module.__class__ = torch.nn.Linear
    return True


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
    prepare_norms()
    prepare_gates()
    prepare_rope()
    swaps.prepare()
    _linear_class()
