"""Launch the kernels that were pinned into this folder, from torch and tvm-ffi alone.

This file is self-contained: it travels with ``manifest.json`` and the folder ``kernels``. Nothing is tuned,
rendered or compiled. A file that changed, another GPU or a product that was not pinned is refused with the
reason. The kernels are called through the C interface of tvm-ffi, because importing its Python package takes
longer than everything here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import math
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["FIELDS", "Deployment", "PinnedError", "gemm", "linear"]

#: Written in when the folder was made; it vouches for the manifest, which vouches for every other file.
MANIFEST_SHA256 = "2263ed79551d0394a27673c41477dcd2ddefc9d8c1bdc05be8fc5fb185c0d8bc"
#: What a kernel is pinned for, in the order of a manifest's ``key``.
FIELDS = (
    *("m", "n", "k", "batch", "ab_dtype", "out_dtype", "layout", "unaligned_out"),
    *("alpha", "beta", "bias", "activation", "scale", "promote", "any_order"),
)

_CUDA = 2  # kDLCUDA of DLPack
_INT, _FLOAT, _DLTENSOR = 1, 3, 7  # TVMFFITypeIndex
#: DLPack's code and bits, and the result that torch would give, by torch's name.
_DTYPES = {
    "torch.bfloat16": ("bf16", 4, 16, "bfloat16"),
    "torch.float16": ("fp16", 2, 16, "float16"),
    "torch.float32": ("fp32", 2, 32, "float32"),
    "torch.int32": ("int32", 0, 32, "int32"),
    "torch.int8": ("int8", 0, 8, "int32"),
    "torch.float8_e4m3fn": ("e4m3", 10, 8, "bfloat16"),
    "torch.float8_e5m2": ("e5m2", 12, 8, "bfloat16"),
}
_LAYOUTS = {("k", "k"): "tn", ("k", "n"): "nn", ("m", "n"): "nt", ("m", "k"): "tt"}


class PinnedError(RuntimeError):
    """A call cannot be answered by this folder, or the folder cannot be trusted here."""


class _DLTensor(ctypes.Structure):
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


class _Ffi:
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


class _Call:
    """One kernel with its argument block; every call rewrites the block, so each thread has its own."""

    def __init__(self, deployment: Deployment, record: dict[str, Any], blocks: list[_DLTensor]) -> None:
        torch = deployment.torch
        self._deployment, self._blocks = deployment, blocks
        self._function = deployment.function(record)
        self._device = blocks[0].device_id
        self._elements = -(-record["workspace_bytes"] // 4)
        self._make = torch.zeros if record["zeroed"] else torch.empty
        if self._elements:
            blocks.append(_block((self._elements,), (1,), "torch.float32", self._device))
        named = dict(zip(FIELDS, record["key"], strict=True))
        values = [(_DLTENSOR, "pointer", ctypes.addressof(block)) for block in blocks]
        values += [(_INT, "integer", scalar) for scalar in record["scalars"]]
        values += [(_FLOAT, "real", 0) for name in ("alpha", "beta") if named[name]]
        self._arguments = (_Any * len(values))()
        for slot, (kind, field, value) in zip(self._arguments, values, strict=True):
            slot.type_index = kind
            setattr(slot.value, field, value)
        self._result = _Any()

    def __call__(self, tensors: list[Any], numbers: list[float]) -> None:
        deployment, device, count = self._deployment, self._device, len(self._arguments)
        if self._elements:
            # The caching allocator is what makes this safe on any stream, in any thread and in a graph.
            kind = deployment.torch.float32
            tensors = [*tensors, self._make(self._elements, dtype=kind, device=tensors[0].device)]
        for block, tensor in zip(self._blocks, tensors, strict=True):
            block.data = tensor.data_ptr()
        for at, number in enumerate(reversed(numbers)):
            self._arguments[count - 1 - at].value.real = number
        before, set_stream = ctypes.c_void_p(), deployment.ffi.set_stream
        set_stream(_CUDA, device, deployment.raw_stream(device), ctypes.byref(before))
        status = self._function(None, self._arguments, count, ctypes.byref(self._result))
        set_stream(_CUDA, device, before, None)
        if status:
            raise PinnedError(f"the kernel refused the call: {deployment.ffi.raised()}")


class Deployment:
    """The kernels of one folder.

    Raises:
        PinnedError: The folder is incomplete, a file in it changed, or this CPU lacks what it was built for.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self.torch: Any = torch
        self.folder = Path(folder)
        self._manifest: dict[str, Any] = json.loads(self._read("manifest.json", MANIFEST_SHA256))
        self._read("table.json", self._manifest["files"]["table.json"])
        _check_cpu(self._manifest["cpu_flags"])
        self._records = {tuple(record["key"]): record for record in self._manifest["kernels"]}
        #: The problems that are pinned here, one line each.
        self.problems: list[str] = [record["problem"] for record in self._manifest["kernels"]]
        self.ffi = _Ffi()
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        self._functions: dict[str, Any] = {}
        self._trusted: set[int] = set()
        self._threads = threading.local()
        self._lock = threading.Lock()

    def verify(self) -> None:
        """Check every file of the folder against its recorded SHA-256.

        Raises:
            PinnedError: One is missing or changed; the message names it.
        """
        for name, digest in self._manifest["files"].items():
            self._read(name, digest)

    def gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        bias: torch.Tensor | None = None,
        activation: str = "",
        out_dtype: torch.dtype | None = None,
        scales: tuple[torch.Tensor, torch.Tensor] | tuple[()] = (),
        fast_accum: bool = False,
        any_order: bool = False,
    ) -> torch.Tensor:
        """Return ``activation(alpha * scales * a @ b + beta * c + bias)`` by the kernel pinned for it.

        Raises:
            PinnedError: No kernel is pinned for this product, or the GPU or a file is not the pinned one.
        """
        torch = self.torch
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            raise PinnedError("an operand requires grad, but pinned kernels compute no gradients")
        c = None if beta == 0 else c
        if out is None:
            dtype = out_dtype or getattr(torch, _dtype(a)[3])
            out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=a.device)
        if out.numel() == 0:
            return out
        options = (alpha != 1, c is not None, bias is not None, activation, fast_accum, any_order)
        tensors = [tensor for tensor in (a, b, out, c, bias, *scales) if tensor is not None]
        key = (options, a.get_device(), *[(t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors])
        calls: dict[Any, Callable[..., None]] = self._threads.__dict__.setdefault("calls", {})
        call = calls.get(key)
        if call is None:
            call = calls[key] = self._prepare(a, b, out, c, bias, scales, options, tensors)
        call(tensors, ([float(alpha)] if alpha != 1 else []) + ([float(beta)] if c is not None else []))
        return out

    def linear(self, x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return ``x @ w.T``; leading dimensions of ``x`` are flattened, options are those of :meth:`gemm`.

        Raises:
            PinnedError: As :meth:`gemm`.
        """
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return self.gemm(rows, w.t(), **options).view(*x.shape[:-1], w.shape[0])

    def function(self, record: dict[str, Any]) -> Any:
        """Return the C function of a record, loading its library on first use."""
        symbol = record["symbol"]
        with self._lock:
            if symbol not in self._functions:
                for name in (record["library"], record["source"]):
                    self._read(name, self._manifest["files"][name])
                try:
                    library = ctypes.CDLL(str(self.folder / record["library"]))
                except OSError as error:
                    raise PinnedError(f"{record['library']} cannot be loaded: {error}") from error
                function = getattr(library, f"__tvm_ffi_{symbol}")
                function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
                self._functions[symbol] = function
            return self._functions[symbol]

    def _prepare(
        self, a: Any, b: Any, out: Any, c: Any, bias: Any, scales: Any, options: Any, tensors: list[Any]
    ) -> Callable[[list[Any], list[float]], None]:
        self._check_place(tensors)
        key = _key(a, b, out, c, bias, bool(scales), options)
        record = self._records.get(key)
        if record is None:
            asked = " ".join(f"{name}={value}" for name, value in zip(FIELDS, key, strict=True) if value)
            some = "; ".join(self.problems[:8]) + ("; ..." if len(self.problems) > 8 else "")
            raise PinnedError(f"no kernel is pinned for {asked}; pinned: {some}")
        if not record["symbol"]:
            product = self.torch.bmm if a.dim() == 3 else self.torch.mm
            return lambda tensors, numbers: product(tensors[0], tensors[1], out=tensors[2])
        blocks = [_matrix(tensor) for tensor in (a, b, out, c) if tensor is not None]
        for vector in (*(() if bias is None else (bias,)), *scales):
            blocks.append(_block((vector.numel(),), (1,), str(vector.dtype), a.get_device()))
        return _Call(self, record, blocks)

    def _check_place(self, tensors: list[Any]) -> None:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1 or tensors[0].device.type != "cuda":
            raise PinnedError(f"operands are on {', '.join(map(str, devices))}; they must be on one GPU")
        if not all(tensor.data_ptr() for tensor in tensors):
            raise PinnedError("an operand has no memory; pinned kernels cannot be traced with fake tensors")
        device = tensors[0].get_device()
        if device not in self._trusted:
            self._check_gpu(device)
            self._trusted.add(device)

    def _check_gpu(self, device: int) -> None:
        facts = self.torch.cuda.get_device_properties(device)
        here = {
            "gpu_name": facts.name,
            "compute_capability": f"{facts.major}.{facts.minor}",
            "sm_count": facts.multi_processor_count,
        }
        for field, wanted in self._manifest["gpu"].items():
            if wanted not in ("*", here[field]):
                raise PinnedError(f"pinned for {field}={wanted}, but GPU {device} has {field}={here[field]}")

    def _read(self, name: str, digest: str) -> bytes:
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise PinnedError(f"{name} in {self.folder} cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise PinnedError(f"{name} in {self.folder} has changed since it was pinned")
        return data


def _check_cpu(flags: Iterable[str]) -> None:
    """Refuse a processor without the instructions that the launch code was compiled for."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            found = next((line.split() for line in lines if line.startswith("flags")), [])
    except OSError:
        return
    missing = sorted(set(flags) - set(found))
    if found and missing:
        raise PinnedError(f"this CPU lacks {', '.join(missing)}, which the kernels' launch code may use")


def _dtype(tensor: Any) -> tuple[str, int, int, str]:
    try:
        return _DTYPES[str(tensor.dtype)]
    except KeyError:
        raise PinnedError(f"an operand has dtype {tensor.dtype}, which no kernel takes") from None


def _key(a: Any, b: Any, out: Any, c: Any, bias: Any, scaled: bool, options: Any) -> tuple[Any, ...]:
    """Describe a call in the order of FIELDS."""
    alpha, beta, _, activation, fast_accum, any_order = options
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() not in (2, 3) or b.shape != (*a.shape[:-2], k, n):
        raise PinnedError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; they do not multiply")
    for name, tensor in (("out", out), ("c", c)):
        if tensor is not None and tensor.shape != (*a.shape[:-1], n):
            raise PinnedError(f"{name} has shape {tuple(tensor.shape)}; it must be {(*a.shape[:-1], n)}")
    if b.dtype != a.dtype or any(t is not None and t.dtype != out.dtype for t in (c, bias)):
        raise PinnedError("a and b must have one dtype, and so must out, c and bias")
    along = ""
    if bias is not None:
        along = "n" if bias.shape == (n,) else "m"
        if bias.shape not in ((n,), (m, 1)) or (bias.numel() > 1 and bias.stride(0) != 1):
            raise PinnedError(
                f"bias has shape {tuple(bias.shape)}; it must be ({n},) or ({m}, 1), contiguous"
            )
    ab_dtype = _dtype(a)[0]
    unaligned = any(not _is_aligned(t) for t in (out, c) if t is not None)
    return (
        *(m, n, k, a.shape[0] if a.dim() == 3 else 1, ab_dtype, _dtype(out)[0]),
        *(_LAYOUTS[_axis(a, "mk"), _axis(b, "kn")], unaligned, alpha, beta, along, activation),
        *(scaled, ab_dtype in ("e4m3", "e5m2") and not fast_accum, any_order),
    )


def _axis(tensor: Any, axes: str) -> str:
    """Return the axis along which an operand is contiguous."""
    ones = [at for at in (-1, -2) if tensor.stride(at) == 1]
    if not ones:
        raise PinnedError(f"an operand has strides {tensor.stride()}; its rows or columns must be contiguous")
    return axes[max(ones, key=lambda at: int(tensor.shape[at]))]


def _is_aligned(tensor: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    steps = [step for step, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if extent > 1]
    places = (tensor.data_ptr(), *(step * tensor.element_size() for step in (tensor.shape[-1], *steps)))
    return not any(place % 16 for place in places)


def _matrix(tensor: Any) -> _DLTensor:
    """Describe a matrix or a batch, without a batch of one and without odd strides along axes of extent 1."""
    shape, stride = list(tensor.shape), list(tensor.stride())
    if len(shape) == 3 and shape[0] == 1:
        shape, stride = shape[1:], stride[1:]
    inner = max((at for at, step in enumerate(stride) if step == 1), key=lambda at: shape[at], default=-1)
    for at, extent in enumerate(shape):
        if extent == 1 and at != inner:
            stride[at] = -(-shape[inner] // 16) * 16
    return _block(tuple(shape), tuple(stride), str(tensor.dtype), tensor.get_device())


def _block(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, device: int) -> _DLTensor:
    numbers = ctypes.c_int64 * len(shape)
    _, code, bits, _ = _DTYPES[dtype]
    return _DLTensor(None, _CUDA, device, len(shape), code, bits, 1, numbers(*shape), numbers(*stride), 0)


@functools.cache
def _deployment() -> Deployment:
    return Deployment(Path(__file__).parent)


def gemm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the product of two GPU matrices; options as :meth:`Deployment.gemm`."""
    return _deployment().gemm(a, b, **options)


def linear(x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return ``x @ w.T``; options as :meth:`Deployment.linear`."""
    return _deployment().linear(x, w, **options)
