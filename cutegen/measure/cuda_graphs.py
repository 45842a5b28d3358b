"""Launching, capturing and timing on one CUDA stream; nothing here knows about families."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["CudaLane", "Lane", "LaneFeed"]

#: Read before each timed replay: keeps the GPU busy while the host queues the replay, so that the launch of a
#: graph is not timed, and leaves a cold L2 without dirty lines. Bytes; takes about 70 us on an H200.
_LEAD_IN_BYTES = 2**28


#: Batches of replays that wait on the device while the host looks elsewhere.
_AHEAD = 3


class LaneFeed(Protocol):
    """Replays of one graph without a gap. Failures of the device surface as ``RuntimeError``."""

    def top_up(self) -> None:
        """Queue until enough is waiting."""
        ...

    def finish(self) -> float:
        """Wait for what is queued; return the microseconds that the device took per replay."""
        ...


class Lane(Protocol):
    """One queue of work on a device. Failures of the device surface as ``RuntimeError``."""

    def capture(self, calls: Sequence[Callable[[], None]]) -> Any:
        """Record ``calls``, which must have run before, as one replayable object."""
        ...

    def replay_us(self, graph: Any, replays: int) -> float:
        """Replay ``graph`` so many times and wait; return the microseconds that the device took."""
        ...

    def feed(self, graph: Any, batch: int) -> LaneFeed:
        """Begin to replay ``graph`` back to back, ``batch`` replays queued at a time."""
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

    def feed(self, graph: Any, batch: int) -> LaneFeed:
        """Begin to replay ``graph`` behind a lead-in, with three batches queued."""
        self._lead_in.replay()
        return _CudaFeed(graph, batch)

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


class _CudaFeed:
    """Keeps torch's current stream busy with one graph; events tell how far the device has come."""

    def __init__(self, graph: Any, batch: int) -> None:
        self._graph = graph
        self._batch = batch
        self._replays = 0
        self._waiting: deque[Any] = deque()
        self._start = _mark()
        self.top_up()

    def top_up(self) -> None:
        """Queue batches until three are waiting."""
        while self._waiting and self._waiting[0].query():
            self._waiting.popleft()
        while len(self._waiting) < _AHEAD:
            for _ in range(self._batch):
                self._graph.replay()
            self._replays += self._batch
            self._waiting.append(_mark())

    def finish(self) -> float:
        """Wait and return microseconds per replay."""
        end = self._waiting[-1]
        end.synchronize()
        return float(self._start.elapsed_time(end)) * 1000 / self._replays


def _mark() -> Any:
    """Record an event on torch's current stream."""
    import torch

    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event
