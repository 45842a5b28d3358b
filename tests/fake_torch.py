"""As much of torch as a pinned deployment touches, with tensors that claim to live on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from types import SimpleNamespace
from typing import Any

_SIZES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_addresses = count(0x7F00_0000_0000, 0x1000_0000)


@dataclass(frozen=True)
class Dtype:
    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Place:
    type: str = "cuda"
    index: int = 0


@dataclass(frozen=True)
class Tensor:
    """A tensor with an address that nobody may follow."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype
    device: Place = Place()
    address: int = 0
    requires_grad: bool = False

    def stride(self, at: int | None = None) -> Any:
        return self.strides if at is None else self.strides[at]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def element_size(self) -> int:
        return _SIZES[self.dtype.name]

    def is_inference(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device.index if self.device.type == "cuda" else -1

    def t(self) -> Tensor:
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def reshape(self, *shape: Any) -> Tensor:
        extents = shape[0] if shape and isinstance(shape[0], tuple) else shape
        return replace(self, shape=extents, strides=_dense(extents))

    def view(self, *shape: Any) -> Tensor:
        if self.strides != _dense(self.shape):
            raise RuntimeError("view size is not compatible with input tensor's size and stride")
        return self.reshape(*shape)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


class Torch(SimpleNamespace):
    """Stands in for the module; it remembers what it allocated, and what autograd was told was written."""

    def __init__(
        self, name: str = "NVIDIA H200", major: int = 9, minor: int = 0, sm_count: int = 132
    ) -> None:
        written: list[Tensor] = []
        facts = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=sm_count)
        super().__init__(
            **{name: Dtype(name) for name in _SIZES},
            allocated=[],
            written=written,
            grad=False,
            inference_mode=nullcontext,
            cuda=SimpleNamespace(get_device_properties=lambda index: facts),
            compiler=SimpleNamespace(is_compiling=lambda: False, is_dynamo_compiling=lambda: False),
            _C=SimpleNamespace(
                _cuda_getCurrentRawStream=lambda index: 0x5EED, _increment_version=written.extend
            ),
        )

    def is_grad_enabled(self) -> bool:
        return bool(self.grad)

    def empty(self, shape: Any, *, dtype: Dtype, device: Place = Place()) -> Tensor:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        made = Tensor(sizes, _dense(sizes), dtype, device, next(_addresses))
        self.allocated.append(made)
        return made

    zeros = empty

    def tensor(self, *shape: int, dtype: str = "bfloat16", **changes: Any) -> Tensor:
        """Return a contiguous operand, with some of its facts changed."""
        return replace(Tensor(shape, _dense(shape), Dtype(dtype), Place(), next(_addresses)), **changes)
