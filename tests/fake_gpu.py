"""A GPU that is not there: a recording driver to preload, and tensors that claim to live on it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent
CUDA = 2  # kDLCUDA
_ALIVE: list[object] = []  # what a capsule points to must outlive it


def build_driver(folder: Path) -> Path:
    """Compile the stand-in driver into ``folder`` and return the folder."""
    library = folder / "libcuda.so.1"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wl,-soname,libcuda.so.1",
        str(DATA / "fake_driver.c"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    return folder


def run_with_driver(driver: Path, code: str, log: Path, **environment: str) -> tuple[str, list[str]]:
    """Run Python ``code`` against the stand-in driver; return what it printed and the recorded calls."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), "FAKE_DRIVER_LOG": str(log), **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    head = "import sys; sys.modules['torch'] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, log.read_text().splitlines() if log.exists() else []


class _DLDevice(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class FakeTensor:
    """A row-major tensor that claims to be on CUDA device ``device``; its address is made up.

    ``code`` and ``bits`` are DLPack's: (2, 32) float32, (4, 16) bfloat16.
    """

    def __init__(
        self, *shape: int, device: int = 0, code: int = 2, bits: int = 32, address: int = 0x7000_0000
    ) -> None:
        strides = [1] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides)
        self._device = (CUDA, device)
        tensor = _DLTensor(
            address, _DLDevice(CUDA, device), len(shape), code, bits, 1, self._shape, self._strides, 0
        )
        self._managed = _DLManagedTensor(tensor, None, None)
        _ALIVE.append(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)
