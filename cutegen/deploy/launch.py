"""Launch a pinned kernel through the C interface of tvm-ffi; part of the loader.

Importing the Python package of tvm-ffi takes longer than everything here.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "Call", "DLTensor", "Ffi", "PinnedError", "block", "matrix"]

_CUDA = 2  # kDLCUDA of DLPack
_INT, _FLOAT, _DLTENSOR = 1, 3, 7  # TVMFFITypeIndex
_NUMBERS = {"integer": _INT, "real": _FLOAT}
#: DLPack's code and bits, and the result that torch would give, by torch's name.
DTYPES = {
    "torch.bfloat16": ("bf16", 4, 16, "bfloat16"),
    "torch.float16": ("fp16", 2, 16, "float16"),
    "torch.float32": ("fp32", 2, 32, "float32"),
    "torch.int32": ("int32", 0, 32, "int32"),
    "torch.int8": ("int8", 0, 8, "int32"),
    "torch.float8_e4m3fn": ("e4m3", 10, 8, "bfloat16"),
    "torch.float8_e5m2": ("e5m2", 12, 8, "bfloat16"),
}


class PinnedError(RuntimeError):
    """A call cannot be answered by this folder, or the folder cannot be trusted here."""


class DLTensor(ctypes.Structure):
    """The struct of DLPack, its device and dtype spelled out."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("real", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    """``TVMFFIAny``."""

    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value)]


class _Bytes(ctypes.Structure):
    """``TVMFFIByteArray``."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class Ffi:
    """The few functions of tvm-ffi's C library that a launch needs."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("tvm_ffi")
        if spec is None or spec.origin is None:
            raise PinnedError("tvm_ffi is not installed; pip install apache-tvm-ffi")
        path = str(Path(spec.origin).parent / "lib" / "libtvm_ffi.so")
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # the kernels resolve their calls against it
            self._library = ctypes.PyDLL(path)  # short calls, for which giving up the GIL costs more
        except OSError as error:
            raise PinnedError(f"the library of tvm_ffi cannot be loaded: {error}") from error
        stream = ctypes.c_void_p
        self.set_stream = self._library.TVMFFIEnvSetStream
        self.set_stream.argtypes = [ctypes.c_int32, ctypes.c_int32, stream, ctypes.POINTER(stream)]

    def raised(self) -> str:
        """Return the message of the error that the last call on this thread raised."""
        handle = ctypes.c_void_p()
        self._library.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
        if not handle.value:
            return "unknown error"
        # An error object is a header of 24 bytes, then kind and message as byte arrays.
        text = _Bytes.from_address(handle.value + 24 + ctypes.sizeof(_Bytes))
        message = ctypes.string_at(text.data, text.size).decode(errors="replace")
        self._library.TVMFFIObjectDecRef(handle)
        return message


class Call:
    """One kernel with its argument block; every call rewrites the block, so each thread has its own.

    Args:
        deployment: Whose.
        record: What its manifest says of the kernel.
        blocks: The tensors, in the order of the kernel's parameters.
        place: The GPU.
        kinds: Of the parameters: ``tensor``, ``scratch`` for the workspace, ``launch`` for all integers of
            the record, ``real`` and ``integer`` for a scalar of the caller's.
    """

    def __init__(
        self,
        deployment: Any,
        record: dict[str, Any],
        blocks: list[DLTensor],
        place: torch.device,
        kinds: list[str],
    ) -> None:
        torch = deployment.torch
        self._deployment = deployment
        self._function = deployment.function(record)
        self._device, self._place = blocks[0].device_id, place
        self._elements = -(-record["workspace_bytes"] // 4)
        self._make = torch.zeros if record["zeroed"] else torch.empty
        scratch = []
        if self._elements:
            scratch.append(block((self._elements,), (1,), "torch.float32", self._device))
        self._blocks = [*blocks, *scratch]
        tensors = iter(blocks)
        values: list[tuple[int, str, int]] = []
        factors = []
        for kind in kinds:
            if kind in _NUMBERS:
                factors.append(len(values))
                values.append((_NUMBERS[kind], kind, 0))
            elif kind == "launch":
                values += [(_INT, "integer", scalar) for scalar in record["scalars"]]
            else:
                found = scratch if kind == "scratch" else [next(tensors)]
                values += [(_DLTENSOR, "pointer", ctypes.addressof(block)) for block in found]
        self._arguments = (_Any * len(values))()
        for slot, (index, field, value) in zip(self._arguments, values, strict=True):
            slot.type_index = index
            setattr(slot.value, field, value)
        self._factors = [self._arguments[at].value for at in factors]
        self._result, self._before = _Any(), ctypes.c_void_p()
        self._rest = (self._arguments, len(values), ctypes.byref(self._result))
        self._keep_before = ctypes.byref(self._before)

    def __call__(self, addresses: list[int], factors: list[float], *matrices: Any) -> None:
        deployment, device = self._deployment, self._device
        if self._elements:
            # The caching allocator is what makes this safe on any stream, in any thread and in a graph.
            kind = deployment.torch.float32
            workspace = self._make(self._elements, dtype=kind, device=self._place)
            addresses.append(workspace.data_ptr())
        for block, address in zip(self._blocks, addresses, strict=True):
            block.data = address
        if factors:
            for slot, factor in zip(self._factors, factors, strict=True):
                slot.real = factor
        set_stream = deployment.ffi.set_stream
        set_stream(_CUDA, device, deployment.raw_stream(device), self._keep_before)
        status = self._function(None, *self._rest)
        set_stream(_CUDA, device, self._before, None)
        if status:
            raise PinnedError(f"the kernel refused the call: {deployment.ffi.raised()}")


def matrix(tensor: Any) -> DLTensor:
    """Describe a matrix or a batch, without a batch of one and without odd strides along axes of size 1."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    if len(shape) == 3 and shape[0] == 1:
        shape, stride = shape[1:], stride[1:]
    inner = max((at for at, step in enumerate(stride) if step == 1), key=lambda at: shape[at], default=-1)
    for at, extent in enumerate(shape):
        if extent == 1 and at != inner:
            stride[at] = -(-shape[inner] // 16) * 16
    return block(tuple(shape), tuple(stride), str(tensor.dtype), tensor.get_device())


def block(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: int) -> DLTensor:
    numbers = ctypes.c_int64 * len(shape)
    _, code, bits, _ = DTYPES[dtype]
    return DLTensor(None, _CUDA, device, len(shape), code, bits, 1, numbers(*shape), numbers(*stride), 0)
