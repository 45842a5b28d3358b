"""Measuring on a real GPU: readings, checks, graphs, compiled kernels, and recovery from faults and hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hopper import GPU, NEEDS_HOPPER

from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.gemm.tail_shapes import tail_problems
from cutegen.measure import Bench, Candidate
from cutegen.measure.context import CONTEXTS
from cutegen.measure.nvml import ClockMeter
from cutegen.measure.policy import Policy
from cutegen.space import Launch

HERE = Path(__file__).parent
pytestmark = NEEDS_HOPPER

SQUARE = Problem(1024, 1024, 1024)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A bench whose kernels are torch calls."""
    with Bench(engine="gpu_engine:make", search_path=[HERE], timeout_s=20) as opened:
        yield opened


def pretend(name: str, problem: Problem = SQUARE, **changes: object) -> Candidate:
    tail = tail_problems(problem)[0]
    plain = Launch((), 0)
    candidate = Candidate(name, Path("none.so"), name, plain, problem, tail, plain)
    return replace(candidate, **changes)  # type: ignore[arg-type]


def test_device_facts_agree_with_torch(bench: Bench) -> None:
    """The driver and torch see the same GPU."""
    import torch

    assert GPU is not None
    seen = torch.cuda.get_device_properties(0)
    assert (seen.name, seen.multi_processor_count) == (GPU.name, GPU.sm_count)
    assert (seen.major, seen.minor) == GPU.compute_capability and seen.L2_cache_size == GPU.l2_bytes
    assert bench.device == GPU and bench.runtime["cuda_runtime"] == torch.version.cuda


def test_meter_reads_clock_and_energy() -> None:
    """NVML answers for the GPU that CUDA named."""
    assert GPU is not None
    with ClockMeter(GPU.uuid) as meter:
        first = meter.read()
        time.sleep(0.2)
        second = meter.read()
    assert first.sm_mhz and first.power_w
    assert first.energy_mj is None or (second.energy_mj or 0) >= first.energy_mj


@pytest.mark.parametrize(
    "problem",
    [
        SQUARE,
        Problem(1, 6144, 4096),
        Problem(512, 1024, 128, ab_dtype="fp16"),
        Problem(1000, 1001, 512),
        Problem(256, 128, 512, batch=3, layout="kn"),
        Problem(256, 512, 1024, layout="mn"),
        Problem(256, 512, 1024, layout="mk", unaligned_out=True),
        Problem(4096, 128256, 1024),
    ],
    ids=str,
)
def test_right_kernel_passes_and_is_timed(bench: Bench, problem: Problem) -> None:
    """torch's own product passes the check and takes about as long as itself."""
    opened = bench.open(problem)
    assert opened.launches % opened.sets == 0
    result = bench.check(pretend("right", problem))
    assert result.ok, result.error
    run = bench.time([pretend("right", problem)], Policy.screen())
    assert run["right"].median_us > 0 and run.reference.median_us > 0 and run["right"].ratio
    print(f"{problem}: {opened} {run.reference}")  # noqa: T201 - read by whoever runs this by hand


@pytest.mark.parametrize(
    ("problem", "call"),
    [
        (Problem(256, 512, 1024, out_dtype="fp32"), "torch.mm(out_dtype)"),
        (Problem(256, 512, 1024, batch=2, out_dtype="fp32"), "torch.bmm(out_dtype)"),
        (Problem(256, 512, 1024, out_dtype="fp16"), "torch.mm + copy"),
        (Problem(256, 512, 1024, epilogue=Epilogue(True, True, "m", "relu")), "torch.addmm + bias + relu"),
        (Problem(256, 512, 1024, epilogue=Epilogue(bias="n", activation="gelu")), "torch.addmm + gelu"),
        (Problem(256, 512, 1024, ab_dtype="e4m3", epilogue=Epilogue(scale=True)), "torch._scaled_mm"),
        (Problem(256, 512, 1024, ab_dtype="int8"), "torch._int_mm"),
    ],
    ids=str,
)
def test_reference_is_the_nearest_vendor_call(bench: Bench, problem: Problem, call: str) -> None:
    """The reference runs in a graph, and its name says what it is."""
    assert bench.open(problem).reference == call
    assert bench.time([], Policy.screen()).reference.median_us > 0


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "problem", [Problem(64, 7168, 2048), Problem(96, 512, 1024, ab_dtype="e4m3")], ids=str
)
def test_what_runs_before_a_launch_is_taken_off(bench: Bench, problem: Problem, context: str) -> None:
    """A graph of pairs is captured and replayed; what is left of a pair is a positive time."""
    bench.open(problem)
    kernels = [pretend("right", problem)] if problem.ab_dtype == "bf16" else []
    run = bench.time(kernels, Policy.screen(context=context))
    for timing in (*run.values(), run.reference):
        assert timing.median_us > 0
        assert (timing.predecessor_us is None) == (context == "back_to_back")
    print(f"{problem} {context}: {run.reference}")  # noqa: T201


@pytest.mark.alone
def test_settled_timing_reads_clock_power_and_energy(bench: Bench) -> None:
    """A power-limited product settles within the limit and says at which clock."""
    problem = Problem(8192, 8192, 8192)
    bench.open(problem)
    run = bench.time([pretend("right", problem)], Policy.final())
    assert run.settled is not None and 0 < run.settle_s < 4
    timing = run["right"]
    assert timing.sm_clock_mhz and timing.power_w and timing.energy_mj and timing.samples >= 7
    print(run)  # noqa: T201


@pytest.mark.alone
def test_equal_kernels_take_equal_energy(bench: Bench) -> None:
    """Two names of one product, and the reference, agree within 3 %."""
    problem = Problem(8192, 8192, 8192)
    bench.open(problem)
    right = pretend("right", problem)
    twins = [right, replace(right, name="twin")]
    run = bench.time(twins, Policy.final(objective="energy"))
    energies = [timing.energy for timing in (*run.values(), run.reference)]
    assert all(energy is not None and energy.half_width < 0.03 for energy in energies), energies
    middles = [energy.mid for energy in energies if energy is not None]
    assert max(middles) / min(middles) < 1.03
    assert all(100 < (timing.power_w or 0) < 1500 for timing in run.values())
    print(run)  # noqa: T201


@pytest.mark.parametrize(
    ("symbol", "outcome", "words"),
    [
        ("nothing", "wrong_result", "never written"),
        ("most", "wrong_result", "never written"),
        ("inexact", "wrong_result", "out[1023, 1023]"),
        ("faults", "launch_failed", "assert"),
    ],
)
def test_broken_kernel_costs_itself_only(bench: Bench, symbol: str, outcome: str, words: str) -> None:
    """Wrong numbers and faults are found; the next candidate is checked as usual."""
    bench.open(SQUARE)
    result = bench.check(pretend(symbol))
    assert result.outcome == outcome and words in result.error, result.error
    assert bench.check(pretend("right")).ok


@pytest.mark.alone
def test_hanging_kernel_is_killed() -> None:
    """A kernel that spins is a timeout, its process is gone, and the GPU is usable at once."""
    with Bench(engine="gpu_engine:make", search_path=[HERE], timeout_s=4) as bench:
        bench.open(SQUARE)
        assert bench.check(pretend("right")).ok
        assert bench.check(pretend("hangs")).outcome == "timeout"
        assert bench.check(pretend("right")).ok and bench.restarts == 1


def test_kernel_that_cannot_be_captured_is_dropped(bench: Bench) -> None:
    """A failed capture costs the candidate, not the run."""
    bench.open(SQUARE)
    run = bench.time([pretend("right"), pretend("elsewhere")], Policy.screen())
    assert set(run) == {"right"} and "capture" in run.failures["elsewhere"].error


@pytest.mark.dsl
@pytest.mark.parametrize(
    "problem",
    [
        SQUARE,
        Problem(4096, 4096, 4096),
        Problem(256, 256, 8192, batch=2, layout="kn"),
        Problem(333, 1001, 1024, epilogue=Epilogue(True, True, "n", "silu")),
    ],
    ids=str,
)
def test_compiled_default_is_right_and_timed(problem: Problem, tmp_path: Path) -> None:
    """The default config of the real space, compiled here, passes on problem and tail and is timed."""
    from cutegen.build import Builder, Failure
    from cutegen.build.render import render
    from cutegen.build.store import Store
    from cutegen.families.registry import find_space

    assert GPU is not None
    space = find_space("gemm", GPU.arch)
    config = space.default(problem)
    with Builder(Store(tmp_path)) as builder:
        ((_, artifact),) = list(builder.build([render(problem, config, GPU.arch)]))
    assert not isinstance(artifact, Failure), artifact
    with Bench() as bench:
        bench.open(problem)
        candidate = Candidate.of(
            "default", artifact.shared_object, artifact.symbol, space, config, problem, GPU.sm_count
        )
        result = bench.check(candidate)
        assert result.ok and result.tail is not None, result.error
        run = bench.time([candidate], Policy.final())
    assert run["default"].ratio
    print(f"{problem}: {result.seconds:.3f} s to check, {run}")  # noqa: T201
