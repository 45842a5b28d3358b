"""The engine on torch: operands in rotation, poisoned checks, one captured graph per candidate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.canvas import NEVER, Canvas
from cutegen.check import Oracle, Verdict, verify
from cutegen.device import ClockMeter, ClockReading, Device, present_device
from cutegen.errors import LaunchError, MeasureError
from cutegen.measure.candidate import Candidate
from cutegen.measure.engine import Feed, Prepared
from cutegen.measure.lane import CudaLane, Lane, LaneFeed
from cutegen.measure.plan import Rotation, plan_launches, plan_replays, plan_rotation
from cutegen.measure.scratch import Scratch
from cutegen.measure.vendor import vendor_call
from cutegen.measure.workload import Workload, torch_dtype
from cutegen.problem import Problem
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["TorchEngine", "open_cuda"]

Kernel = Callable[..., None]
#: What a kernel that refuses its arguments, or a launch that the driver refuses, raises through TVM-FFI.
_LAUNCH_ERRORS = (
    LaunchError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
)
#: Further runs for equal bits: more where runs are short, because races show rarely.
_REPEATS, _REPEATS_LARGE, _LARGE_FLOPS = 3, 1, 2e11
_MOST_GRAPHS = 128
#: Work that a dwell queues at a time, in microseconds: longer than a reading of NVML takes.
_FEED_US = 5_000.0


@dataclass
class _Bay:
    """Everything that checking one problem needs; made when the first candidate is checked on it."""

    workload: Workload
    oracle: Oracle
    canvases: tuple[Canvas, Canvas]


class _Session:
    """Operands, outputs and graphs of the open problem."""

    def __init__(self, problem: Problem, seed: int, rotation: Rotation, device: torch.device) -> None:
        import torch

        self.problem = problem
        self.rotation = rotation
        generator = torch.Generator(device=device).manual_seed(seed)
        self.workloads = [Workload.fill(problem, generator) for _ in range(rotation.sets)]
        self.outputs = [Workload.new_output(problem, device) for _ in range(rotation.sets)]
        self.reference, self.vendor = vendor_call(self.workloads[0], self.outputs[0])
        self.graphs: dict[tuple[Any, ...], Prepared] = {}
        self.time_us = math.nan

    def vendor_calls(self, count: int) -> list[Callable[[], None]]:
        """Return calls of the vendor's product, rotating through the operand sets."""
        return [self._bind(self.vendor, i % self.rotation.sets) for i in range(count)]

    def _bind(self, call: Callable[[Workload, torch.Tensor], None], index: int) -> Callable[[], None]:
        load, out = self.workloads[index], self.outputs[index]
        return lambda: call(load, out)

    def kernel_calls(
        self, kernel: Kernel, launch: Launch, workspace: torch.Tensor | None, count: int
    ) -> list[Callable[[], None]]:
        """Return calls of a kernel, rotating likewise."""
        argument_sets = [
            load.arguments(out, launch, workspace)
            for load, out in zip(self.workloads, self.outputs, strict=True)
        ]
        return [_bound(kernel, argument_sets[i % len(argument_sets)]) for i in range(count)]


def _bound(kernel: Kernel, arguments: tuple[Any, ...]) -> Callable[[], None]:
    return lambda: kernel(*arguments)


class TorchEngine:
    """Runs candidates on a torch device.

    Args:
        device: Where tensors live.
        facts: Size of cache and memory.
        lane: How work is queued and timed.
        load: Returns the function of a library by its symbol.
        meter: Reads the clocks.
    """

    def __init__(
        self,
        device: torch.device,
        facts: Device,
        lane: Lane,
        load: Callable[[Path, str], Kernel],
        meter: ClockMeter,
    ) -> None:
        self._device = device
        self._facts = facts
        self._lane = lane
        self._load = load
        self._meter = meter
        self._kernels: dict[tuple[Path, str], Kernel] = {}
        self._bays: dict[Problem, _Bay] = {}
        self._scratch = Scratch(device)
        self._session: _Session | None = None
        self._seed = 0
        self._capture_failed = False

    def describe(self) -> dict[str, Any]:
        """Return the device, and the versions of torch and CUDA's runtime."""
        import torch

        return {
            "device": self._facts.to_json(),
            "torch": str(torch.__version__),
            "cuda_runtime": torch.version.cuda or "",
        }

    def open(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Allocate operands in rotation and time the vendor's product roughly."""
        self._session = None
        self._bays.clear()
        self._scratch.clear()
        self._lane.release()
        self._seed = seed
        rotation = plan_rotation(problem, self._facts.l2_bytes, self._facts.memory_bytes)
        try:
            session = _Session(problem, seed, rotation, self._device)
            session.time_us = self._rough_time(session)
        except RuntimeError as error:
            raise MeasureError(f"cannot set up {problem}: {_brief(error)}") from error
        self._session = session
        return {
            "reference": session.reference,
            "reference_us": session.time_us,
            "sets": rotation.sets,
            "footprint_bytes": rotation.footprint_bytes,
            "launches": plan_launches(session.time_us, rotation.sets),
        }

    def _rough_time(self, session: _Session) -> float:
        calls = session.vendor_calls(4)
        for call in calls:
            call()
        self._lane.synchronize()
        graph = self._lane.capture(calls)
        self._lane.replay_us(graph, 1)
        return max(0.1, self._lane.replay_us(graph, 1) / len(calls))

    def _opened(self) -> _Session:
        if self._session is None:
            raise MeasureError("no problem is open")
        return self._session

    def check(self, candidate: Candidate, problem: Problem, repeats: int | None = None) -> Verdict:
        """Run a candidate on poisoned outputs and compare with fp64, then ``repeats`` times for equal bits.

        Raises:
            LaunchError: It did not run.
            CheckError: It wrote behind its workspace, or left it in a state that the next launch cannot use.
        """
        launch = candidate.launch if problem == candidate.problem else candidate.tail_launch
        if launch is None:
            raise MeasureError(f"candidate {candidate.name} has no launch for {problem}")
        kernel = self._kernel(candidate)
        bay = self._bay(problem)
        workspace = self._scratch.take(launch, poison=True)

        def run(d: torch.Tensor) -> None:
            arguments = bay.workload.arguments(d, launch, workspace)
            self._launch(_bound(kernel, arguments), f"launch on {problem}")

        if repeats is None:
            repeats = _REPEATS if problem.flops < _LARGE_FLOPS else _REPEATS_LARGE
        verdict = verify(run, bay.canvases, bay.oracle, repeats)
        self._scratch.inspect(launch)
        return verdict

    def _launch(self, call: Callable[[], None], what: str) -> None:
        try:
            call()
            self._lane.synchronize()
        except _LAUNCH_ERRORS as error:
            raise LaunchError(f"{what} failed: {_brief(error)}") from error

    def _kernel(self, candidate: Candidate) -> Kernel:
        key = (candidate.shared_object, candidate.symbol)
        if key not in self._kernels:
            self._kernels[key] = self._load(*key)
        return self._kernels[key]

    def _bay(self, problem: Problem) -> _Bay:
        """Return what checks of ``problem`` need; tail problems have strided operands and outputs."""
        if problem not in self._bays:
            try:
                self._bays[problem] = self._new_bay(problem)
            except RuntimeError as error:
                raise MeasureError(f"cannot set up the check of {problem}: {_brief(error)}") from error
        return self._bays[problem]

    def _new_bay(self, problem: Problem) -> _Bay:
        session = self._opened()
        tail = problem != session.problem
        load = self._tail_workload(problem) if tail else session.workloads[0]
        alpha, beta = load.factors
        oracle = Oracle(problem, *load.numbers(), load.c, load.bias, alpha=alpha, beta=beta)
        dtype = torch_dtype(problem.out_dtype)
        first, again = (Canvas(problem, dtype, self._device, padded=tail) for _ in range(2))
        return _Bay(load, oracle, (first, again))

    def _tail_workload(self, problem: Problem) -> Workload:
        import torch

        generator = torch.Generator(device=self._device).manual_seed(self._seed)
        return Workload.fill(problem, generator, padded=True)

    def prepare(self, candidate: Candidate | None) -> Prepared:
        """Launch once, capture, replay once and see that the replay wrote the outputs.

        Raises:
            LaunchError: It does not run, cannot be captured, or its graph computes nothing.
        """
        session = self._opened()
        key = () if candidate is None else (candidate.shared_object, candidate.symbol, candidate.launch)
        if key not in session.graphs:
            while len(session.graphs) >= _MOST_GRAPHS:
                session.graphs.pop(next(iter(session.graphs)))
            session.graphs[key] = self._prepare(session, candidate)
        return session.graphs[key]

    def must_write(self, candidate: Candidate) -> bool:
        """Return whether a replay that leaves the output as it was has failed; benchmarks may differ."""
        return True

    def _prepare(self, session: _Session, candidate: Candidate | None) -> Prepared:
        count = plan_launches(session.time_us, session.rotation.sets)
        if candidate is None:
            calls = session.vendor_calls(count)
        else:
            workspace = self._scratch.take(candidate.launch)
            calls = session.kernel_calls(self._kernel(candidate), candidate.launch, workspace, count)
        self._launch(calls[0], "first launch")
        last = session.outputs[(count - 1) % session.rotation.sets]
        last.fill_(math.nan if last.is_floating_point() else NEVER)
        try:
            graph = self._capture(calls)
            took = self._lane.replay_us(graph, 1)
            unwritten = bool((last.isnan() if last.is_floating_point() else last == NEVER).any())
        except RuntimeError as error:
            raise LaunchError(f"first replay failed: {_brief(error)}") from error
        if unwritten and (candidate is None or self.must_write(candidate)):
            raise LaunchError(
                "replay of the captured graph left its output unwritten; is it on another stream?"
            )
        return Prepared(_Held(graph, calls), count, took / count)

    def _capture(self, calls: list[Callable[[], None]]) -> Any:
        try:
            return self._lane.capture(calls)
        except _LAUNCH_ERRORS as error:
            self._capture_failed = True  # torch's allocator may still believe in the capture
            cause = error.__context__ or error
            raise LaunchError(f"capture into a graph failed: {_brief(cause)}") from error

    def measure(self, prepared: Prepared, replays: int) -> float:
        """Replay and return microseconds per launch.

        Raises:
            LaunchError: The device reported an error.
        """
        try:
            took = self._lane.replay_us(prepared.graph.graph, replays)
        except RuntimeError as error:
            raise LaunchError(f"replay failed: {_brief(error)}") from error
        return took / (prepared.launches * replays)

    def feed(self, prepared: Prepared) -> Feed:
        """Begin to replay back to back.

        Raises:
            LaunchError: The device reported an error.
        """
        batch = plan_replays(_FEED_US, prepared.replay_us)
        try:
            feed = self._lane.feed(prepared.graph.graph, batch)
        except RuntimeError as error:
            raise LaunchError(f"replay failed: {_brief(error)}") from error
        return _Feed(feed, prepared.launches)

    def energy_mj(self) -> float | None:
        """Return NVML's energy counter in millijoules."""
        return self._meter.energy_mj()

    def sm_clock(self) -> float | None:
        """Return the SM clock in MHz."""
        return self._meter.sm_mhz()

    def read_clocks(self) -> ClockReading:
        """Return clock, power, energy and limits."""
        return self._meter.read()

    def healthy(self) -> bool:
        """Return whether the device still computes."""
        return not self._capture_failed and self._lane.healthy()

    def now(self) -> float:
        """Return seconds of a steady clock."""
        return time.perf_counter()


@dataclass(frozen=True)
class _Held:
    """A graph with the calls, and so the tensors, that it replays."""

    graph: Any
    calls: list[Callable[[], None]]


class _Feed:
    """A lane's feed in launches, with its errors as launch errors."""

    def __init__(self, feed: LaneFeed, launches: int) -> None:
        self._feed = feed
        self._launches = launches

    def top_up(self) -> None:
        """Queue until enough is waiting."""
        try:
            self._feed.top_up()
        except RuntimeError as error:
            raise LaunchError(f"replay failed: {_brief(error)}") from error

    def finish(self) -> float:
        """Wait and return microseconds per launch."""
        try:
            return self._feed.finish() / self._launches
        except RuntimeError as error:
            raise LaunchError(f"replay failed: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    """Return the first lines of an error, without torch's advice on debugging."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def open_cuda(index: int, load: Callable[[Path, str], Kernel] | None = None) -> TorchEngine:
    """Return the engine for GPU ``index``, warmed up: context, cuBLAS for both precisions, graphs, loader.

    Args:
        index: As CUDA counts.
        load: Returns the function of a library by its symbol; the loader of compiled kernels if not given.

    Raises:
        DeviceError: There is no such GPU.
        MeasureError: torch cannot use it.
    """
    facts = present_device(index)
    import torch

    if not torch.cuda.is_available():
        raise MeasureError(f"torch {torch.__version__} cannot use {facts.name}; is it built for CUDA?")
    lane = CudaLane(index)
    device = torch.device("cuda", index)
    for dtype in (torch.bfloat16, torch.float64):
        square = torch.ones((64, 64), dtype=dtype, device=device)
        torch.mm(square, square)
    lane.synchronize()
    return TorchEngine(device, facts, lane, load or _compiled_loader(), ClockMeter(facts.uuid))


def _compiled_loader() -> Callable[[Path, str], Kernel]:
    import tvm_ffi  # noqa: F401 - loading it here keeps its 0.3 s out of the first check

    from cutegen.loader import load_kernel

    return load_kernel
