"""RMSNorm layers that call :func:`cutegen.rms_norm`: torch's, and any whose forward computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.dtypes import short_dtype
from cutegen.families.rmsnorm.family import RMSNORM
from cutegen.torch_ops import fallbacks
from cutegen.torch_ops.norms import prepare, rms_norm
from cutegen.torch_ops.swaps import Call, answered, class_of, shadow, tried

if TYPE_CHECKING:
    import torch

__all__ = ["NormCall", "norm_call", "norm_problem"]

_DEVICE = "cuda"
#: How models call what they add to the mean of the squares.
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_LAYER_NORM = "cutegen.layer_norm is experimental, and not timed in a model; call it where it is to be used"
#: Largest part by which a forward in fp32 may differ from the formula in fp64.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class NormCall(Call):
    """How a swapped norm computes.

    Attributes:
        eps: Added to the mean of the squares.
        name: Attribute of the module that holds it.
        place: Dtype and device for which ``eps`` is torch's own choice; None if the module says it.
    """

    eps: float
    name: str = "eps"
    place: tuple[Any, str] | None = None
    compiled: ClassVar[str] = "a norm under torch.compile, which fuses it with its neighbours"
    prepare = staticmethod(prepare)

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (x,) = args
        weight = module.weight
        if reason := self._unfit(module, x, weight):
            fallbacks.count(f"a norm: {reason}")
            return forward(x)
        return answered(rms_norm, lambda: forward(x), "a norm", x, weight, self.eps)

    def _unfit(self, module: Any, x: Any, weight: Any) -> str:
        """Return why torch would compute something else, or why no kernel takes the rows; else nothing."""
        import torch

        if x.device.type != _DEVICE:
            return f"the input is on {x.device.type}"
        if weight is not None and weight.dtype != x.dtype:
            return f"input and weight differ in dtype: {x.dtype}, {weight.dtype}"
        if torch.is_autocast_enabled(_DEVICE):
            return "autocast decides in which dtype torch computes it"
        place = self.place
        if getattr(module, self.name, None) != (self.eps if place is None else None):
            return f"its {self.name} has changed since it was swapped"
        if place is not None and place != (x.dtype, x.device.type):
            return "its eps is torch's choice by dtype and device, which were others when it was swapped"
        return "" if x.numel() else "the input is empty"


def norm_call(module: Any) -> NormCall | str | None:
    """Return how a norm of rows may call cutegen, why it may not, or None if it is no such norm."""
    import torch

    own = getattr(torch.nn, "RMSNorm", None)
    is_torchs = own is not None and own.forward.__module__ == own.__module__  # else somebody replaced it
    if is_torchs and class_of(module) is own:
        if len(module.normalized_shape) != 1:
            return "it normalises more than one dimension"
        return NormCall(module.eps) if module.eps is not None else _torchs_choice(module.weight)
    if class_of(module) is torch.nn.LayerNorm:
        return _LAYER_NORM
    name = next((name for name in _EPS_NAMES if isinstance(vars(module).get(name), float)), None)
    weight = module._parameters.get("weight")
    if name is None or weight is None or weight.dim() != 1:
        return None
    if len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    eps = vars(module)[name]
    return NormCall(eps, name) if _is_rms_norm(module, eps) else "its forward is not that of RMSNorm"


def _torchs_choice(weight: Any) -> NormCall | str:
    """Return the call of a norm without an eps of its own: releases of torch differ in what they take."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if weight is None or weight.is_meta:
        return "torch chooses its eps by the input"
    dtype = weight.dtype
    try:
        with torch.no_grad(), _disable_current_modes():  # on numbers, also where tensors are fake
            small = torch.full((1, 8), 1e-3, dtype=dtype, device=weight.device)
            square = float(torch.nn.functional.rms_norm(small, (8,)).double().square().mean())
    except (AssertionError, RuntimeError):  # a GPU that is not here
        return "torch chooses its eps by the device"
    mean = 1e-6  # of the squares, so that y^2 = mean / (mean + eps)
    choices = [torch.finfo(dtype).eps, torch.finfo(torch.float32).eps]
    eps = min(choices, key=lambda eps: abs(square - mean / (mean + eps)))
    return NormCall(eps, place=(dtype, weight.device.type))


def _is_rms_norm(module: torch.nn.Module, eps: float) -> bool:
    """Return whether the forward of a module's class computes the formula, tried on a few rows in fp32.

    What is tried is a copy with a weight of its own, so that neither hooks nor memory have a part in it.
    """
    weight = module._parameters["weight"]
    assert weight is not None
    n = int(weight.shape[0])
    modes = [shadow(module, training) for training in (True, False)]  # on which a forward may depend
    return all(tried(partial(_computes_rms_norm, copied, n, eps)) for copied in modes)


def _computes_rms_norm(copied: Any, n: int, eps: float) -> bool:
    """Return whether it does on rows, however many dimensions hold them, and keeps the dtype of its input."""
    import torch

    generator, fp32 = torch.Generator().manual_seed(0), torch.float32  # whatever the default dtype is
    w = torch.randn(n, generator=generator, dtype=fp32)
    sizes = torch.tensor([[1.0], [30.0], [max(eps, 1e-30) ** 0.5]], dtype=fp32)
    x = torch.randn(3, n, generator=generator, dtype=fp32) * sizes
    vars(copied).pop("forward", None)

    def called(rows: torch.Tensor) -> torch.Tensor | None:
        held = torch.nn.Parameter(w.to(rows.dtype), requires_grad=False)
        vars(copied)["_parameters"] = {"weight": held}
        found = copied.forward(rows)
        fits = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (rows.shape, rows.dtype)
        return found if fits else None

    want = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * w.double()
    results = [called(x.view(shape)) for shape in ((3, n), (1, 3, n), (1, 1, 3, n))]
    results += [called(x.to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    return None not in results and all(_near(y.reshape(3, n), want) for y in results[:3] if y is not None)


def _near(found: torch.Tensor, want: torch.Tensor) -> bool:
    apart = (found.double() - want).abs()
    return bool(apart.norm() <= _TOLERANCE * want.norm()) and bool(
        (apart <= _TOLERANCE * (1 + want.abs())).all()
    )


def norm_problem(module: Any) -> str | None:
    """Return the line of what a norm with a weight poses for one row; None if no kernel takes it."""
    weight = module.weight
    dtype = None if weight is None else short_dtype(str(weight.dtype))
    if weight is None or weight.device.type != _DEVICE or dtype not in RMSNORM.options[0].values:
        return None
    return f"rmsnorm 1x{weight.shape[0]} {dtype}"
