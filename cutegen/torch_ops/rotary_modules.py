"""Rotary embeddings of models: a module that makes tables, and the function that rotates heads by them.

Tables of models hold every cosine twice, once for each half of a head, which no call of the function shows.
So the module that makes them is tried, and marks what it makes; and the function, which code of the model
looks up in its own namespace, is replaced there by one that calls cutegen for marked tables and is itself for
all others.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from cutegen.torch_ops import fallbacks
from cutegen.torch_ops.rope import rope
from cutegen.torch_ops.swaps import Call, answered, class_of, is_recorded, shadow, tried

if TYPE_CHECKING:
    import torch

__all__ = ["RotaryCall", "is_rotary", "let_functions_ask", "rotary_call"]

_DEVICE = "cuda"
_WHAT = "a rotary embedding"
#: On a table: its version when it was made, in which both halves are the same.
_MARK = "_cutegen_halves"
#: On a function that asks: the function that it stands for.
_ORIGINAL = "_cutegen_original"
#: How functions that rotate call what they take.
_TAKEN = ["q", "k", "cos", "sin"]
#: At these places a module that makes tables is tried.
_PLACES = [0, 1, 7, 300, 2049]
#: Where the axis of heads is when nothing is said: (texts, heads, tokens, elements).
_AXIS = "unsqueeze_dim"


@dataclass(frozen=True)
class RotaryCall(Call):
    """How a swapped module that makes tables computes: as before, and its tables are marked."""

    compiled: ClassVar[str] = "a rotary embedding under torch.compile, which fuses it"

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True: its arguments are for its own forward."""
        return True

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch

        tables = forward(*args, **kwargs)
        if isinstance(tables, tuple):
            for table in tables:
                if isinstance(table, torch.Tensor):  # tracers of torch.fx give others
                    setattr(table, _MARK, _version(table))
        return tables


def rotary_call(module: torch.nn.Module) -> RotaryCall | str | None:
    """Return how a module that makes tables may be swapped, why it may not, or None if it is no such module.

    It has no parameters, and a buffer of frequencies. Its forward takes a tensor, whose dtype tables are to
    have, and positions; that both halves of its tables are the same is seen on some positions.
    """
    buffers = [b for b in module._buffers.values() if b is not None]
    if not buffers or next(module.parameters(), None) is not None or module._modules:
        return None
    if any(b.dim() != 1 or not b.is_floating_point() for b in buffers):
        return None
    if any(b.is_meta for b in buffers):
        return "its frequencies are not there yet"
    found = tried(lambda: _tables(module))
    if found is None or found[0] != [(1, len(_PLACES), 2 * buffers[0].shape[0])] * 2:
        return None
    return RotaryCall() if found[1] else "both halves of its tables are not the same"


def _tables(module: torch.nn.Module) -> tuple[list[tuple[int, ...]], bool] | None:
    """Return the shapes of the tables that a module makes, and whether both halves of each are the same."""
    import torch

    tables = copy.deepcopy(shadow(module)).to("cpu")(torch.zeros(1, len(_PLACES), 8), torch.tensor([_PLACES]))
    if not isinstance(tables, tuple):
        return None
    return [tuple(t.shape) for t in tables], all(torch.equal(*t.chunk(2, -1)) for t in tables)


def is_rotary(module: torch.nn.Module) -> bool:
    """Return whether a module is swapped as one that makes tables."""
    return isinstance(getattr(module, "cutegen_call", None), RotaryCall)


def let_functions_ask(model: torch.nn.Module) -> int:
    """Let the functions by which code of ``model`` rotates queries and keys ask whether tables are marked.

    Returns:
        How many there are in the namespaces of its classes, those that ask already included.
    """
    count = 0
    for namespace in _namespaces(model):
        for name, function in list(vars(namespace).items()):
            if hasattr(function, _ORIGINAL):
                count += 1
            elif isinstance(function, FunctionType) and _turns(function):
                setattr(namespace, name, _asking(function))
                count += 1
    return count


def _namespaces(model: torch.nn.Module) -> Iterator[ModuleType]:
    for name in sorted({class_of(module).__module__ for module in model.modules()}):
        if name.partition(".")[0] not in ("torch", "cutegen") and name in sys.modules:
            yield sys.modules[name]


def _parameters(function: FunctionType) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if they cannot be told."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _turns(function: FunctionType) -> bool:
    """Return whether a function rotates queries and keys, tried in fp64 with heads on any axis it takes."""
    parameters = _parameters(function)
    more = list(parameters.values())[len(_TAKEN) :]
    if list(parameters)[: len(_TAKEN)] != _TAKEN or any(p.default is p.empty for p in more):
        return False
    default = _axis(parameters)
    axes = (1, 2) if _AXIS in parameters else (default,)
    return bool(tried(lambda: all(_turns_on(function, axis, axis == default) for axis in axes)))


def _turns_on(function: FunctionType, axis: int, by_default: bool) -> bool:
    """Return whether a function rotates heads on an axis, which it is told unless that is its default."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, c, s = draw(2, 3, 5, 8), draw(2, 1, 5, 8), draw(2, 5, 4), draw(2, 5, 4)
    cos, sin = torch.cat([c, c], -1), torch.cat([s, s], -1)
    want = [_turned(x, c[:, None], s[:, None]) for x in (q, k)]
    swap = axis == 2
    given = [x.transpose(1, 2) if swap else x for x in (q, k)]
    found = function(*given, cos, sin, **({} if by_default else {_AXIS: axis}))
    apart = [(x.transpose(1, 2) if swap else x) - y for x, y in zip(found, want, strict=True)]
    return all(float(x.abs().max()) <= 1e-9 for x in apart)


def _turned(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    import torch

    first, second = x.chunk(2, -1)
    return torch.cat([first * c - second * s, second * c + first * s], -1)


def _axis(parameters: dict[str, inspect.Parameter]) -> Any:
    return parameters[_AXIS].default if _AXIS in parameters else 1


def _asking(original: FunctionType) -> Callable[..., Any]:
    """Return what stands for a function that rotates."""
    parameters = _parameters(original)
    names, default = list(parameters)[len(_TAKEN) :], _axis(parameters)

    @wraps(original)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling() or is_recorded() or not _marked(cos) or not _marked(sin):
            return original(q, k, cos, sin, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        axis = given.pop(_AXIS, default)
        if any(value is not None for value in given.values()):
            reason = f"its function was given {', '.join(given)}"
        else:
            reason = _unfit(q, k, cos, sin, axis)
        if reason:
            fallbacks.count(f"{_WHAT}: {reason}")
            return original(q, k, cos, sin, *args, **kwargs)
        return answered(
            _by_cutegen,
            lambda: original(q, k, cos, sin, *args, **kwargs),
            _WHAT,
            *(q, k, cos, sin, axis),
        )

    setattr(rotate, _ORIGINAL, original)
    return rotate


def _marked(table: Any) -> bool:
    """Return whether a table is as a swapped module made it."""
    import torch

    version = getattr(table, _MARK, None) if isinstance(table, torch.Tensor) else None
    return version is not None and version == _version(table)


def _version(table: Any) -> int:
    """Return a number that changes when a table is written to; where torch counts nothing, 0."""
    return 0 if table.is_inference() else int(table._version)


def _unfit(q: Any, k: Any, cos: Any, sin: Any, axis: Any) -> str:
    """Return why torch would compute something else than cutegen, or no kernel could; else nothing."""
    if q.device.type != _DEVICE:
        return f"q is on {q.device.type}"
    if {k.dtype, cos.dtype, sin.dtype} != {q.dtype}:
        return f"q, k, cos and sin differ in dtype: {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}"
    if axis not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return f"heads of shape {tuple(q.shape)} are not on axis 1 or 2"
    texts, tokens = q.shape[0], q.shape[3 - axis]
    if cos.shape[0] not in (1, texts) or tuple(cos.shape[1:]) != (tokens, q.shape[3]):
        return f"tables of shape {tuple(cos.shape)} are not for q of shape {tuple(q.shape)}"
    return "" if q.numel() and k.numel() else "q or k is empty"


def _by_cutegen(q: Any, k: Any, cos: Any, sin: Any, axis: int) -> tuple[Any, Any]:
    pairs = cos.shape[-1] // 2
    cos, sin = cos[..., :pairs], sin[..., :pairs]
    if cos.shape[0] != q.shape[0]:
        cos, sin = cos[0], sin[0]  # the same places in every text
    if axis == 2:
        return rope(q, k, cos, sin)
    rotated = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)
