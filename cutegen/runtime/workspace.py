"""Scratch memory of kernels: kept per thread, device and stream in eager calls, new per launch elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

__all__ = ["GetWorkspace", "Workspaces", "new_workspace", "torch_workspaces"]

#: ``(device index, float32 elements, zeroed)`` to a buffer for the next launch on that device's stream.
GetWorkspace: TypeAlias = "Callable[[int, int, bool], torch.Tensor]"


class Workspaces(threading.local):
    """Float32 buffers that are reused as soon as a stream gets to its next kernel.

    Launches on one stream run one after another, so they can share a buffer; two threads may interleave the
    launches of two-kernel configs on one stream, so they cannot. A buffer that is outgrown goes back to the
    allocator that it came from, which hands it out again in stream order. During the capture of a CUDA graph
    every kernel gets its own from the graph's pool: a replay must not share with what else is running.

    Kernels that need zeros leave zeros behind, and have buffers of their own.

    Args:
        allocate: ``(device index, elements, zeroed)`` to a new buffer, in stream order.
        stream: The current stream of a device, as an integer.
        capturing: Whether the current stream of a device is being captured, or may be.
    """

    def __init__(
        self,
        allocate: GetWorkspace,
        stream: Callable[[int], int],
        capturing: Callable[[int], bool],
    ) -> None:
        self._allocate = allocate
        self._stream = stream
        self._capturing = capturing
        self._buffers: dict[tuple[int, int, bool], torch.Tensor] = {}

    def get(self, device: int, elements: int, zeroed: bool = False) -> torch.Tensor:
        """Return a buffer of at least ``elements`` for the next launch on a device's current stream.

        Args:
            device: Index of the device.
            elements: Float32 values that are needed.
            zeroed: Whether they must be zero; the kernel must then leave them zero.
        """
        if self._capturing(device):
            return self._allocate(device, elements, zeroed)
        key = (device, self._stream(device), zeroed)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < elements:
            self._buffers.pop(key, None)  # before the larger one, so that both need not fit
            buffer = None
            buffer = self._buffers[key] = self._allocate(device, elements, zeroed)
        return buffer

    def clear(self) -> None:
        """Give this thread's buffers back to the allocator."""
        self._buffers.clear()


def torch_workspaces() -> Workspaces:
    """Return workspaces from torch's caching allocator."""
    import torch

    # The raw handle costs a tenth of a Stream object; it is what torch's own generated code uses.
    raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def stream(device: int) -> int:
        if raw_stream is not None:
            return raw_stream(device)
        return int(torch.cuda.current_stream(device).cuda_stream)

    def capturing(device: int) -> bool:
        # torch can only ask about the current device; on another one a buffer of its own is always right.
        return torch.cuda.current_device() != device or torch.cuda.is_current_stream_capturing()

    return Workspaces(new_workspace, stream, capturing)


def new_workspace(device: int, elements: int, zeroed: bool = False) -> torch.Tensor:
    """Return a new buffer from torch's caching allocator, on the current stream of a device.

    Zeros are written on that stream too, so the buffer is ready for the next launch there. Once the caller
    drops it, the allocator hands its memory out again in stream order.

    Args:
        device: Index of the device.
        elements: Float32 values that are needed.
        zeroed: Whether they must be zero.
    """
    import torch

    make = torch.zeros if zeroed else torch.empty
    return make(elements, dtype=torch.float32, device=torch.device("cuda", device))
