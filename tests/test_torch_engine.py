"""The torch engine on the CPU: right kernels pass, mistakes of every kind are found, all can be timed."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine runs on torch tensors")

from gemm_problems import PROBLEMS  # noqa: E402
from host_lane import HostLane, candidate, new_engine  # noqa: E402

from cutegen.errors import CheckError, LaunchError, MeasureError  # noqa: E402
from cutegen.families import registry  # noqa: E402
from cutegen.families.declared import DeclaredFamily, read, update, write  # noqa: E402
from cutegen.families.gemm.problem import Problem  # noqa: E402
from cutegen.families.gemm.tail_shapes import tail_problems  # noqa: E402
from cutegen.family import Baseline, Inputs, Size  # noqa: E402
from cutegen.measure.check import Verdict  # noqa: E402
from cutegen.measure.context import CONTEXTS  # noqa: E402
from cutegen.measure.operand_sets import COPY, rotating  # noqa: E402
from cutegen.measure.policy import Policy  # noqa: E402
from cutegen.measure.predecessor import Predecessor, add_nothing  # noqa: E402
from cutegen.measure.timed_rounds import time_in_rounds  # noqa: E402
from cutegen.measure.torch_engine import TorchEngine  # noqa: E402

SMALL = Problem(72, 40, 64)
WIDE = Problem(72, 40, 64, out_dtype="fp32")


def check(
    problem: Problem, mistake: str = "right", lane: HostLane | None = None, **launch: object
) -> Verdict:
    engine = new_engine(lane)
    engine.open(problem, 0)
    return engine.check(candidate(problem, mistake, **launch), problem)


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
def test_dropped_product_is_found(problem: Problem) -> None:
    """Leaving out the last of k terms is not within tolerance, for any kind of problem."""
    verdict = check(problem, "drops a k")
    assert not verdict.ok and verdict.max_error > verdict.tolerance and "should be" in verdict.reason


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("one wrong", r"out\[71, 39\] is"),
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
        LaunchError, match="launch on gemm 72x40x64 bf16 kk failed: CUDA error: invalid argument"
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
    with pytest.raises(LaunchError, match="left out unwritten"):
        engine.prepare(candidate(problem, "writes nothing"))


def test_rounds_run_on_the_real_engine() -> None:
    """The logic of rounds and the torch engine fit together."""
    engine = new_engine()
    engine.open(SMALL, 0)
    policy = Policy(clock="burst", rounds=2, min_rounds=2, round_us=100)
    result = time_in_rounds(
        engine, [candidate(SMALL), candidate(SMALL, "fails")], policy, "x", lambda name: None
    )
    assert set(result) == {"right"} and set(result.failures) == {"fails"}


def test_energy_is_measured_by_the_real_engine() -> None:
    """Isolated energy, the engine and its lane fit together; without NVML there is no energy."""
    from cutegen.measure.energy import isolated_energy

    lane = HostLane()
    engine = new_engine(lane)
    engine.open(SMALL, 0)
    prepared = engine.prepare(candidate(SMALL))
    assert isolated_energy(engine, prepared, 0.01) is None
    shown, clock = iter([100, 100, 250, 250, 400.0, 400]), iter(range(100))
    engine.energy_mj = lambda: next(shown)  # type: ignore[method-assign, assignment]
    engine.now = lambda: next(clock) / 100  # type: ignore[method-assign, return-value]
    found = isolated_energy(engine, prepared, 0.01)
    assert found is not None and found.power_w > 0
    feed = engine.feed(prepared)
    assert feed.finish() == pytest.approx(feed._feed.took_us / prepared.launches)  # type: ignore[attr-defined]


def test_failing_in_an_energy_measurement_is_a_launch_error() -> None:
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


# --- any family ---

Kernel = Callable[..., None]
X, Y = (declare(name, "fp32", ("m", "n")) for name, declare in (("x", read), ("y", write)))


class VirtualLane(HostLane):
    """Its time is what the calls say they took."""

    def __init__(self) -> None:
        super().__init__()
        self.took_us = 0.0

    def replay_us(self, graph: Any, replays: int) -> float:
        before = self.took_us
        super().replay_us(graph, replays)
        return self.took_us - before


def toy(
    monkeypatch: pytest.MonkeyPatch,
    kernels: Mapping[str, Kernel],
    arguments: Sequence[Any] = (X, Y),
    lane: HostLane | None = None,
    **changes: Any,
) -> tuple[TorchEngine, Any]:
    """Return an engine for a family that doubles x, and a problem of it; kernels by symbol."""
    mul: Baseline = lambda inputs, outputs: double(inputs.tensors["x"], outputs["y"])  # noqa: E731
    given: dict[str, Any] = {
        "reference": lambda x: {"y": 2 * x},
        "baselines": lambda problem: {"torch.mul": mul},
        **changes,
    }
    sizes = (Size("m", "rows"), Size("n", "columns"))
    family = DeclaredFamily(
        "toy", "twice x", sizes=sizes, options=(), arguments=tuple(arguments), rows="m", **given
    )
    entry = registry._Registered(family, Path(), Path(), lambda stem: pytest.fail(f"{stem} was imported"))
    monkeypatch.setitem(registry._all(), "toy", entry)
    return new_engine(lane, lambda library, symbol: kernels[symbol]), family.parse("toy 5x8")


def double(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.mul(x, 2, out=y)


@pytest.mark.parametrize("factor", [2, 3])
def test_an_input_that_a_kernel_changes_is_found_and_put_back(
    monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    """Whether its result is right or not; the next kernel finds what it should."""

    def vandal(x: torch.Tensor, y: torch.Tensor) -> None:
        torch.mul(x, factor, out=y)
        x[4, 7] += 1

    engine, problem = toy(monkeypatch, {"vandal": vandal, "right": double})
    engine.open(problem, 0)
    for which in (problem, problem.with_sizes(m=37)):
        with pytest.raises(CheckError, match=r"wrote its input x, first at \(4, 7\)"):
            engine.check(candidate(problem, "vandal", tail=problem.with_sizes(m=37)), which)
        assert engine.check(candidate(problem, tail=problem.with_sizes(m=37)), which).ok


def test_all_inputs_that_a_kernel_changes_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one kernel wrote is not held against the next."""

    def vandal(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
        double(x, y)
        x[4, 7] += 1
        w[1, 2] += 1

    kernels = {"vandal": vandal, "right": lambda x, w, y: double(x, y)}
    arguments = (X, read("w", "fp32", ("m", "n")), Y)
    engine, problem = toy(monkeypatch, kernels, arguments, reference=lambda x, w: {"y": 2 * x})
    engine.open(problem, 0)
    with pytest.raises(CheckError, match=r"its input x, first at \(4, 7\); its input w, first at \(1, 2\)"):
        engine.check(candidate(problem, "vandal"), problem)
    assert engine.check(candidate(problem), problem).ok


def test_an_output_that_may_be_an_input_is_checked_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that clears y before it reads x is right only while the two are apart."""
    together: list[bool] = []

    def right(x: torch.Tensor, y: torch.Tensor) -> None:
        together.append(x.data_ptr() == y.data_ptr())
        double(x, y)

    def hasty(x: torch.Tensor, y: torch.Tensor) -> None:
        y.zero_()
        y.add_(x, alpha=2)

    arguments = (X, write("y", "fp32", ("m", "n"), may_alias=("x",)))
    engine, problem = toy(monkeypatch, {"right": right, "hasty": hasty}, arguments)
    engine.open(problem, 0)
    assert engine.check(candidate(problem), problem, repeats=1).ok
    assert together == [False, False, True, True]
    verdict = engine.check(candidate(problem, "hasty"), problem)
    assert not verdict.ok and verdict.reason.endswith(", with y in the place of x") and verdict.got == 0
    apart, problem = toy(monkeypatch, {"hasty": hasty})
    apart.open(problem, 0)
    assert apart.check(candidate(problem, "hasty"), problem).ok


def test_the_fastest_baseline_that_is_right_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster one that is wrong is passed over; if none is right a copy takes its place."""
    lane = VirtualLane()

    def baseline(took_us: float, factor: float) -> Baseline:
        def call(inputs: Any, outputs: Any) -> Any:
            lane.took_us += took_us
            return {"y": inputs.tensors["x"] * factor}  # of its own, as torch's functions return them

        return call

    wrong, slow, fast = baseline(3, 2.01), baseline(9, 2), baseline(5, 2)
    found = {"slow": slow, "wrong": wrong, "fast": fast}
    engine, problem = toy(monkeypatch, {}, lane=lane, baselines=lambda problem: found)
    facts = engine.open(problem, 0)
    assert (facts["reference"], facts["reference_us"]) == ("fast", 5)
    prepared = engine.prepare(None)
    assert (prepared.first_us, engine.measure(prepared, 3)) == (5, 5)
    found = {"wrong": wrong, "worse": baseline(1, 0)}
    assert engine.open(problem, 0)["reference"] == COPY
    assert engine.measure(engine.prepare(None), 1) == 0, "it says nothing to this lane"


def test_a_baseline_that_does_not_run_is_left_out_if_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries differ in what they offer; if nothing runs, the reason is told."""

    def absent(inputs: Any, outputs: Any) -> Any:
        raise RuntimeError("No available kernel. Aborting execution.")

    def right(inputs: Any, outputs: Any) -> Any:
        return {"y": inputs.tensors["x"] * 2}

    found: dict[str, Baseline] = {"absent": absent, "right": right}
    engine, problem = toy(monkeypatch, {}, baselines=lambda problem: found)
    assert engine.open(problem, 0)["reference"] == "right"
    found = {"absent": absent}
    with pytest.raises(MeasureError, match="cannot set up toy 5x8: No available kernel"):
        engine.open(problem, 0)


def test_what_kernels_work_on_in_place_is_the_same_in_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring changes it; checks before and after do not see that."""

    def add(inputs: Any, outputs: Any) -> None:
        torch.add(inputs.tensors["total"], inputs.tensors["x"], out=outputs["total"])

    kernels: dict[str, Kernel] = {
        "right": lambda x, total: total.add_(x),
        "lazy": lambda x, total: None,
        "twice": lambda x, total: total.add_(x).add_(x),
    }
    engine, problem = toy(
        monkeypatch,
        kernels,
        (X, update("total", "fp32", ("m", "n"))),
        reference=lambda x, total: {"total": total + x},
        baselines=lambda problem: {"torch.add": add, "again": add},
    )
    engine.open(problem, 0)
    for _ in range(2):
        assert engine.check(candidate(problem), problem, repeats=2).ok
        assert not engine.check(candidate(problem, "lazy"), problem).ok
        assert not engine.check(candidate(problem, "twice"), problem).ok
        assert engine.measure(engine.prepare(candidate(problem)), 2) > 0
        assert engine.measure(engine.prepare(None), 2) > 0


class SpanLane(HostLane):
    """Notes what each timed span ran: calls of its graph, and launches of the kernel among them."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, int]] = []
        self.launched = 0

    def replay_us(self, graph: Any, replays: int) -> float:
        before = self.launched
        took = super().replay_us(graph, replays)
        self.spans.append((replays * len(graph), self.launched - before))
        return took


@pytest.mark.parametrize("repeat", ["restore", "bounded"])
def test_what_is_updated_is_put_back_between_timed_spans(
    monkeypatch: pytest.MonkeyPatch, repeat: Any
) -> None:
    """Each launch finds what a caller passes, and no timed span of a kernel holds anything but launches."""
    lane, found = SpanLane(), {}

    def add(x: torch.Tensor, total: torch.Tensor) -> None:
        lane.launched += 1
        found.setdefault(x.data_ptr(), []).append(float(total[0, 0]))
        total.add_(x)

    engine, problem = toy(
        monkeypatch,
        {"right": add},
        (X, update("total", "fp32", ("m", "n"))),
        lane,
        reference=lambda x, total: {"total": total + x},
        baselines=lambda problem: {"torch.add": lambda inputs, outputs: {"total": inputs.tensors["x"] + 1}},
        repeat=repeat,
    )
    engine.open(problem, 0)
    first = engine.prepare(candidate(problem))
    found.clear()
    lane.spans.clear()
    assert engine.measure(first, 3) > 0
    assert all(launched in (0, calls) for calls, launched in lane.spans)
    assert sum(launched for _, launched in lane.spans) == 3 * first.launches
    kept = all(len({*values}) == 1 for values in found.values())
    assert kept == (repeat == "restore") == (not first.back_to_back)
    if repeat == "restore":  # a counter of energy would see what puts tensors back
        policy = Policy(settle_s=0.0, rounds=2, min_rounds=2, round_us=100, energy_s=0.1)
        engine.feed = lambda prepared: pytest.fail("replays followed one another")  # type: ignore[method-assign]
        assert set(time_in_rounds(engine, [candidate(problem)], policy, "", lambda name: None)) == {"right"}


def test_what_is_declared_to_leave_its_results_alone_is_run_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (update("total", "fp32", ("m", "n")),)
    references = {
        "right": lambda total: {"total": total.clamp(min=0)},
        "once": lambda total: {"total": total + 1},
    }
    kernels: dict[str, Kernel] = {
        "right": lambda total: total.clamp_(min=0),
        "once": lambda total: total.add_(1),
    }
    for name, reference in references.items():
        engine, problem = toy(
            monkeypatch, kernels, arguments, reference=reference, baselines=None, repeat="idempotent"
        )
        engine.open(problem, 0)
        if name == "right":
            assert engine.check(candidate(problem, name), problem).ok
            continue
        with pytest.raises(CheckError, match="run on its own result it changes total, which idempotent"):
            engine.check(candidate(problem, name), problem)


def test_every_output_must_be_written_by_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is not is named."""
    arguments = (X, Y, write("z", "uint8", ("m", "n")))
    kernels: dict[str, Kernel] = {
        "right": lambda x, y, z: (double(x, y), z.fill_(1)),
        "half": lambda x, y, z: double(x, y),
    }

    def baseline(inputs: Any, outputs: Any) -> None:
        double(inputs.tensors["x"], outputs["y"])
        outputs["z"].fill_(1)

    engine, problem = toy(
        monkeypatch,
        kernels,
        arguments,
        reference=lambda x: {"y": 2 * x, "z": torch.ones_like(x)},
        baselines=lambda problem: {"torch.mul": baseline},
    )
    engine.open(problem, 0)
    assert engine.check(candidate(problem), problem).ok
    assert engine.check(candidate(problem, "half"), problem).output == "z"
    assert engine.prepare(candidate(problem)).first_us > 0
    with pytest.raises(LaunchError, match="left z unwritten"):
        engine.prepare(candidate(problem, "half"))


@pytest.mark.parametrize("context", CONTEXTS)
def test_each_launch_follows_what_its_context_says(monkeypatch: pytest.MonkeyPatch, context: str) -> None:
    """Behind: the input of the very set that the launch reads was just written; its bits stay. What overlaps
    needs a GPU; here a kernel that does not stands for it."""
    monkeypatch.setattr("cutegen.measure.operand_sets.rewriter_on", lambda device: add_nothing)
    versions: dict[int, list[int]] = {}

    def watch(x: torch.Tensor, y: torch.Tensor) -> None:
        versions.setdefault(x.data_ptr(), []).append(x._version)
        double(x, y)

    engine, problem = toy(monkeypatch, {"watch": watch})
    engine.open(problem, 0)
    prepared = engine.prepare(candidate(problem, "watch"), context)
    assert engine.prepare(candidate(problem, "watch"), context) is prepared
    assert len(prepared.graph.calls) == prepared.launches * (1 if context == "back_to_back" else 2)
    versions.clear()
    engine.measure(prepared, 2)
    assert len(versions) > 1
    for seen in versions.values():
        written = [later - earlier for earlier, later in pairwise(seen)]
        assert set(written) == {1 if context in ("behind", "overlapping") else 0}
    assert engine.check(candidate(problem, "watch"), problem).ok
    if context != "back_to_back":
        alone = engine.prepare_predecessor(context)
        assert engine.prepare_predecessor(context) is alone and engine.measure(alone, 2) > 0
        assert len(alone.graph.calls) == alone.launches


def test_what_cannot_run_before_a_launch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's words are kept."""
    engine, problem = toy(monkeypatch, {"right": double})
    engine.open(problem, 0)

    def broken(*arguments: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr("cutegen.measure.predecessor.Predecessor.own_calls", broken)
    with pytest.raises(LaunchError, match="the kernel before each launch failed: CUDA error: out of memory"):
        engine.prepare_predecessor("behind")


@pytest.mark.parametrize("context", ["behind", "alone"])
def test_rounds_in_a_context_run_on_the_real_engine(monkeypatch: pytest.MonkeyPatch, context: str) -> None:
    """What runs before takes 2 us on this lane, the kernel 5 and the baseline 9: each shows its own time."""
    lane = VirtualLane()

    def taking(took_us: float, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            lane.took_us += took_us
            call(*arguments)

        return timed

    baseline = taking(9, lambda inputs, outputs: double(inputs.tensors["x"], outputs["y"]))
    found = {"torch.mul": baseline}
    kernels = {"right": taking(5, double)}
    engine, problem = toy(monkeypatch, kernels, lane=lane, baselines=lambda problem: found)
    real = Predecessor.__init__
    timed = lambda tensor: taking(2, add_nothing(tensor))  # noqa: E731
    monkeypatch.setattr(Predecessor, "__init__", lambda self, written, l2, *_: real(self, written, l2, timed))
    engine.open(problem, 0)
    policy = Policy(clock="burst", rounds=2, min_rounds=2, round_us=100, context=context)
    result = time_in_rounds(engine, [candidate(problem)], policy, "x", lambda name: None)
    timing = result.timings["right"]
    assert (timing.median_us, timing.predecessor_us, result.reference.median_us) == (5, 2, 9)


def test_the_upstream_input_is_the_first_unless_a_family_says_otherwise() -> None:
    """Activations, not weights: A of a GEMM, x of a norm."""
    for line, name in (("gemm 8x64x64 bf16 kk", "a"), ("rmsnorm 8x64 bf16 residual", "x")):
        problem = registry.parse_problem(line)
        assert registry.find_family(problem.family).upstream_input(problem) == name


@pytest.mark.parametrize("sets", [1, 2, 5])
def test_results_that_a_call_allocates_rotate(sets: int) -> None:
    """When the last of ``sets`` results is made the earlier ones are still held, and no more than these."""
    alive: list[weakref.ref[torch.Tensor]] = []
    held = []

    def call(inputs: Inputs, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = torch.zeros(8)
        held.append(sum(earlier() is not None for earlier in alive))
        alive.append(weakref.ref(result))
        return {"out": result}

    rotated = rotating(call, sets)
    for _ in range(3 * sets):
        rotated(Inputs({}), {})
    assert held == [min(i, sets - 1) for i in range(3 * sets)]
