"""The engine on torch: operands in rotation, poisoned checks, one captured graph per candidate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.errors import LaunchError, MeasureError
from cutegen.family import Problem
from cutegen.measure.candidate import Candidate
from cutegen.measure.check import Verdict
from cutegen.measure.checker import Checker, launch_and_wait
from cutegen.measure.context import BACK_TO_BACK, PREDECESSOR
from cutegen.measure.cuda_graphs import CudaLane, Lane, LaneFeed
from cutegen.measure.device import Device, present_device
from cutegen.measure.engine import Feed, Prepared
from cutegen.measure.launch_errors import LAUNCH_ERRORS, brief
from cutegen.measure.nvml import ClockMeter, ClockReading
from cutegen.measure.operand_sets import COPY, Kernel, OpenProblem
from cutegen.measure.poisoned_output import is_poisoned, poison
from cutegen.measure.predecessor import Predecessor
from cutegen.measure.scratch import Scratch
from cutegen.measure.sizing import plan_launches, plan_replays, plan_rotation
from cutegen.measure.wake import begin_waking

if TYPE_CHECKING:
    import torch

__all__ = ["TorchEngine", "open_cuda"]

#: Captured graphs that are kept.
_MOST_GRAPHS = 128
#: Work that an energy measurement queues at a time, in microseconds: more than a reading of NVML takes.
_FEED_US = 5_000.0


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
        self._scratch = Scratch(device)
        self._session: OpenProblem | None = None
        self._checker: Checker | None = None
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
        """Allocate operand sets, time the baselines roughly and keep the fastest correct one."""
        self._session = self._checker = None
        self._scratch.clear()
        self._lane.release()
        rotation = plan_rotation(problem, self._facts.l2_bytes, self._facts.memory_bytes)
        try:
            session = self._session = OpenProblem(problem, seed, rotation, self._device)
            self._checker = Checker(session, seed, self._device, self._lane, self._scratch)
            self._choose_baseline(session)
            if session.kept:
                session.restore()
                session.restoring = self._lane.capture([session.restore])
        except RuntimeError as error:
            self._session = self._checker = None
            raise MeasureError(f"cannot set up {problem}: {brief(error)}") from error
        return {
            "reference": session.reference,
            "reference_us": session.time_us,
            "sets": rotation.sets,
            "footprint_bytes": rotation.footprint_bytes,
            "launches": session.launches(),
        }

    def _choose_baseline(self, session: OpenProblem) -> None:
        times = self._rough_times(session)
        for name in sorted(times, key=lambda name: times[name]):
            if len(times) == 1 or self._checker_of_open().is_right(session.baselines[name]):
                session.reference, session.time_us = name, times[name]
                found = session.baselines[name](session.inputs[0], session.outputs[0])
                session.writes_outputs = found is None
                return
        # Rounds need a reference to pair candidates with; a copy shows the memory bandwidth.
        session.reference, session.time_us = COPY, self._rough_us(session.baseline_calls(COPY, 4))
        session.writes_outputs = False

    def _rough_times(self, session: OpenProblem) -> dict[str, float]:
        """Return rough microseconds of each baseline; one that does not run is left out if another does.

        Whether a baseline runs may depend on the library's version and on the problem, as for cuDNN.
        """
        times: dict[str, float] = {}
        failed: RuntimeError | None = None
        for name in tuple(session.baselines):
            try:
                times[name] = self._rough_us(session.baseline_calls(name, 4))
            except RuntimeError as error:
                failed = error
                del session.baselines[name]
        if failed is not None and not times:
            raise failed
        return times

    def _rough_us(self, calls: list[Callable[[], None]]) -> float:
        for call in calls:
            call()
        self._lane.synchronize()
        graph = self._lane.capture(calls)
        self._lane.replay_us(graph, 1)
        return max(0.1, self._lane.replay_us(graph, 1) / len(calls))

    def _opened(self) -> OpenProblem:
        if self._session is None:
            raise MeasureError("no problem is open")
        return self._session

    def _checker_of_open(self) -> Checker:
        if self._checker is None:
            raise MeasureError("no problem is open")
        return self._checker

    def check(self, candidate: Candidate, problem: Problem, repeats: int | None = None) -> Verdict:
        """Check a candidate on the open problem or on its tail; raises as :meth:`Checker.check`."""
        launch = candidate.launch if problem == candidate.problem else candidate.tail_launch
        if launch is None:
            raise MeasureError(f"candidate {candidate.name} has no launch for {problem}")
        checker = self._checker_of_open()
        return checker.check(self._kernel(candidate), launch, problem, repeats)

    def _kernel(self, candidate: Candidate) -> Kernel:
        key = (candidate.shared_object, candidate.symbol)
        if key not in self._kernels:
            self._kernels[key] = self._load(*key)
        return self._kernels[key]

    def prepare(self, candidate: Candidate | None, context: str = BACK_TO_BACK) -> Prepared:
        """Launch once, capture, replay once and check that the replay wrote the outputs.

        Raises:
            LaunchError: It does not run, cannot be captured, or its graph writes no outputs.
        """
        session = self._opened()
        key: tuple[Any, ...] = (context,)
        if candidate is not None:
            key = (context, candidate.shared_object, candidate.symbol, candidate.launch)
        return self._remembered(key, lambda: self._prepare(session, candidate, context))

    def prepare_predecessor(self, context: str) -> Prepared:
        """Capture what runs before launches in ``context``, alone.

        Raises:
            LaunchError: It does not run.
        """
        return self._remembered((context, PREDECESSOR), lambda: self._prepare_predecessor(context))

    def _remembered(self, key: tuple[Any, ...], make: Callable[[], Prepared]) -> Prepared:
        graphs = self._opened().graphs
        if key not in graphs:
            while len(graphs) >= _MOST_GRAPHS:
                graphs.pop(next(iter(graphs)))
            graphs[key] = make()
        return graphs[key]

    def _predecessor(self, context: str) -> Predecessor:
        return self._opened().predecessor(context, self._facts.l2_bytes, self._device)

    def _prepare_predecessor(self, context: str) -> Prepared:
        predecessor = self._predecessor(context)
        try:
            count = plan_launches(self._rough_us(predecessor.own_calls(4)), 1)
            calls = predecessor.own_calls(count)
            graph = self._capture(calls)
            return Prepared(_Held(graph, calls), count, self._lane.replay_us(graph, 1) / count)
        except RuntimeError as error:
            raise LaunchError(f"the kernel before each launch failed: {brief(error)}") from error

    def must_write(self, candidate: Candidate) -> bool:
        """Return whether a replay that leaves the output unwritten has failed; benchmarks override this."""
        return True

    def _prepare(self, session: OpenProblem, candidate: Candidate | None, context: str) -> Prepared:
        count = session.launches()
        if candidate is None:
            calls = session.baseline_calls(session.reference, count)
        else:
            workspace = self._scratch.take(candidate.launch)
            calls = session.kernel_calls(self._kernel(candidate), candidate.launch, workspace, count)
        launch_and_wait(self._lane, calls[0], "first launch")
        if context != BACK_TO_BACK:
            before = self._predecessor(context).calls(count)
            launch_and_wait(self._lane, before[0], "the kernel before each launch")
            calls = [call for pair in zip(before, calls, strict=True) for call in pair]
        outputs = session.outputs[(count - 1) % session.rotation.sets]
        last = {a.name: outputs[a.name] for a in session.arguments if a.kind == "out"}
        for output in last.values():
            poison(output)
        try:
            graph = self._capture(calls)
            took = self._replay_us(graph, 1)
            left = [name for name, output in last.items() if is_poisoned(output)]
        except RuntimeError as error:
            raise LaunchError(f"first replay failed: {brief(error)}") from error
        if left and (self.must_write(candidate) if candidate else session.writes_outputs):
            raise LaunchError(
                f"replay of the captured graph left {left[0]} unwritten; is the kernel on another stream?"
            )
        return Prepared(_Held(graph, calls), count, took / count, back_to_back=not session.kept)

    def _replay_us(self, graph: Any, replays: int) -> float:
        """Replay and return the microseconds, without those of restoring tensors before each replay."""
        restoring = self._opened().restoring
        if restoring is None:
            return self._lane.replay_us(graph, replays)
        took = 0.0
        for _ in range(replays):
            self._lane.replay_us(restoring, 1)
            took += self._lane.replay_us(graph, 1)
        return took

    def _capture(self, calls: list[Callable[[], None]]) -> Any:
        try:
            return self._lane.capture(calls)
        except LAUNCH_ERRORS as error:
            self._capture_failed = True  # torch's allocator may still be in capture mode
            cause = error.__context__ or error
            raise LaunchError(f"capture into a graph failed: {brief(cause)}") from error

    def measure(self, prepared: Prepared, replays: int) -> float:
        """Replay and return microseconds per launch.

        Raises:
            LaunchError: The device reported an error.
        """
        try:
            took = self._replay_us(prepared.graph.graph, replays)
        except RuntimeError as error:
            raise LaunchError(f"replay failed: {brief(error)}") from error
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
            raise LaunchError(f"replay failed: {brief(error)}") from error
        return _Feed(feed, prepared.launches)

    def energy_mj(self) -> float | None:
        """Return NVML's energy counter in millijoules."""
        return self._meter.energy_mj()

    def idle(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

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
    """A graph, and the calls that it replays, which keep its tensors alive."""

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
            raise LaunchError(f"replay failed: {brief(error)}") from error

    def finish(self) -> float:
        """Wait and return microseconds per launch."""
        try:
            return self._feed.finish() / self._launches
        except RuntimeError as error:
            raise LaunchError(f"replay failed: {brief(error)}") from error


def open_cuda(
    index: int,
    load: Callable[[Path, str], Kernel] | None = None,
    engine: type[TorchEngine] = TorchEngine,
) -> TorchEngine:
    """Return the engine for GPU ``index``, warmed up: context, cuBLAS for both precisions, graphs, loader.

    Args:
        index: As CUDA counts.
        load: Returns the function of a library by its symbol; the loader of compiled kernels if not given.
        engine: The class to make.

    Raises:
        DeviceError: There is no such GPU.
        MeasureError: torch cannot use it.
    """
    facts = present_device(index)
    begin_waking(index)
    import torch

    if not torch.cuda.is_available():
        raise MeasureError(f"torch {torch.__version__} cannot use {facts.name}; is it built for CUDA?")
    lane = CudaLane(index)
    device = torch.device("cuda", index)
    for dtype in (torch.bfloat16, torch.float64):
        square = torch.ones((64, 64), dtype=dtype, device=device)
        torch.mm(square, square)
    lane.synchronize()
    return engine(device, facts, lane, load or _compiled_loader(), ClockMeter(facts.uuid))


def _compiled_loader() -> Callable[[Path, str], Kernel]:
    import tvm_ffi  # noqa: F401 - loading it here keeps its 0.3 s out of the first check

    from cutegen.build.loader import load_kernel

    return load_kernel
