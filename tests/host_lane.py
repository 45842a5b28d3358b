"""The torch engine on the CPU, with Python functions as kernels: for tests of checks and operands.

A kernel's symbol names a mistake (see :class:`Kernel`); it is called as a compiled one would be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cutegen.errors import LaunchError
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_family
from cutegen.family import Argument, Inputs, bind
from cutegen.family import Problem as AnyProblem
from cutegen.measure.candidate import Candidate
from cutegen.measure.device import Device
from cutegen.measure.nvml import ClockMeter
from cutegen.measure.poisoned_output import PoisonedOutput, new_output
from cutegen.measure.torch_engine import TorchEngine
from cutegen.space import Launch

CPU = torch.device("cpu")
FACTS = Device("CPU", (9, 0), 4, 2**14, 2**30, "0", "0", "none")


class HostLane:
    """Runs things at once; a graph is a list of calls."""

    def __init__(self) -> None:
        self.broken = False

    def capture(self, calls: Sequence[Callable[[], None]]) -> Any:
        return list(calls)

    def replay_us(self, graph: Any, replays: int) -> float:
        start = time.perf_counter()
        for _ in range(replays):
            for call in graph:
                call()
        return (time.perf_counter() - start) * 1e6

    def feed(self, graph: Any, batch: int) -> HostFeed:
        return HostFeed(self, graph, batch)

    def synchronize(self) -> None:
        return None

    def healthy(self) -> bool:
        return not self.broken

    def release(self) -> None:
        return None


class HostFeed:
    """One batch, run at once."""

    def __init__(self, lane: HostLane, graph: Any, batch: int) -> None:
        self.took_us = lane.replay_us(graph, batch) / batch
        self.topped_up = 0

    def top_up(self) -> None:
        self.topped_up += 1

    def finish(self) -> float:
        return self.took_us


class Kernel:
    """A product in fp32 with the calling convention of compiled kernels, and one mistake.

    Scalars: the first is the number of parts k is cut into if there is a workspace.
    """

    calls = 0

    def __init__(self, problem: Problem, mistake: str) -> None:
        self.problem = problem
        self.mistake = mistake

    def __call__(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, *rest: Any) -> None:
        Kernel.calls += 1
        epilogue, more = self.problem.epilogue, list(rest)
        c = more.pop(0) if epilogue.beta else None
        bias = more.pop(0) if epilogue.bias else None
        scales = (more.pop(0), more.pop(0)) if epilogue.scale else None
        workspace = more.pop(0) if more and isinstance(more[0], torch.Tensor) else None
        factors = [x for x in more if isinstance(x, float)]
        assert all(type(x) in (int, float) for x in more)
        value = self.multiply(a, b, workspace)
        if scales is not None:
            value = value * scales[0] * scales[1]
        if epilogue.alpha:
            value = value * factors.pop(0)
        if c is not None:
            value = value + factors.pop(0) * c.to(value.dtype)
        if bias is not None:
            value = value + (bias if epilogue.bias == "n" else bias[:, None]).to(value.dtype)
        self.store(activate(value, epilogue.activation), d)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        wide = torch.float64 if a.dtype == torch.int8 else torch.float32
        a, b = a.to(wide), b.to(wide)
        if self.mistake == "drops a k":
            a = a.clone()
            a[..., -1] = 0
        value = a @ b
        if workspace is not None:
            if self.mistake == "trusts its workspace":
                value = value + workspace[0]
            workspace.zero_()
            if self.mistake == "overruns its workspace":
                whole = workspace.as_strided((workspace.numel() + 1,), (1,))
                whole[-1] = 1.0
            if self.mistake == "leaves its workspace dirty":
                workspace[0] = 1.0
        return value

    def store(self, value: torch.Tensor, d: torch.Tensor) -> None:
        if self.mistake == "fails":
            raise RuntimeError("CUDA error: invalid argument\nCompile with TORCH_USE_CUDA_DSA")
        if self.mistake == "one wrong":
            value[..., -1, -1] += 0.02 * value.abs().mean()
        if self.mistake == "racy" and Kernel.calls % 2:
            value = value * (1 + 2.0**-20)  # within the tolerance of fp32 outputs
        if self.mistake == "skips last row":
            d[..., :-1, :].copy_(value[..., :-1, :])
        elif self.mistake != "writes nothing":
            d.copy_(value)
        if self.mistake == "writes behind a row":
            d.as_strided((d.shape[-2], d.shape[-1] + 1), (d.stride(-2), 1), d.storage_offset())[:, -1] = 0
        if self.mistake == "writes before":
            d.as_strided((1,), (1,), d.storage_offset() - 1).fill_(0)


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    functions = torch.nn.functional
    if name.startswith("gelu"):
        return functions.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"": lambda y: y, "relu": functions.relu, "silu": functions.silu}[name](x)


def gemm_kernel(library: Path, symbol: str) -> Kernel:
    """Load a GEMM: the library's name is a problem's line, the symbol a mistake."""
    if symbol == "absent":
        raise LaunchError(f"{library} has no function {symbol}")
    return Kernel(Problem.parse(str(library)), symbol)


def new_engine(lane: HostLane | None = None, load: Callable[[Path, str], Any] = gemm_kernel) -> TorchEngine:
    """Return an engine on the CPU."""
    return TorchEngine(CPU, FACTS, lane or HostLane(), load, ClockMeter("none"))


def candidate(
    problem: AnyProblem, mistake: str = "right", tail: AnyProblem | None = None, **launch: Any
) -> Candidate:
    """Return a candidate for the engine above."""
    base = Launch(**{"scalars": (3, 1), "workspace_bytes": 0, **launch})
    return Candidate(
        name=mistake,
        shared_object=Path(str(problem)),
        symbol=mistake,
        launch=base,
        problem=problem,
        tail_problem=tail,
        tail_launch=None if tail is None else replace(base),
    )


def filled(problem: Problem, *, awkward: bool = False, seed: int = 1) -> Inputs:
    """Return the same inputs every time."""
    generator = torch.Generator().manual_seed(seed)
    return find_family(problem.family).inputs(problem, generator, awkward=awkward)


def out_of(problem: Problem) -> Argument:
    """Return the argument that kernels for ``problem`` write."""
    return next(a for a in find_family(problem.family).arguments(problem) if a.kind == "out")


def new_out(problem: Problem) -> torch.Tensor:
    """Return an output for ``problem``."""
    return new_output(out_of(problem), CPU)


def poisoned(problem: Problem) -> PoisonedOutput:
    """Return a poisoned output for ``problem``."""
    output = PoisonedOutput(out_of(problem), CPU)
    output.poison()
    return output


def bound(problem: Problem, inputs: Inputs, out: torch.Tensor, launch: Launch) -> tuple[Any, ...]:
    """Return what a kernel for ``problem`` is called with, without a workspace."""
    values = {**inputs.tensors, **inputs.scalars, "out": out}
    return bind(find_family(problem.family).arguments(problem), values, launch)


def call(kernel: Callable[..., None], problem: Problem, inputs: Inputs, out: torch.Tensor) -> None:
    """Call a kernel as a compiled one is called, without integers of a launch."""
    kernel(*bound(problem, inputs, out, Launch((), 0)))


__all__ = [
    "CPU",
    "FACTS",
    "HostLane",
    "Kernel",
    "bound",
    "call",
    "candidate",
    "filled",
    "new_engine",
    "new_out",
    "poisoned",
]
