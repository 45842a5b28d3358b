"""What lets a module of any class call cutegen in place, and torch again: a class above its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.errors import CutegenError, FrozenError
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops import gemm as state

if TYPE_CHECKING:
    import torch

__all__ = [
    "Call",
    "answered",
    "class_of",
    "has_hooks",
    "is_recorded",
    "is_swapped",
    "prepare",
    "shadow",
    "swap",
    "tried",
    "unswap",
    "why_not_swapped",
]

#: Counts a reason while a compiler traces; torch's tracer is told by :func:`prepare` to call it.
_note: Callable[[str], None] = fallbacks.count


class Call:
    """How a swapped module computes; kept with the module, copied and pickled with it.

    Attributes:
        compiled: Why compilers get the module's own forward, which they fuse with what is around it.
    """

    compiled: ClassVar[str]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.prepare()  # a process that gets a model by pickle may have called nothing of ours yet

    @staticmethod
    def prepare() -> None:
        """Register the operators that such modules call; again does nothing."""

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether it computes calls with these arguments: with one tensor, by position."""
        import torch

        return len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what ``forward``, the module's own, would return for these arguments."""
        raise NotImplementedError


def swap(module: torch.nn.Module, call: Call) -> None:
    """Let ``module`` compute by ``call`` from now on, where that takes the arguments."""
    if not hasattr(module, "cutegen_call"):
        own: Any = type(module)
        module.__class__ = _class_above(own, own.forward)
    vars(module)["cutegen_call"] = call


def unswap(module: torch.nn.Module) -> bool:
    """Let ``module`` compute by its own class again; return whether it did not."""
    if vars(module).pop("cutegen_call", None) is None:
        return False
    own: Any = type(module)
    if "_below" in vars(own):  # else somebody has put a class above ours
        module.__class__ = own._below
    return True


def is_swapped(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is swapped."""
    return getattr(module, "cutegen_call", None) is not None


def class_of(module: torch.nn.Module) -> type:
    """Return a module's class, without what was put above it."""
    found: type = getattr(type(module), "_below", type(module))
    return found


def shadow(module: torch.nn.Module, training: bool | None = None) -> Any:
    """Return a module of the same class, without what was put above it, that has the same parts.

    Args:
        module: Any.
        training: Whether what is returned trains; as ``module`` by default.
    """
    found: Any = object.__new__(class_of(module))
    vars(found).update(vars(module))
    vars(found).pop("cutegen_call", None)
    if training is not None:
        vars(found)["training"] = training
    return found


def tried(code: Callable[[], Any]) -> Any:
    """Return what code of others returns, run on small numbers on the CPU; None if it fails, however it does.

    No gradient is recorded, and no mode that is active has a part in it, such as one that makes tensors fake.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    try:
        with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
            return code()
    except Exception:  # noqa: BLE001 - whatever it raises, the module is left alone
        return None


def why_not_swapped(module: torch.nn.Module) -> str:
    """Return why a module's class cannot have another above it; else nothing."""
    if "forward" in vars(module):
        return "its forward is not that of its class"
    if not hasattr(module, "cutegen_call") and any(
        base.__name__ == "FSDPModule" for base in type(module).__mro__
    ):
        return f"its class is {type(module).__name__}; optimize before wrapping in FSDP"
    return ""


@cache
def _class_above(base: Any, known: Any) -> Any:
    """Return the class above ``base`` for modules that were told apart by its forward, which is ``known``."""

    class Swapped(base):  # type: ignore[misc]
        cutegen_call: Call | None = None
        _below = base

        @wraps(base.forward)  # whose parameters are those that programs ask for
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            call = self.cutegen_call
            if call is None or not call.takes(args, kwargs):
                return super().forward(*args, **kwargs)
            if _left_to_compiler(call.compiled) or is_recorded():
                return super().forward(*args, **kwargs)
            if base.forward is not known:
                fallbacks.count("the forward of its class is another one than when a module was swapped")
                return super().forward(*args, **kwargs)
            return call(self, super().forward, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            made, arguments, *rest = super().__reduce_ex__(protocol)
            if type(self) is not Swapped:
                return made, arguments, *rest
            return _new, (base, base.forward is known), *rest

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Swapped, name, getattr(base, name))
    return Swapped


def _new(base: Any, is_known: bool = True) -> Any:
    """Return an empty module of the class above ``base``, for pickle and copies to fill.

    Args:
        base: The class below.
        is_known: Whether its forward was that by which the module was told apart.
    """
    made = _class_above(base, base.forward if is_known else None)
    return made.__new__(made)


def _left_to_compiler(reason: str) -> bool:
    """Return whether a compiler traces, and count it then."""
    import torch

    if not torch.compiler.is_compiling():
        return False
    _note(reason)
    return True


def is_recorded() -> bool:
    """Return whether only torch's operators are heard: by ``torch.jit.trace``, or forward-mode gradients."""
    import torch  # here, since every call of a layer asks

    return torch._C._get_tracing_state() is not None or torch.autograd.forward_ad._current_level >= 0


def has_hooks(module: Any) -> bool:
    """Return whether something listens to a module, which would not hear that it was left out."""
    import torch

    globally: Any = torch.nn.modules.module
    return _has_own_hooks(module) or bool(globally._has_any_global_hook())


def _has_own_hooks(module: Any) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _kind(*operands: Any) -> tuple[Hashable, ...]:
    """Return what decides whether a kernel takes operands; of what is no tensor, itself."""
    return tuple(
        (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15) if hasattr(t, "stride") else t
        for t in operands
    )


def answered(call: Callable[..., Any], torchs: Callable[[], Any], what: str, *operands: Any) -> Any:
    """Return ``call(*operands)``, or where cutegen refuses them what ``torchs`` returns, and count why.

    Args:
        call: By cutegen.
        torchs: By torch.
        what: Which of such calls it is; two kinds may not share what was refused.
        operands: Tensors, and what else decides.

    Raises:
        FrozenError: As :func:`cutegen.freeze` was told.
    """
    if state.is_transforming():  # tensors have no memory then, by which calls are told apart
        reason = f"{what}: a transform of torch.func is at work"
    else:
        reason = fallbacks.known(_kind, what, *operands)
    if not reason:
        try:
            return call(*operands)
        except FrozenError:  # asked for by freeze(on_miss="error")
            raise
        except (CutegenError, NotImplementedError) as error:  # the latter from classes such as DTensor
            reason = f"{what}: {error}"
            fallbacks.refuse(_kind(what, *operands), reason)
    fallbacks.count(reason)
    return torchs()


def prepare() -> None:
    """Import torch, and tell its tracer how to count; again does nothing."""
    global _note
    import torch

    if _note is fallbacks.count:
        compiler: Any = torch.compiler
        _note = compiler.assume_constant_result(fallbacks.count)
