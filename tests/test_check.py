"""Laws of the check: what is right passes for every kind of problem, and every kind of mistake is found."""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the check compares torch tensors")

from host_lane import HostLane, Kernel, candidate, new_engine  # noqa: E402

from cutegen.canvas import Canvas  # noqa: E402
from cutegen.check import Oracle, Verdict, accumulation_error, judge, sample_lines  # noqa: E402
from cutegen.errors import CheckError, LaunchError, MeasureError  # noqa: E402
from cutegen.measure.candidate import CheckResult  # noqa: E402
from cutegen.measure.plan import tail_problems  # noqa: E402
from cutegen.measure.vendor import vendor_call  # noqa: E402
from cutegen.measure.workload import Workload  # noqa: E402
from cutegen.policy import Policy  # noqa: E402
from cutegen.problem import LAYOUTS, Epilogue, Problem  # noqa: E402
from cutegen.space import Launch  # noqa: E402

SMALL = Problem(72, 40, 64)
WIDE = Problem(72, 40, 64, out_dtype="fp32")


def check(
    problem: Problem, mistake: str = "right", lane: HostLane | None = None, **launch: object
) -> Verdict:
    engine = new_engine(lane)
    engine.open(problem, 0)
    return engine.check(candidate(problem, mistake, **launch), problem)


PROBLEMS = [
    *(Problem(72, 40, 64, layout=name, out_dtype=out) for name, out in product(LAYOUTS, ("bf16", "fp32"))),
    Problem(72, 40, 64, ab_dtype="fp16"),
    Problem(72, 40, 64, out_dtype="fp16"),
    Problem(1, 40, 64),
    Problem(33, 37, 64),
    Problem(33, 40, 64, unaligned_out=True),
    Problem(40, 24, 64, batch=3, layout="nt"),
    Problem(33, 37, 64, batch=2, epilogue=Epilogue(alpha=True, beta=True, bias="n")),
    *(Problem(24, 40, 64, epilogue=Epilogue(activation=a)) for a in ("relu", "gelu", "gelu_tanh", "silu")),
    *(Problem(24, 40, 64, epilogue=Epilogue(alpha, beta, bias)) for alpha, beta, bias in
      product((False, True), (False, True), ("", "m", "n"))),
    Problem(24, 40, 64, out_dtype="fp32", epilogue=Epilogue(True, True, "n", "silu")),
    Problem(24, 40, 64, ab_dtype="e4m3", epilogue=Epilogue(scale=True)),
    Problem(24, 40, 256, ab_dtype="e4m3", promote=True, out_dtype="fp32"),
    Problem(24, 40, 64, ab_dtype="e5m2", batch=2),
    Problem(24, 40, 64, ab_dtype="int8"),
    Problem(24, 41, 64, ab_dtype="int8", out_dtype="bf16", epilogue=Epilogue(scale=True, bias="n")),
    Problem(24, 40, 64, ab_dtype="int8", out_dtype="fp16"),
    Problem(24, 40, 64, any_order=True),
    Problem(24, 40, 64, ab_dtype="tf32"),
    Problem(24, 41, 64, 2, "tf32", "bf16", epilogue=Epilogue(alpha=True, bias="m")),
]  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_right_kernel_passes_on_problem_and_tail(problem: Problem) -> None:
    """Every kind of problem is computed, stored and compared the same way on both sides."""
    engine = new_engine()
    engine.open(problem, 0)
    tail = tail_problems(problem)[0]
    subject = candidate(problem, tail=tail)
    for which in (problem, tail):
        verdict = engine.check(subject, which)
        assert verdict.ok and verdict.deterministic and verdict.compared == 1, verdict
        assert verdict.max_error <= verdict.tolerance and verdict.problem == str(which)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_vendor_call_computes_the_same_thing(problem: Problem) -> None:
    """What candidates are compared with in time solves the same problem, up to torch's own rounding."""
    load = Workload.fill(problem, torch.Generator().manual_seed(2))
    ours, theirs = (Workload.new_output(problem, torch.device("cpu")) for _ in range(2))
    Kernel(problem, "right")(*load.arguments(ours, Launch((), 0), None))
    name, call = vendor_call(load, theirs)
    theirs.fill_(0)
    call(load, theirs)
    scale = ours.double().abs().mean()
    assert name.startswith("torch.")
    assert (ours.double() - theirs.double()).abs().max() < 0.05 * scale


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_dropped_product_is_found(problem: Problem) -> None:
    """Leaving out the last of k terms is not within tolerance, for any kind of problem."""
    verdict = check(problem, "drops a k")
    assert not verdict.ok and verdict.max_error > verdict.tolerance and "should be" in verdict.reason


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("one wrong", r"element \(71, 39\) is"),
        ("writes nothing", "2880 of 2880 elements are not finite or were never written"),
        ("skips last row", r"40 of 2880 elements .* first at \(71, 0\)"),
        ("writes before", "1 elements outside of the output were written"),
        ("racy", "repeated runs on the same operands gave different bits"),
    ],
)
def test_mistake_is_found_and_named(mistake: str, words: str) -> None:
    """The verdict says what is wrong and where."""
    verdict = check(WIDE if mistake == "racy" else SMALL, mistake)
    assert not verdict.ok
    assert re.search(words, verdict.reason), verdict.reason
    assert verdict.deterministic == (mistake != "racy")


def test_any_order_may_differ_but_must_be_right() -> None:
    """Where the problem allows it, different bits are reported and not held against the kernel."""
    loose = check(Problem(72, 40, 64, out_dtype="fp32", any_order=True), "racy")
    assert loose.ok and not loose.deterministic
    wrong = check(Problem(72, 40, 64, out_dtype="fp32", any_order=True), "drops a k")
    assert not wrong.ok


@pytest.mark.parametrize(
    "problem", [SMALL, Problem(33, 37, 64), Problem(33, 40, 64, 2, unaligned_out=True)], ids=str
)
def test_writing_behind_a_row_is_found_on_the_tail(problem: Problem) -> None:
    """The tail's rows have space between them that must stay poisoned; so do its operands' rows."""
    engine = new_engine()
    engine.open(problem, 0)
    tail = tail_problems(problem)[0]
    verdict = engine.check(candidate(problem, "writes behind a row", tail=tail), tail)
    assert not verdict.ok and "outside of the output" in verdict.reason


@pytest.mark.parametrize(
    ("mistake", "launch", "words"),
    [
        ("trusts its workspace", {"workspace_bytes": 64}, "not finite"),
        ("overruns its workspace", {"workspace_bytes": 64}, "wrote behind its workspace of 64 bytes"),
        ("overruns its workspace", {"workspace_bytes": 64, "zeroed": True}, "wrote behind its workspace"),
        ("leaves its workspace dirty", {"workspace_bytes": 64, "zeroed": True}, "must be zero"),
    ],
)
def test_workspace_is_poisoned_and_guarded(mistake: str, launch: dict[str, object], words: str) -> None:
    """A workspace holds NaN (or zeros, if asked for), nothing behind it may change, zeros must come back."""
    if words == "not finite":
        assert words in check(SMALL, mistake, **launch).reason
    else:
        with pytest.raises(CheckError, match=words):
            check(SMALL, mistake, **launch)


def test_zeroed_workspace_is_zero() -> None:
    """A kernel that adds up in its workspace finds zeros there, and NaN where it did not ask."""
    assert check(SMALL, "trusts its workspace", workspace_bytes=64, zeroed=True).ok


def test_failed_launch_is_brief_and_without_advice() -> None:
    """The reason is the driver's, not torch's advice on debugging."""
    with pytest.raises(
        LaunchError, match="launch on gemm 72x40x64 bf16 tn failed: CUDA error: invalid argument"
    ):
        check(SMALL, "fails")
    with pytest.raises(LaunchError, match="has no function absent"):
        check(SMALL, "absent")


def test_check_needs_an_open_problem() -> None:
    """Order of calls is enforced."""
    with pytest.raises(MeasureError, match="no problem is open"):
        new_engine().check(candidate(SMALL), SMALL)


@pytest.mark.parametrize(
    "problem", [SMALL, Problem(40, 24, 64, 2), Problem(24, 40, 64, ab_dtype="int8")], ids=str
)
def test_engine_times_kernels_over_rotating_operands(problem: Problem) -> None:
    """A graph rotates through all operand sets and takes time; one that computes nothing is refused."""
    engine = new_engine()
    facts = engine.open(problem, 0)
    assert (
        facts["sets"] > 1
        and facts["launches"] % facts["sets"] == 0
        and facts["reference"].startswith("torch.")
    )
    for subject in (None, candidate(problem)):
        prepared = engine.prepare(subject)
        assert prepared.launches == facts["launches"] and engine.measure(prepared, 2) > 0
        assert engine.prepare(subject) is prepared
    with pytest.raises(LaunchError, match="left its output unwritten"):
        engine.prepare(candidate(problem, "writes nothing"))


def test_rounds_run_on_the_real_engine() -> None:
    """The logic of rounds and the torch engine fit together."""
    from cutegen.measure.rounds import time_in_rounds

    engine = new_engine()
    engine.open(SMALL, 0)
    policy = Policy(clock="burst", rounds=2, min_rounds=2, round_us=100)
    result = time_in_rounds(
        engine, [candidate(SMALL), candidate(SMALL, "fails")], policy, "x", lambda name: None
    )
    assert set(result.timings) == {"torch", "right"} and set(result.failures) == {"fails"}


# --- the reference ---


def filled(problem: Problem) -> tuple[Workload, torch.Tensor]:
    load = Workload.fill(problem, torch.Generator().manual_seed(1))
    return load, load.a.double() @ load.b.double()


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.ab_dtype != "int8"], ids=str)
def test_tail_operands_are_strided_and_surrounded_by_nan(problem: Problem) -> None:
    """Between rows of tail operands lie 16 bytes of NaN; the layout decides which axis is contiguous."""
    load = Workload.fill(problem, torch.Generator().manual_seed(1), padded=True)
    axes = LAYOUTS[problem.layout]
    for matrix, names, contiguous in zip((load.a, load.b), ("mk", "kn"), axes, strict=True):
        inner = names.index(contiguous)
        strides, extent = matrix.stride()[-2:], matrix.shape[-2:][inner]
        assert strides[inner] == 1 and (strides[1 - inner] - extent) * matrix.element_size() == 16
        values = torch.as_strided(matrix, (extent + 1,), (1,)).float()
        assert values[:extent].isfinite().all() and values[extent].isnan()
    plain = Workload.fill(problem, torch.Generator().manual_seed(1))
    assert all(x.is_contiguous() or x.transpose(-1, -2).is_contiguous() for x in (plain.a, plain.b))


def test_tf32_operands_hold_no_more_than_the_mma_reads() -> None:
    """The lower 13 bits of their fractions are zero, or the reference would be of another product; and
    torch may round operands only while it is compared with."""
    problem = Problem(24, 40, 64, ab_dtype="tf32")
    load, _ = filled(problem)
    for matrix in (load.a, load.b):
        assert matrix.dtype == torch.float32 and matrix.unique().numel() > 100
        assert not (matrix.contiguous().view(torch.int32) & 0x1FFF).any()
    before = torch.get_float32_matmul_precision()
    theirs = Workload.new_output(problem, torch.device("cpu"))
    name, call = vendor_call(load, theirs)
    call(load, theirs)
    assert name == "torch.mm in tf32" and torch.get_float32_matmul_precision() == before


def test_sampled_comparison_finds_errors_on_tile_edges() -> None:
    """A large output is compared on some rows and columns; NaN is found anywhere, errors on edges surely."""
    problem = Problem(1000, 1000, 16)
    load, want = filled(problem)
    oracle = Oracle(problem, load.a, load.b, full_elements=300_000)
    assert 0.1 < oracle.compared < 1
    canvas = Canvas(problem, torch.bfloat16, torch.device("cpu"))
    canvas.poison()
    canvas.d.copy_(want)
    assert judge(canvas, oracle).ok
    for where in ((999, 5), (0, 500), (960, 3), (3, 999), (500, 992), (500, 0)):
        canvas.d.copy_(want)
        canvas.d[where] += 1
        verdict = judge(canvas, oracle)
        assert verdict.where == where and not verdict.ok
    canvas.d.copy_(want)
    canvas.d[501, 501] = math.nan
    assert judge(canvas, oracle).where == (501, 501)


def test_sampled_lines_favour_edges() -> None:
    """First, last and last tile's edge are always there; half are edges; the count is the limit."""
    assert sample_lines(100, 64, 100, 0) is None
    lines = sample_lines(10_000, 64, 100, 3)
    assert lines is not None and len(lines) == 100 and list(lines) == sorted(set(lines))
    assert {0, 9999, 9984, 9983} <= set(lines)
    assert sum(line % 64 in (0, 63) for line in lines) >= 45
    assert lines == sample_lines(10_000, 64, 100, 3) != sample_lines(10_000, 64, 100, 4)


@pytest.mark.parametrize("k", [64, 1024, 16384])
def test_tolerance_is_tight_against_one_lost_block(k: int) -> None:
    """For fp32 outputs what is allowed is far below the size of one block of 8 products."""
    problem = Problem(8, 8, k, out_dtype="fp32")
    norms = k / 3  # of uniform data
    block = math.sqrt(8) / 3
    assert accumulation_error(problem) * norms < block / 2


def test_tolerance_holds_for_truncating_fp32_sums() -> None:
    """Sums of 16 products at a time, truncated to 24 bits after each, stay within half of what is allowed."""
    problem = Problem(64, 64, 8192, out_dtype="fp32")
    load, want = filled(problem)
    total = torch.zeros(64, 64, dtype=torch.float64)
    for low in range(0, problem.k, 16):
        total += load.a[:, low : low + 16].double() @ load.b[low : low + 16].double()
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.trunc(mantissa * 2**24) / 2**24, exponent)
    norms = load.a.double().norm(dim=1)[:, None] * load.b.double().norm(dim=0)[None, :]
    used = ((total - want).abs() / (norms * accumulation_error(problem))).max()
    assert 0.001 < used < 0.5


def test_a_dwell_runs_on_the_real_engine() -> None:
    """The logic of dwells, the engine and its lane fit together; without NVML there is no energy."""
    from cutegen.measure.dwell import dwell

    lane = HostLane()
    engine = new_engine(lane)
    engine.open(SMALL, 0)
    prepared = engine.prepare(candidate(SMALL))
    assert dwell(engine, prepared, 0.01) is None
    shown, clock = iter([100, 100, 250, 250, 400.0, 400]), iter(range(100))
    engine.energy_mj = lambda: next(shown)  # type: ignore[method-assign, assignment]
    engine.now = lambda: next(clock) / 100  # type: ignore[method-assign, return-value]
    found = dwell(engine, prepared, 0.01)
    assert found is not None and found.power_w > 0
    feed = engine.feed(prepared)
    assert feed.finish() == pytest.approx(feed._feed.took_us / prepared.launches)  # type: ignore[attr-defined]


def test_a_dwell_that_fails_is_a_launch_error() -> None:
    """Errors of the device surface as the launch's, wherever they show."""

    def broken(*arguments: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    lane = HostLane()
    engine = new_engine(lane)
    engine.open(SMALL, 0)
    prepared = engine.prepare(candidate(SMALL))
    feed: Any = engine.feed(prepared)
    feed._feed.top_up = feed._feed.finish = broken
    for step in (feed.top_up, feed.finish):
        with pytest.raises(LaunchError, match="replay failed: CUDA error"):
            step()
    lane.feed = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(LaunchError, match="replay failed: CUDA error"):
        engine.feed(prepared)


def test_a_feed_keeps_three_batches_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It queues as the device goes on, never waits meanwhile, and counts every replay in the end."""
    from cutegen.measure.lane import _CudaFeed

    events: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.over = self.waited = False
            events.append(self)

        def record(self) -> None:
            return None

        def query(self) -> bool:
            return self.over

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, end: Event) -> float:
            return float(events.index(end) - events.index(self))  # a millisecond for each batch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    replays: list[int] = []
    feed = _CudaFeed(SimpleNamespace(replay=lambda: replays.append(1)), 5)
    assert len(replays) == 15
    feed.top_up()
    assert len(replays) == 15, "three are waiting still"
    events[1].over = events[2].over = True
    feed.top_up()
    assert len(replays) == 25 and not any(event.waited for event in events)
    assert feed.finish() == 1000 / 5
    assert events[-1].waited


def test_verdict_and_result_survive_json() -> None:
    """Not even NaN is lost, and the text is standard JSON."""
    verdict = check(SMALL, "writes nothing")
    text = json.dumps(CheckResult.judged(verdict, None).to_json(), allow_nan=False)
    again = CheckResult.from_json(json.loads(text))
    assert again.outcome == "wrong_result" and again.verdict is not None
    assert math.isnan(again.verdict.got) and again.verdict.where == (0, 0)
    assert str(Path(str(SMALL))) in again.error
