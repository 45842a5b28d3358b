"""cuBLASLt through its C interface: every algorithm that its heuristics offer for a product, and running one.

``torch.mm`` takes the first of them. Constants and structures are those of ``cublasLt.h`` of CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.digest import Json
from cutegen.errors import LaunchError
from cutegen.system.publish import publish

if TYPE_CHECKING:
    import torch

__all__ = ["LT_CALL", "WORKSPACE_BYTES", "Algorithm", "CublasLt", "LtCall", "LtOrder", "loaded_library"]

#: Stands for a product by cuBLASLt; the symbol is an :class:`LtOrder`.
LT_CALL = "call-cublaslt"
#: What algorithms may use. Source: torch gives cuBLASLt 32 MiB on Hopper.
WORKSPACE_BYTES = 32 * 2**20
#: Algorithms that are asked for; the heuristics offer fewer.
_MOST = 256

_COMPUTE_32F, _CUDA_R_32F = 68, 0
_TRANSA, _TRANSB, _MAX_WORKSPACE = 3, 4, 1
_STATUS = {
    1: "not initialized",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}
_HANDLE, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT = ctypes.POINTER(_HANDLE)


class _Result(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", _COUNT),
        ("status", _INT),
        ("waves", ctypes.c_float),
        ("reserved", _INT * 4),
    )


_SIGNATURES: Mapping[str, Sequence[Any]] = {
    "cublasLtCreate": (_OUT,),
    "cublasLtMatmulDescCreate": (_OUT, _INT, _INT),
    "cublasLtMatmulDescSetAttribute": (_HANDLE, _INT, _HANDLE, _COUNT),
    "cublasLtMatrixLayoutCreate": (_OUT, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatmulPreferenceCreate": (_OUT,),
    "cublasLtMatmulPreferenceSetAttribute": (_HANDLE, _INT, _HANDLE, _COUNT),
    "cublasLtMatmulAlgoGetHeuristic": (
        *(_HANDLE,) * 7,
        _INT,
        ctypes.POINTER(_Result),
        ctypes.POINTER(_INT),
    ),
    "cublasLtMatmul": (*(_HANDLE,) * 14, _COUNT, _HANDLE),
}


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a product.

    Attributes:
        words: ``cublasLtMatmulAlgo_t`` in hexadecimal digits: plain data, good in any process with that
            cuBLASLt.
        workspace_bytes: What it needs.
    """

    words: str
    workspace_bytes: int


@dataclass(frozen=True)
class _Plan:
    """Descriptors of a product; the first operand is B, since cuBLASLt's matrices go down columns."""

    operation: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]


def loaded_library(maps: Path = Path("/proc/self/maps")) -> str:
    """Return the cuBLASLt that this process has loaded, as ``import torch`` of a CUDA build does.

    Raises:
        LaunchError: There is none.
    """
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith("libcublasLt.so"):
            return path
    raise LaunchError("no libcublasLt is loaded; is torch built for CUDA?")


class CublasLt:
    """The library, with a handle of its own.

    Args:
        library: Its path.

    Raises:
        LaunchError: It cannot be loaded, or lacks a function.
    """

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise LaunchError(f"cuBLASLt cannot be used: {error}") from error
        self._handle = self._make("cublasLtCreate")
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._workspace: torch.Tensor | None = None

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise LaunchError(f"{name} failed: {_STATUS.get(status, 'status')} ({status})")

    def _make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = _HANDLE()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def _set(self, name: str, made: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self._call(name, made, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _plan(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> _Plan:
        key = tuple((x.shape, x.stride(), x.dtype) for x in (a, b, d))
        if key not in self._plans:
            operation = self._make("cublasLtMatmulDescCreate", _COMPUTE_32F, _CUDA_R_32F)
            layouts = []
            for attribute, operand in ((_TRANSA, b.t()), (_TRANSB, a.t()), (None, d.t())):
                transposed, rows, columns, pitch = _down_columns(operand)
                layouts.append(
                    self._make("cublasLtMatrixLayoutCreate", _cuda_type(operand.dtype), rows, columns, pitch)
                )
                if attribute is not None:
                    self._set("cublasLtMatmulDescSetAttribute", operation, attribute, _INT(transposed))
                elif transposed:
                    raise LaunchError("the output must be contiguous along its rows")
            self._plans[key] = _Plan(operation, (layouts[0], layouts[1], layouts[2]))
        return self._plans[key]

    def algorithms(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> list[Algorithm]:
        """Return what the heuristics offer for ``d = a @ b``, what they prefer first, each once.

        Raises:
            LaunchError: cuBLASLt does not compute such a product.
        """
        plan = self._plan(a, b, d)
        preference = self._make("cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        self._set("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, limit)
        found, count = (_Result * _MOST)(), _INT()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            plan.operation,
            *plan.layouts,
            plan.layouts[2],
            preference,
            _MOST,
            found,
            ctypes.byref(count),
        )
        offered = (
            Algorithm(bytes(result.algorithm).hex(), int(result.workspace_bytes))
            for result in found[: count.value]
            if result.status == 0
        )
        return list(dict.fromkeys(offered))

    def run(
        self,
        algorithm: Algorithm,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        stream: int,
    ) -> None:
        """Launch ``d = a @ b``; all launches share a workspace, so they must follow one another.

        Raises:
            LaunchError: cuBLASLt refuses.
        """
        plan = self._plan(a, b, d)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        words = (ctypes.c_uint64 * 8).from_buffer_copy(bytes.fromhex(algorithm.words))
        self._call(
            "cublasLtMatmul",
            self._handle,
            plan.operation,
            ctypes.byref(one),
            *(b.data_ptr(), plan.layouts[0], a.data_ptr(), plan.layouts[1]),
            ctypes.byref(zero),
            *(d.data_ptr(), plan.layouts[2], d.data_ptr(), plan.layouts[2]),
            ctypes.byref(words),
            self._scratch(d.device).data_ptr(),
            algorithm.workspace_bytes,
            stream,
        )

    def _scratch(self, device: torch.device) -> torch.Tensor:
        import torch

        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def _down_columns(matrix: torch.Tensor) -> tuple[bool, int, int, int]:
    """Return a matrix as cuBLASLt takes it: whether transposed, then rows, columns and pitch in memory.

    Raises:
        LaunchError: It is contiguous along neither index.
    """
    rows, columns = matrix.shape
    down, across = matrix.stride()
    if down == 1 or rows == 1:
        return False, rows, columns, max(across, rows)
    if across == 1 or columns == 1:
        return True, columns, rows, max(down, columns)
    raise LaunchError(f"strides {down} and {across} are contiguous along neither index")


def _cuda_type(dtype: torch.dtype) -> int:
    """Return ``cudaDataType`` of a dtype.

    Raises:
        LaunchError: Products of it are not compared.
    """
    import torch

    types = {torch.float32: _CUDA_R_32F, torch.float16: 2, torch.bfloat16: 14}
    if dtype not in types:
        raise LaunchError(f"products of {dtype} are not compared")
    return types[dtype]


@dataclass(frozen=True)
class LtOrder:
    """What is to be run.

    Attributes:
        note: File to list all algorithms in, of which the first is run; empty to run the one below.
        algorithm: Which one.
    """

    note: str = ""
    algorithm: Algorithm | None = None

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LtOrder:
        """Return the order that :meth:`to_json` described."""
        algorithm = data["algorithm"]
        return cls(data["note"], None if algorithm is None else Algorithm(**algorithm))


class LtCall:
    """A product by cuBLASLt as a kernel.

    Args:
        order: What to run.
        library: Used for all calls.

    Raises:
        LaunchError: The order names neither a note nor an algorithm.
    """

    def __init__(self, order: LtOrder, library: CublasLt) -> None:
        if not order.note and order.algorithm is None:
            raise LaunchError("which algorithm is to be run?")
        self._order = order
        self._library = library
        self._algorithm = order.algorithm

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        """Compute ``d = a @ b`` on torch's current stream.

        Raises:
            LaunchError: cuBLASLt refuses, or offers nothing.
        """
        import torch

        algorithm = self._algorithm or self._list(a, b, d)
        stream = int(torch.cuda.current_stream().cuda_stream) if a.is_cuda else 0
        self._library.run(algorithm, a, b, d, stream)

    def _list(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Algorithm:
        """Write down all algorithms and return the first."""
        offered = self._library.algorithms(a, b, d)
        if not offered:
            raise LaunchError("cuBLASLt offers no algorithm for this product")
        note = json.dumps([asdict(algorithm) for algorithm in offered]).encode()
        publish(Path(self._order.note), note, "note of cuBLASLt's algorithms")
        self._algorithm = offered[0]
        return offered[0]
