"""Launching, capturing and timing on one CUDA stream; nothing here knows about products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["CudaLane", "Lane"]

#: Read before each timed replay: keeps the GPU busy while the host queues the replay, so that the launch of a
#: graph is not timed, and leaves a cold L2 without dirty lines. Bytes; takes about 70 us on an H200.
_LEAD_IN_BYTES = 2**28


class Lane(Protocol):
    """One queue of work on a device. Failures of the device surface as ``RuntimeError``."""

    def capture(self, calls: Sequence[Callable[[], None]]) -> Any:
        """Record ``calls``, which must have run before, as one replayable object."""
        ...

    def replay_us(self, graph: Any, replays: int) -> float:
        """Replay ``graph`` so many times and wait; return the microseconds that the device took."""
        ...

    def synchronize(self) -> None:
        """Wait for everything queued."""
        ...

    def healthy(self) -> bool:
        """Return whether the device still computes."""
        ...

    def release(self) -> None:
        """Hand unused memory back to the device."""
        ...


class CudaLane:
    """A stream of its own on one GPU, made torch's current stream for the life of the process.

    Graphs are captured without the garbage collection that ``torch.cuda.graph`` adds (up to 0.1 s each).
    """

    def __init__(self, index: int) -> None:
        import torch

        cuda: Any = torch.cuda  # its stubs leave these constructors untyped
        cuda.set_device(index)
        self._stream = cuda.Stream()
        cuda.set_stream(self._stream)
        self._pool = cuda.graph_pool_handle()
        self._start = cuda.Event(enable_timing=True)
        self._end = cuda.Event(enable_timing=True)
        self._lead_in = self._capture_lead_in()

    def _capture_lead_in(self) -> Any:
        import torch

        source = torch.zeros(_LEAD_IN_BYTES // 4, dtype=torch.float32, device="cuda")
        total = torch.zeros((), dtype=torch.float32, device="cuda")

        def read() -> None:
            torch.sum(source, dim=0, out=total)

        read()
        self.synchronize()
        self._kept = (source, total)  # a graph does not keep its tensors alive
        return self.capture([read])

    def capture(self, calls: Sequence[Callable[[], None]]) -> Any:
        """Record ``calls`` as a CUDA graph."""
        import torch

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph

    def replay_us(self, graph: Any, replays: int) -> float:
        """Replay ``graph`` behind a lead-in and return the microseconds between the events around it."""
        self._lead_in.replay()
        self._start.record()
        for _ in range(replays):
            graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1000

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def healthy(self) -> bool:
        """Return whether a small sum still comes out right."""
        import torch

        try:
            torch.cuda.synchronize()
            return int(torch.ones(8, device="cuda").sum()) == 8
        except RuntimeError:
            return False

    def release(self) -> None:
        """Empty torch's cache of device memory."""
        import torch

        torch.cuda.empty_cache()
