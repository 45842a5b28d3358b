"""Opens the GPU in a thread while torch is imported: both take long, and the driver holds no GIL."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["begin_waking"]


def begin_waking(index: int, library: str = "libcuda.so.1") -> threading.Thread:
    """Make the primary context of GPU ``index``, which torch then finds; return the thread that does so.

    A driver that is missing or refuses is left to torch, which says what is wrong.

    Args:
        index: As CUDA counts.
        library: The driver.
    """
    thread = threading.Thread(target=_open, args=(index, library), daemon=True, name="wake")
    thread.start()
    return thread


def _open(index: int, library: str) -> None:
    try:
        driver = ctypes.CDLL(library)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):
        return
