"""The engine on torch: operands in rotation, poisoned checks, one captured graph per candidate."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.errors import CheckError, LaunchError, MeasureError
from cutegen.families.registry import find_family
from cutegen.family import Argument, Baseline, Inputs, Problem, Reference, Tensors, bind
from cutegen.measure.candidate import Candidate
from cutegen.measure.check import Verdict, verify
from cutegen.measure.context import BACK_TO_BACK, PREDECESSOR
from cutegen.measure.cuda_graphs import CudaLane, Lane, LaneFeed
from cutegen.measure.device import ClockMeter, ClockReading, Device, present_device
from cutegen.measure.engine import Feed, Prepared
from cutegen.measure.guarded import (
    Guarded,
    first_difference,
    is_poisoned,
    new_output,
    poison,
    same_bits,
)
from cutegen.measure.predecessor import Predecessor
from cutegen.measure.scratch import Scratch
from cutegen.measure.sizing import Rotation, plan_launches, plan_replays, plan_rotation
from cutegen.measure.wake import begin_waking
from cutegen.space import Launch

if TYPE_CHECKING:
    import torch

__all__ = ["COPY", "TorchEngine", "open_cuda", "rotating"]

#: Name of what problems without a right baseline are compared with.
COPY = "copy of as many bytes"

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
#: Work that an energy measurement queues at a time, in microseconds: longer than a reading of NVML takes.
_FEED_US = 5_000.0


@dataclass(frozen=True)
class _Run:
    """One way to call a kernel in a check: its outputs, twice, and the inputs that are outputs as well.

    Attributes:
        outputs: Two sets of guarded outputs by name.
        aliases: For an input that the kernel works on in place, the output that it is.
        how: What is special about it, for messages; empty for outputs apart from all inputs.
    """

    outputs: tuple[dict[str, Guarded], dict[str, Guarded]]
    aliases: Mapping[str, str]
    how: str = ""


@dataclass(frozen=True)
class _CheckSet:
    """Everything that checking one problem needs; made when the first candidate is checked on it."""

    problem: Problem
    arguments: tuple[Argument, ...]
    inputs: Inputs
    pristine: Tensors
    reference: Reference
    runs: tuple[_Run, ...]

    @property
    def in_place(self) -> tuple[str, ...]:
        """The arguments that kernels update."""
        return tuple(a.name for a in self.arguments if a.kind == "inout")


class _Session:
    """Operands, outputs, baselines and graphs of the open problem."""

    def __init__(self, problem: Problem, seed: int, rotation: Rotation, device: torch.device) -> None:
        import torch

        family = find_family(problem.family)
        self.problem = problem
        self.rotation = rotation
        self.arguments = family.arguments(problem)
        generator = torch.Generator(device=device).manual_seed(seed)
        self.inputs = [family.inputs(problem, generator) for _ in range(rotation.sets)]
        self.outputs = [self._new_outputs(inputs, device) for inputs in self.inputs]
        in_place = {
            a.name: self.inputs[0].tensors[a.name].clone() for a in self.arguments if a.kind == "inout"
        }
        #: What checks are made on: measuring changes what kernels work on in place.
        self.checked = replace(self.inputs[0], tensors={**self.inputs[0].tensors, **in_place})
        #: Each tensor that is put back before a replay, with what it held.
        self.kept = [
            (inputs.tensors[name], inputs.tensors[name].clone())
            for inputs in self.inputs
            for name in (in_place if family.repeat == "restore" else ())
        ]
        #: What puts them back, as one replayable object; None where nothing is.
        self.restoring: Any = None
        self.baselines = dict(family.baselines(problem, self.inputs[0], self.outputs[0]))
        self._copy = _copy_of_as_many_bytes(problem, device)
        self.predecessors: dict[str, Predecessor] = {}
        self.graphs: dict[tuple[Any, ...], Prepared] = {}
        self.reference = ""
        self.writes_outputs = True
        self.time_us = math.nan

    def _new_outputs(self, inputs: Inputs, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what a launch writes: new tensors, and the inputs that it works on in place."""
        written = [a for a in self.arguments if a.kind in ("out", "inout")]
        return {a.name: new_output(a, device) if a.kind == "out" else inputs.tensors[a.name] for a in written}

    def restore(self) -> None:
        """Put back what the tensors held that kernels work on in place."""
        for tensor, values in self.kept:
            tensor.copy_(values)

    def launches(self) -> int:
        """Return the launches of one graph: one on each operand set where tensors are put back in between."""
        return self.rotation.sets if self.kept else plan_launches(self.time_us, self.rotation.sets)

    def baseline_calls(self, name: str, count: int) -> list[Callable[[], None]]:
        """Return calls of a baseline, rotating through the operand sets."""
        call = rotating(self.baselines.get(name, self._copy), self.rotation.sets)
        sets = list(zip(self.inputs, self.outputs, strict=True))
        return [_bound(call, sets[i % self.rotation.sets]) for i in range(count)]

    def kernel_calls(
        self, kernel: Kernel, launch: Launch, workspace: torch.Tensor | None, count: int
    ) -> list[Callable[[], None]]:
        """Return calls of a kernel, rotating likewise."""
        argument_sets = [
            bind(self.arguments, {**load.tensors, **load.scalars, **out}, launch, workspace)
            for load, out in zip(self.inputs, self.outputs, strict=True)
        ]
        return [_bound(kernel, argument_sets[i % len(argument_sets)]) for i in range(count)]

    def predecessor(self, context: str, l2_bytes: int, device: torch.device) -> Predecessor:
        """Return what runs before launches in a context other than back to back."""
        if context not in self.predecessors:
            name = find_family(self.problem.family).upstream_input(self.problem)
            self.predecessors[context] = (
                Predecessor([inputs.tensors[name] for inputs in self.inputs], l2_bytes)
                if context == "behind"
                else Predecessor.of_nothing(device)
            )
        return self.predecessors[context]


def _copy_of_as_many_bytes(problem: Problem, device: torch.device) -> Baseline:
    """Return a copy that moves as many bytes as ``problem`` must, for problems without a baseline."""
    buffers: list[torch.Tensor] = []

    def copy(inputs: Inputs, outputs: Tensors) -> None:
        import torch

        if not buffers:
            half = max(4, problem.min_bytes // 2)
            buffers.extend(torch.zeros(half // 4, dtype=torch.float32, device=device) for _ in range(2))
        buffers[1].copy_(buffers[0])

    return copy


def rotating(call: Baseline, sets: int) -> Baseline:
    """Return ``call`` such that results that it allocates itself rotate through ``sets`` places as well.

    They are kept for so many calls: the allocator would put each result where the one before it was, and a
    call whose output lies in the L2 cache already would be compared with calls whose output does not.
    """
    kept: deque[Tensors | None] = deque(maxlen=sets - 1)

    def rotated(inputs: Inputs, outputs: Tensors) -> Tensors | None:
        found = call(inputs, outputs)
        kept.append(found)
        return found

    return rotated


def _bound(kernel: Callable[..., object], arguments: tuple[Any, ...]) -> Callable[[], None]:
    def call() -> None:
        kernel(*arguments)

    return call


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
        self._check_sets: dict[Problem, _CheckSet] = {}
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
        """Allocate operands in rotation, time the baselines roughly and keep the fastest that is right."""
        self._session = None
        self._check_sets.clear()
        self._scratch.clear()
        self._lane.release()
        self._seed = seed
        rotation = plan_rotation(problem, self._facts.l2_bytes, self._facts.memory_bytes)
        try:
            session = self._session = _Session(problem, seed, rotation, self._device)
            self._choose_baseline(session)
            if session.kept:
                session.restore()
                session.restoring = self._lane.capture([session.restore])
        except RuntimeError as error:
            self._session = None
            raise MeasureError(f"cannot set up {problem}: {_brief(error)}") from error
        return {
            "reference": session.reference,
            "reference_us": session.time_us,
            "sets": rotation.sets,
            "footprint_bytes": rotation.footprint_bytes,
            "launches": session.launches(),
        }

    def _choose_baseline(self, session: _Session) -> None:
        times = self._rough_times(session)
        for name in sorted(times, key=lambda name: times[name]):
            if len(times) == 1 or self._is_right(session, name):
                session.reference, session.time_us = name, times[name]
                found = session.baselines[name](session.inputs[0], session.outputs[0])
                session.writes_outputs = found is None
                return
        # Rounds need something to pair candidates with; a copy says how fast memory is.
        session.reference, session.time_us = COPY, self._rough_us(session.baseline_calls(COPY, 4))
        session.writes_outputs = False

    def _rough_times(self, session: _Session) -> dict[str, float]:
        """Return how long each baseline takes; one that does not run is left out if another does.

        What a library offers depends on its version and on the problem, such as attention by cuDNN.
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

    def _is_right(self, session: _Session, name: str) -> bool:
        """Return whether a baseline stays within the error that kernels are allowed."""
        checks = self._check_set(session.problem)
        run = checks.runs[0]

        def call(outputs: Mapping[str, Guarded]) -> None:
            written = {name: output.tensor for name, output in outputs.items()}
            for own, tensor in (session.baselines[name](checks.inputs, written) or {}).items():
                written[own].copy_(tensor)
            self._lane.synchronize()

        return verify(call, run.outputs, checks.reference, repeats=0).ok

    def _rough_us(self, calls: list[Callable[[], None]]) -> float:
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
        checks = self._check_set(problem)
        workspace = self._scratch.take(launch, poison=True)
        if repeats is None:
            repeats = _REPEATS if problem.flops < _LARGE_FLOPS else _REPEATS_LARGE
        family = find_family(problem.family)
        any_order = family.any_order(problem)
        for run in checks.runs:
            call = self._caller(kernel, checks, run, launch, workspace)
            verdict = verify(call, run.outputs, checks.reference, repeats, any_order=any_order)
            if not verdict.ok:
                break
            if family.repeat == "idempotent" and checks.in_place:
                _see_that_nothing_changes(call, run.outputs, checks.in_place)
        self._inspect_inputs(checks)
        if verdict.ok:
            self._scratch.inspect(launch)
        elif run.how:
            verdict = replace(verdict, reason=f"{verdict.reason}, with {run.how}")
        return replace(verdict, problem=str(problem))

    def _caller(
        self,
        kernel: Kernel,
        checks: _CheckSet,
        run: _Run,
        launch: Launch,
        workspace: torch.Tensor | None,
    ) -> Callable[[Mapping[str, Guarded]], None]:
        inputs = {**checks.inputs.tensors, **checks.inputs.scalars}

        def call(outputs: Mapping[str, Guarded]) -> None:
            written = {name: output.tensor for name, output in outputs.items()}
            aliased = {name: written[output] for name, output in run.aliases.items()}
            arguments = bind(checks.arguments, {**inputs, **written, **aliased}, launch, workspace)
            self._launch(_bound(kernel, arguments), f"launch on {checks.problem}")

        return call

    def _inspect_inputs(self, checks: _CheckSet) -> None:
        """See that the inputs hold the bits that they held before; if not, put these back.

        Raises:
            CheckError: The kernel wrote one of its inputs.
        """
        written = []
        for name, before in checks.pristine.items():
            after = checks.inputs.tensors[name]
            if not same_bits(before, after):
                written.append(f"{name}, first at {first_difference(before, after)}")
                after.copy_(before)
        if written:
            raise CheckError(f"wrote its input {'; its input '.join(written)}")

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

    def _check_set(self, problem: Problem) -> _CheckSet:
        """Return what checks of ``problem`` need; tail problems have strided inputs and outputs."""
        if problem not in self._check_sets:
            try:
                self._check_sets[problem] = self._new_check_set(problem)
            except RuntimeError as error:
                raise MeasureError(f"cannot set up the check of {problem}: {_brief(error)}") from error
        return self._check_sets[problem]

    def _new_check_set(self, problem: Problem) -> _CheckSet:
        import torch

        session, family = self._opened(), find_family(problem.family)
        tail = problem != session.problem
        generator = torch.Generator(device=self._device).manual_seed(self._seed)
        inputs = family.inputs(problem, generator, awkward=True) if tail else session.checked
        arguments = family.arguments(problem)
        pristine = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
        return _CheckSet(
            problem=problem,
            arguments=arguments,
            inputs=inputs,
            pristine=pristine,
            reference=family.reference(problem, Inputs(pristine, inputs.scalars)),
            runs=tuple(self._runs(arguments, inputs, gaps=tail)),
        )

    def _runs(self, arguments: Sequence[Argument], inputs: Inputs, *, gaps: bool) -> Iterator[_Run]:
        """Yield the ways to call a kernel: outputs apart from all inputs, then each as what it may alias."""
        written = [a for a in arguments if a.kind in ("out", "inout")]

        def guarded(initial: Mapping[str, torch.Tensor]) -> dict[str, Guarded]:
            device = self._device
            return {a.name: Guarded(a, device, gaps=gaps, initial=initial.get(a.name)) for a in written}

        in_place = {a.name: inputs.tensors[a.name] for a in written if a.kind == "inout"}
        yield _Run((guarded(in_place), guarded(in_place)), {})
        for argument in written:
            for name in argument.may_alias:
                initial = {**in_place, argument.name: inputs.tensors[name]}
                how = f"{argument.name} in the place of {name}"
                yield _Run((guarded(initial), guarded(initial)), {name: argument.name}, how)

    def prepare(self, candidate: Candidate | None, context: str = BACK_TO_BACK) -> Prepared:
        """Launch once, capture, replay once and see that the replay wrote the outputs.

        Raises:
            LaunchError: It does not run, cannot be captured, or its graph computes nothing.
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
            raise LaunchError(f"the kernel before each launch failed: {_brief(error)}") from error

    def must_write(self, candidate: Candidate) -> bool:
        """Return whether a replay that leaves the output as it was has failed; benchmarks may differ."""
        return True

    def _prepare(self, session: _Session, candidate: Candidate | None, context: str) -> Prepared:
        count = session.launches()
        if candidate is None:
            calls = session.baseline_calls(session.reference, count)
        else:
            workspace = self._scratch.take(candidate.launch)
            calls = session.kernel_calls(self._kernel(candidate), candidate.launch, workspace, count)
        self._launch(calls[0], "first launch")
        if context != BACK_TO_BACK:
            before = self._predecessor(context).calls(count)
            self._launch(before[0], "the kernel before each launch")
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
            raise LaunchError(f"first replay failed: {_brief(error)}") from error
        if left and (self.must_write(candidate) if candidate else session.writes_outputs):
            raise LaunchError(
                f"replay of the captured graph left {left[0]} unwritten; is the kernel on another stream?"
            )
        return Prepared(_Held(graph, calls), count, took / count, back_to_back=not session.kept)

    def _replay_us(self, graph: Any, replays: int) -> float:
        """Replay and return the microseconds, without those of putting tensors back before each replay."""
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
            took = self._replay_us(prepared.graph.graph, replays)
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


def _see_that_nothing_changes(
    call: Callable[[Mapping[str, Guarded]], None],
    outputs: tuple[dict[str, Guarded], dict[str, Guarded]],
    names: Sequence[str],
) -> None:
    """See that a kernel leaves its own results as they are.

    Raises:
        CheckError: It does not.
    """
    once, again = outputs
    for name in names:
        again[name].tensor.copy_(once[name].tensor)
    call(again)
    changed = next((name for name in names if not once[name].same_bits(again[name])), "")
    if changed:
        raise CheckError(
            f"run on its own result it changes {changed}, which idempotent kernels do not; declare "
            "repeat='bounded' if values stay in their range, else repeat='restore'"
        )


def _brief(error: BaseException) -> str:
    """Return the first lines of an error, without torch's advice on debugging."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


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
