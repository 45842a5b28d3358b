"""Launch the kernels that were pinned into this folder, from torch and tvm-ffi alone.

In a deployment this file is self-contained: it travels with ``manifest.json`` and the folder ``kernels``,
and runs ``family_calls.py`` when a kernel is called that is no GEMM. Nothing is tuned, rendered or compiled.
A file that changed, another GPU or a problem that was not pinned is refused with the reason.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.deploy.launch import Call, Ffi, PinnedError, block, matrix
from cutegen.deploy.manifest import (
    FAMILY_CALLS,
    FIELDS,
    LOADER,
    MANIFEST,
    RANGE_LOOKUP,
    TABLE,
    TRACED,
    is_pinned_name,
    is_record,
    parse_manifest,
)
from cutegen.deploy.tensors import (
    SCALES,
    GemmOperands,
    call_key,
    check_apart,
    check_grad,
    check_kinds,
    check_layer,
    check_options,
    dtype_of,
    span_bytes,
    write_counter,
)

if TYPE_CHECKING:
    import torch

__all__ = ["FIELDS", "Deployment", "PinnedError", "call", "gemm", "linear", "rms_norm"]

#: Written in when the folder was made; it vouches for the manifest, which vouches for every other file.
MANIFEST_SHA256 = ""
#: So many kinds of call are kept; a thread that makes more starts over.
_MOST_CALLS = 16384


class Deployment:
    """The kernels of one folder.

    Raises:
        PinnedError: The folder is incomplete, a file in it changed, or this CPU lacks what it was built for.
    """

    def __init__(self, folder: Path) -> None:
        import torch

        self.torch: Any = torch
        # Libraries are loaded later, when the working directory, or where a link leads, may be another.
        self.folder = Path(os.path.realpath(folder))
        text = self._read(MANIFEST, MANIFEST_SHA256)
        try:
            self._manifest = parse_manifest(text)
            self._records = {tuple(record["key"]): record for record in self._manifest["kernels"]}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._malformed(f"{type(error).__name__}: {error}") from error
        self._read(TABLE, self._digest(TABLE))
        _check_cpu(self._manifest["cpu_flags"])
        self.ffi = Ffi()
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        self.count_writes = write_counter(torch)
        self._functions: dict[str, Any] = {}
        self._ranges: Any = None
        self._families: dict[str, Any] = {}
        self._parts: dict[str, Any] = {}
        self._trusted: set[int] = set()
        self._threads = threading.local()
        self._lock = threading.Lock()
        _renew_lock_in_children(self)

    @property
    def problems(self) -> list[str]:
        """The problems and ranges of problems that are pinned here, one line each."""
        try:
            held = (self._manifest, *self._manifest["families"].values())
            return [str(record["problem"]) for part in held for record in (*part["kernels"], *part["ranges"])]
        except (KeyError, TypeError) as error:
            raise self._malformed(f"{type(error).__name__}: {error}") from error

    def verify(self) -> None:
        """Check the loader and every listed file of the folder against its recorded SHA-256.

        Other files are not looked at, such as the bytecode that Python keeps in ``__pycache__``.

        Raises:
            PinnedError: One is missing or changed; the message names it.
        """
        for name in self._manifest["files"]:
            self._read(name, self._digest(name))
        # Its digest was taken before that of the manifest was written into it.
        self._read(LOADER, self._manifest.get("loader"), MANIFEST_SHA256.encode())

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
            PinnedError: No kernel is pinned for this GEMM, the GPU or a file is not the pinned one, or
                ``out`` shares memory with an operand (it may be ``c`` itself).
        """
        torch = self.torch
        try:
            c = None if beta == 0 else c
            if torch.is_grad_enabled():
                check_grad(a=a, b=b, c=c, bias=bias, out=out, **dict(zip(SCALES, scales, strict=False)))
            given = out is not None
            if out is None:
                dtype = out_dtype or getattr(torch, dtype_of(a)[3])
                out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device=a.device)
            if out.numel() == 0:
                return out
            options = (alpha != 1, c is not None, bias is not None, activation, fast_accum, any_order)
            addresses = [a.data_ptr(), b.data_ptr(), out.data_ptr()]
            # A call with a known key is not checked again: all that _prepare looks at is in it, or not 0.
            key: tuple[Any, ...] = (
                options,
                a.shape,
                b.shape,
                out.shape,
                a.stride(),
                b.stride(),
                out.stride(),
                a.dtype,
                b.dtype,
                out.dtype,
                a.device,
                b.device,
                out.device,
                addresses[2] & 15,
            )
            factors = [] if alpha == 1 else [float(alpha)]
            if c is not None:
                addresses.append(c.data_ptr())
                key = (key, c is out, c.shape, c.stride(), c.dtype, c.device, addresses[3] & 15)
                factors.append(float(beta))
            for vector in scales if bias is None else (bias, *scales):
                addresses.append(vector.data_ptr())
                key = (key, vector.shape, vector.stride(), vector.dtype, vector.device)
            try:
                calls = self._threads.calls
            except AttributeError:
                calls = self._threads.calls = {}
            call = None if 0 in addresses else calls.get(key)
        except (AttributeError, IndexError, TypeError, ValueError):  # of what is no matrix, or no number
            check_kinds({"a": a, "b": b, "out": out, "c": c, "bias": bias}, scales)
            check_options(activation, out_dtype, alpha=alpha, beta=beta)
            raise
        if call is None:
            if len(calls) >= _MOST_CALLS:
                calls.clear()
            call = calls[key] = self._prepare(GemmOperands(a, b, out, c, bias, scales), options)
        launch, out_bytes, sizes = call
        if given:
            start = addresses[2]
            end = start + out_bytes
            for address, size in zip(addresses, sizes, strict=True):
                if address < end and start < address + size:
                    check_apart(out, c, a=a, b=b, bias=bias, **dict(zip(SCALES, scales, strict=False)))
                    break
        launch(addresses, factors, a, b, out)
        if given:
            self.count_writes((out,))
        return out

    def linear(self, x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return ``x @ w.T``; leading dimensions of ``x`` are flattened, options are those of :meth:`gemm`.

        Raises:
            PinnedError: As :meth:`gemm`.
        """
        check_layer(x, w)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return self.gemm(rows, w.t(), **options).view(*x.shape[:-1], w.shape[0])

    def call(self, family: str, /, **values: Any) -> Any:
        """Launch the kernel that is pinned for a call of a family that is no GEMM, and return its outputs.

        Args:
            family: Its name, such as ``rmsnorm``.
            values: Tensors and numbers by the names under which the family declares them. An output that is
                not given is made; one that the family can do without is left out unless it is a tensor, or
                True for a new one. Options that no tensor tells are given by their names, too.

        Returns:
            The outputs in the order in which they are declared; alone if there is one, None if there is none.

        Raises:
            PinnedError: As :meth:`gemm`; an output may be an input only where the family declares it.
        """
        try:
            calls = self._families[family]
        except KeyError:
            calls = self._family(family)
        return calls(values)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        *,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        residual_out: torch.Tensor | bool = False,
        return_rstd: bool = False,
    ) -> Any:
        """Return ``h / sqrt(mean(h^2) + eps) * weight`` of each row, where ``h = x + residual``.

        As ``cutegen.rms_norm``: ``residual_out`` is where ``h`` goes, or True for a new tensor; with it, or
        with ``return_rstd``, the result is a tuple. Leading dimensions of ``x`` are flattened.

        Raises:
            PinnedError: As :meth:`call`.
        """
        if "rmsnorm" not in self._families:
            self._family("rmsnorm")
        norm = self._parts["rms_norm"]
        return norm(self, x, weight, eps, residual, out, residual_out, return_rstd)

    def operator(self) -> str:
        """Let torch know the operator that traced calls become, and return its name.

        Raises:
            PinnedError: Another folder's is known already.
        """
        name: str = self._run(TRACED)["register"](self)
        return name

    def family_operator(self, family: str, dtypes: dict[str, Any], words: dict[str, Any]) -> Any:
        """Let torch know the operator that traced calls of a family become; see ``traced.py``."""
        calls = self._families.get(family) or self._family(family)
        return self._run(TRACED)["register_family"](self, calls, dtypes, words)

    def function(self, record: dict[str, Any]) -> Any:
        """Return the C function of a record, loading its library on first use."""
        symbol = record["symbol"]
        with self._lock:
            if symbol not in self._functions:
                function = self._load(record["library"], record["source"], f"__tvm_ffi_{symbol}")
                function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
                self._functions[symbol] = function
            return self._functions[symbol]

    def _family(self, name: str) -> Any:
        """Return what answers calls of a family, whose part of the loader runs on first use."""
        with self._lock:
            said = self._manifest["families"].get(name)
            if said is None:
                others = ", ".join(self._manifest["families"]) or "none"
                raise PinnedError(
                    f"no kernel of family {name!r} is pinned; families: {others}, beside gemm()"
                )
            if not self._parts:
                self._parts = self._run(FAMILY_CALLS)
            found = self._families[name] = self._parts["FamilyCalls"](self, name, said)
            return found

    def _run(self, name: str) -> dict[str, Any]:
        """Return what a part of the loader defines; it runs in the names of this file."""
        digest = self._digest(name)
        self._read(name, digest)
        loader = SourceFileLoader(__name__, str(self.folder / name))
        try:
            code = loader.get_code(__name__)
        except (EOFError, ImportError, TypeError, ValueError):  # of its bytecode, which is cut off or none
            code = loader.source_to_code(loader.get_data(loader.path), loader.path)
        self._read(name, digest)  # what was compiled, or what its bytecode was made from
        names = dict(globals())
        exec(code or "", names)
        return names

    def _load(self, name: str, source: str, symbol: str) -> Any:
        path = self.folder / name
        before = _identity(path)
        self._read(name, self._digest(name))
        self._read(source, self._digest(source))
        try:
            function = getattr(ctypes.CDLL(str(path)), symbol)
        except (OSError, AttributeError) as error:
            raise PinnedError(f"{name} cannot be loaded: {error}{_mount_hint(self.folder)}") from error
        if before is None or _identity(path) != before:
            raise PinnedError(
                f"{name} in {self.folder} was replaced while it was being loaded; restart the process"
            )
        return function

    def _prepare(self, operands: GemmOperands, options: Any) -> tuple[Callable[..., None], int, list[int]]:
        """Return what launches such a call, the bytes of ``out``, and those of all tensors but ``out``."""
        tensors, out = [*operands.matrices, *operands.vectors], operands.out
        self._check_place(tensors)
        launch = self._launcher(operands, call_key(operands, options))
        itself = (2, 3) if operands.c is out else (2,)  # 0 bytes share nothing
        sizes = [0 if at in itself else span_bytes(tensor) for at, tensor in enumerate(tensors)]
        return launch, span_bytes(out), sizes

    def _launcher(self, operands: GemmOperands, key: tuple[Any, ...]) -> Callable[..., None]:
        record = self._records.get(key)
        if record is None and self._manifest["ranges"]:
            record = self._lookup().of_key(key)
        if record is None and self._manifest.get("outside") == "torch":
            # A plain GEMM: none of the options, and nothing is converted.
            record = {"symbol": ""} if not any(key[8:]) and key[4] == key[5] else None
        if record is None:
            asked = " ".join(f"{name}={value}" for name, value in zip(FIELDS, key, strict=True) if value)
            some = "; ".join(self.problems[:8]) + ("; ..." if len(self.problems) > 8 else "")
            raise PinnedError(f"no kernel is pinned for {asked}; pinned: {some}")
        if not is_record(record):
            raise self._malformed(f"the record of {record.get('problem')} is not one that was pinned")
        if not record["symbol"]:
            product = self.torch.bmm if operands.a.dim() == 3 else self.torch.mm
            return lambda addresses, factors, a, b, out: product(a, b, out=out)
        device = operands.a.get_device()
        blocks = [matrix(tensor) for tensor in operands.matrices]
        for vector in operands.vectors:
            blocks.append(block((vector.numel(),), (1,), str(vector.dtype), device))
        kinds = ["tensor"] * len(blocks) + ["scratch", "launch"]
        named = dict(zip(FIELDS, key, strict=True))
        return Call(
            self, record, blocks, operands.a.device, kinds + ["real"] * (named["alpha"] + named["beta"])
        )

    def _lookup(self) -> Any:
        """Return what finds the kernels of ranges, GEMMs' and others'."""
        if self._ranges is None:
            self._ranges = self._run(RANGE_LOOKUP)["RangeLookup"](self, self._manifest["ranges"])
        return self._ranges

    def _check_place(self, tensors: list[Any]) -> None:
        """Refuse tensors that are not all on one GPU of the pinned kind, or have no memory."""
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

    def _digest(self, name: str) -> str:
        """Return the recorded SHA-256 of a file."""
        digest = self._manifest["files"].get(name)
        if not isinstance(digest, str) or not is_pinned_name(name):
            raise self._malformed(f"its files do not list {name!r} as they should")
        return digest

    def _malformed(self, why: str) -> PinnedError:
        """Return the error for a manifest that says what none of ours does."""
        return PinnedError(f"{MANIFEST} in {self.folder} is malformed: {why[:200]}")

    def _read(self, name: str, digest: str | None, seal: bytes = b"") -> bytes:
        """Return a file whose SHA-256, without ``seal``, is ``digest``."""
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise PinnedError(f"{name} in {self.folder} cannot be read: {error.strerror}") from error
        if hashlib.sha256(data.replace(seal, b"", 1) if seal else data).hexdigest() != digest:
            raise PinnedError(f"{name} in {self.folder} has changed since it was pinned")
        return data


def _mount_hint(folder: Path) -> str:
    """Return what to do where libraries cannot be loaded at all; what the linker says of it is no help."""
    try:
        if not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return ""
    except OSError:
        return ""
    return "; this file system is mounted with noexec: copy the folder to one that is not"


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or written; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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


def _renew_lock_in_children(deployment: Deployment) -> None:
    """Let a child of fork find the lock free: there the thread that held it is not."""
    known = weakref.ref(deployment)

    def renew() -> None:
        there = known()
        if there is not None:
            there._lock = threading.Lock()

    os.register_at_fork(after_in_child=renew)


@functools.cache
def _deployment() -> Deployment:
    return Deployment(Path(__file__).parent)


def gemm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the GEMM of two GPU matrices; options as :meth:`Deployment.gemm`."""
    found: torch.Tensor
    if _is_dynamo():
        found = _traced(a, b, **options)
        return found
    try:
        return _deployment().gemm(a, b, **options)
    except RuntimeError:
        import torch

        if not torch.compiler.is_compiling():  # which is so in torch.export, whose tensors have no addresses
            raise
    found = _traced(a, b, **options)
    return found


def linear(x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return ``x @ w.T``; options as :meth:`Deployment.linear`."""
    check_layer(x, w)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return gemm(rows, w.t(), **options).view(*x.shape[:-1], w.shape[0])


def _ask_torch() -> bool:
    """Return whether Dynamo traces; once an eager call was made, torch's own function stands here."""
    global _is_dynamo
    import torch

    if torch.compiler.is_dynamo_compiling():
        return True
    _is_dynamo = torch.compiler.is_dynamo_compiling
    return False


_is_dynamo: Callable[[], bool] = _ask_torch


def _traced(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    scales: Any = (),
    alpha: float = 1.0,
    beta: float = 1.0,
    **options: Any,
) -> Any:
    """Call the operator, while torch.compile or torch.export traces."""
    import torch

    _operator()
    if scales:
        options = {**options, "scale_a": scales[0], "scale_b": scales[1]}
    # An operator that writes into a given tensor would not be worth one more schema.
    found = torch.ops.cutegen_pinned.gemm.default(a, b, alpha=float(alpha), beta=float(beta), **options)
    return found if out is None else out.copy_(found)


def _operator() -> str:
    """Let torch know the operator, if it does not yet; return its name."""
    return _deployment().operator()


# As torch.compiler.assume_constant_result marks it: Dynamo calls it while it traces, instead of tracing it.
_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]


def call(family: str, /, **values: Any) -> Any:
    """Return the outputs of a family's kernel; values as :meth:`Deployment.call`."""
    if _is_dynamo():
        return _traced_call(family, values)
    try:
        return _deployment().call(family, **values)
    except RuntimeError:
        import torch

        if not torch.compiler.is_compiling():  # as in gemm()
            raise
    return _traced_call(family, values)


def _traced_call(family: str, values: dict[str, Any]) -> Any:
    """Make the outputs and call the operator that fills them, while torch.compile or torch.export traces."""
    import torch

    given = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    dtypes = tuple((name, tensor.dtype) for name, tensor in given.items())
    words = tuple((name, value) for name, value in values.items() if isinstance(value, (str, bool)))
    names, outputs, made = _family_operator(family, dtypes, words)
    first = next(iter(given.values()))
    unknown = [name for name in values if name not in names]
    if unknown:
        raise PinnedError(f"{family} takes no {unknown[0]!r}; it takes {', '.join(names)}")
    passed = dict(values)
    for name, dtype, axes in made:
        shape = [times * given[like].shape[at] // per for times, like, at, per in axes]
        passed[name] = torch.empty(shape, dtype=dtype, device=first.device)
    getattr(torch.ops.cutegen_pinned, family).default(*[passed.get(name) for name in names])
    found = [passed[name] for name in outputs]
    return found[0] if len(found) == 1 else tuple(found) or None


def _family_operator(family: str, dtypes: Any, words: Any) -> Any:
    return _deployment().family_operator(family, dict(dtypes), dict(words))


_family_operator._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, **options: Any) -> Any:
    """Return the norm of rows; options as :meth:`Deployment.rms_norm`."""
    return _deployment().rms_norm(x, weight, eps, **options)
