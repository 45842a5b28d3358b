"""An element-wise kernel that overlaps with its neighbours, as kernels of cutegen with ``use_pdl`` do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.errors import LaunchError

if TYPE_CHECKING:
    import torch

__all__ = ["Rewriter", "rewriter_on"]

#: Bytes that a thread reads and writes, and threads of a CTA.
_ACCESS_BYTES, _THREADS = 16, 256
#: Each thread adds ``zero`` to four words, which keeps both accesses. Behind its first instruction the next
#: kernel may start; the second waits for the end of the kernel before. Source: PTX ISA, griddepcontrol.
_PTX = b"""
.version 7.8
.target sm_90
.address_size 64

.visible .entry rewrite(.param .u64 start, .param .u32 accesses, .param .u32 zero)
{
    .reg .pred %outside;
    .reg .b32 %cta, %size, %lane, %at, %accesses, %zero, %w<4>;
    .reg .b64 %start, %place;

    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %lane, %tid.x;
    mad.lo.u32 %at, %cta, %size, %lane;
    ld.param.u32 %accesses, [accesses];
    setp.ge.u32 %outside, %at, %accesses;
    @%outside ret;
    ld.param.u64 %start, [start];
    ld.param.u32 %zero, [zero];
    cvta.to.global.u64 %start, %start;
    mad.wide.u32 %place, %at, 16, %start;
    ld.global.v4.u32 {%w0, %w1, %w2, %w3}, [%place];
    add.u32 %w0, %w0, %zero;
    add.u32 %w1, %w1, %zero;
    add.u32 %w2, %w2, %zero;
    add.u32 %w3, %w3, %zero;
    st.global.v4.u32 [%place], {%w0, %w1, %w2, %w3};
    ret;
}
"""


class Rewriter:
    """Makes calls that read and write a tensor without changing a bit, by a kernel that overlaps.

    It is launched with programmatic stream serialization, and lets the kernel behind it start at once.

    Args:
        device: Where the tensors are; a Hopper GPU or a later one.

    Raises:
        LaunchError: The driver cannot load the kernel.
    """

    def __init__(self, device: torch.device) -> None:
        import torch
        from cuda.bindings import driver

        self._driver: Any = driver
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # the driver needs the context that torch makes
            self._module = self._done("load", *driver.cuModuleLoadData(_PTX))
        self._kernel = self._done("find", *driver.cuModuleGetFunction(self._module, b"rewrite"))

    def __call__(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Return the call for what lies between the first element of ``tensor`` and the last, gaps included,
        but for the up to 15 bytes at each end that are no whole access."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor)
        first = -(-start // _ACCESS_BYTES) * _ACCESS_BYTES
        accesses = max(0, (end - first) // _ACCESS_BYTES)
        device = tensor.device

        def call() -> None:
            if accesses:
                self._launch(first, accesses, device)

        return call

    def _launch(self, first: int, accesses: int, device: torch.device) -> None:
        import torch

        driver = self._driver
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = -(-accesses // _THREADS), 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = _THREADS, 1, 1
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        config.attrs, config.numAttrs = [overlap], 1
        values = (first, accesses, 0), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
        self._done("launch", *driver.cuLaunchKernelEx(config, self._kernel, values, 0))

    def _done(self, what: str, error: Any, result: Any = None) -> Any:
        """Return ``result``, or raise what the driver says."""
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"the kernel before each launch: cannot {what} it: {error.name}")
        return result


@cache
def rewriter_on(device: torch.device) -> Rewriter:
    """Return what rewrites tensors on a GPU, where the driver keeps its kernel for the next problem.

    Raises:
        LaunchError: As :class:`Rewriter`.
    """
    return Rewriter(device)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
