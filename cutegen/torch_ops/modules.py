"""Layers of a model that call cutegen: linear layers, norms, gated MLPs and rotary embeddings, and back.

A swapped layer never refuses: what no kernel computes, torch does, counted with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutegen.errors import UsageError
from cutegen.torch_ops import swaps
from cutegen.torch_ops.gated_gemm import prepare as prepare_gates
from cutegen.torch_ops.gated_modules import gated_call
from cutegen.torch_ops.gemm import prepare as prepare_gemm
from cutegen.torch_ops.linear_modules import linear_class
from cutegen.torch_ops.norm_modules import norm_call
from cutegen.torch_ops.norms import prepare as prepare_norms
from cutegen.torch_ops.rope import prepare as prepare_rope
from cutegen.torch_ops.rotary_modules import is_rotary, let_functions_ask, rotary_call

if TYPE_CHECKING:
    import torch

__all__ = ["Swapped", "optimize", "prepare", "restore", "restore_one"]

_SCRIPTED = "TorchScript compiled it"
_NOT_WANTED = "filter_fn said no"
_NO_FUNCTION = "no function beside the classes of the model rotates queries and keys by its tables"


@dataclass(frozen=True)
class Swapped:
    """What :func:`optimize` did.

    Attributes:
        layers: Names of the linear layers that call cutegen now.
        norms: Names of the norms that do.
        gates: Names of the gated MLPs that do.
        ropes: Names of the modules by whose tables queries and keys are rotated by cutegen.
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
      same with gate and up in one layer, call :func:`cutegen.gated_gemm` for all but their last layer, on
      GPUs that have its kernels; elsewhere, and where these layers are more than GEMMs (a bias, hooks,
      adapters, ``fuse_wgrad``), :func:`cutegen.gated` between their layers. ``act`` is silu, gelu in both
      forms, or relu.
    - Queries and keys are rotated by :func:`cutegen.rope` where a module without parameters makes the tables,
      from positions, and a function (q, k, cos, sin, ...) rotates by them, as in Transformers. The module is
      tried and its tables are marked; the function is tried, and replaced in the namespace of the model's
      classes by one that asks whether tables are marked, and is itself for those of other models.

    ``torch.nn.LayerNorm`` is left alone and listed: :func:`cutegen.layer_norm` is experimental.

    Parameters, buffers, hooks, names and ``state_dict`` stay what they are; modules are still instances of
    their classes, and copy and pickle. A call that no kernel answers is computed by torch and counted:
    :func:`cutegen.counters`. Where torch rounds between the steps of a norm or a gate, cutegen rounds once.
    Under torch.compile norms, gates and rotary embeddings are left to it, where the backend ``cutegen`` finds
    gates again. Do it before wrapping in FSDP,
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
        if isinstance(module, torch.jit.ScriptModule):
            if module.original_name == "Linear":
                skipped[name] = _SCRIPTED
        elif isinstance(module, torch.nn.Linear):
            reason = _swap_linear(module, name, filter_fn, fuse_wgrad)
            if reason == "":
                layers.append(name)
            elif reason is not None:
                skipped[name] = reason
        elif not swaps.is_swapped(module):
            _swap_other(module, name, filter_fn, found, skipped)
    # Of models that were swapped by another process, and came here by pickle, no function asks yet.
    if (found["ropes"] or any(map(is_rotary, model.modules()))) and not let_functions_ask(model):
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

    ours = linear_class()
    own = isinstance(module, ours)
    if own and module.fuse_wgrad is not None:
        return None
    if type(module) is not torch.nn.Linear and not own:
        return f"its class is {type(module).__name__}, which may compute something else"
    if torch.nn.Linear.forward.__module__ != torch.nn.Linear.__module__:
        return "torch.nn.Linear.forward is not torch's"
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

    ours = linear_class()
    if not isinstance(module, ours):
        return swaps.unswap(module)
    if vars(module).pop("fuse_wgrad", None) is None:
        return False
    if type(module) is ours:
        module.__class__ = torch.nn.Linear
    return True


def __getattr__(name: str) -> Any:
    if name == "Linear":
        prepare()  # a process that gets a model by pickle may have called nothing of ours yet
        return linear_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prepare() -> None:
    """Import torch and register the operators with it; again does nothing."""
    prepare_gemm()
    prepare_norms()
    prepare_gates()
    prepare_rope()
    swaps.prepare()
    linear_class()
