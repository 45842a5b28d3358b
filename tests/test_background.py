"""Laws of compiling in the background: nobody waits, the kernel takes over when ready, errors are said."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundles import publish
from fake_kernels import H200, FakeBuilder, FakeGpu

from cutegen.arch import find_arch
from cutegen.build import Toolchain, artifact_key
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.errors import BuildError, ConfigError, CutegenError, LaunchError, StoreError
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.registry import find_space
from cutegen.runtime import background
from cutegen.runtime.answer_lookup import Answer
from cutegen.runtime.background import PendingKernel
from cutegen.runtime.call_plan import serve_call
from cutegen.runtime.dispatch import Choice, Dispatcher, Served
from cutegen.runtime.kernel_cache import FirstLaunch, Kernel, Kernels
from cutegen.search.defaults import default_config
from cutegen.space import Launch

ARCH = find_arch("sm_90a")
SPACE = find_space("gemm", ARCH)
PROBLEM = Problem(1024, 1024, 1024)
FUSED = replace(PROBLEM, epilogue=Epilogue(activation="relu"))
CONFIG = SPACE.default(PROBLEM)
ENOUGH_S = 120.0


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    fake = FakeGpu(tmp_path)
    yield fake
    fake.gate.set()


def waiting(gpu: FakeGpu) -> Dispatcher:
    """A dispatcher whose kernels are compiled when the gate opens."""
    gpu.gate.clear()
    return gpu.dispatcher(build="background")


def opened(gpu: FakeGpu, kernels: Kernels) -> None:
    """Let what is being compiled come to its end."""
    gpu.gate.set()
    assert kernels.wait(ENOUGH_S)


# --- kernels ---


def test_a_missing_kernel_is_awaited_once(gpu: FakeGpu) -> None:
    """Asking returns at once, again and again the same; when it is ready, the kernel, compiled once."""
    gpu.gate.clear()
    kernels = gpu.kernels(build="background")
    first = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(first, PendingKernel) and not first.finished and not kernels.wait(0.05)
    other = CONFIG.replace(swizzle_size=4, raster_along_m=False)  # the same kernel
    assert kernels.ask(Problem(1024, 1024, 1032), other, ARCH) is first
    opened(gpu, kernels)
    found = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(found, Kernel) and kernels.ask(PROBLEM, other, ARCH) is found
    assert first.finished and first.error is None
    assert len(gpu.compiled) == len(gpu.loaded) == len(gpu.builders) == 1


def test_what_is_stored_is_loaded_at_once(gpu: FakeGpu) -> None:
    """Loading takes milliseconds, so nobody computes something else for it."""
    publish(gpu.store, render(PROBLEM, CONFIG, ARCH))
    kernels = Kernels(gpu.store, load=lambda library, symbol: print)
    assert isinstance(kernels.ask(PROBLEM, CONFIG, ARCH), Kernel)
    assert not gpu.builders


def test_other_policies_answer_as_ever(gpu: FakeGpu) -> None:
    """``allow`` compiles while the caller waits, ``never`` refuses; ``get`` waits under the default too."""
    assert isinstance(gpu.kernels(build="allow").ask(PROBLEM, CONFIG, ARCH), Kernel)
    with pytest.raises(LaunchError, match="build='never'"):
        gpu.kernels(build="never").ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(gpu.kernels(build="background").get(PROBLEM, CONFIG, ARCH), Kernel)
    assert not gpu.builders
    assert Kernels(gpu.store).build == "background"
    with pytest.raises(ConfigError, match="pingpong_has_one_warpgroup_per_tile"):
        broken = CONFIG.replace(pingpong=True, mma_warpgroups=2)
        gpu.kernels(build="background").ask(PROBLEM, broken, ARCH)


def test_a_policy_changes_what_is_missing_only(gpu: FakeGpu) -> None:
    """Kernels that are loaded or under way stay so under another policy."""
    kernels = gpu.kernels(build="background")
    kernels.ask(PROBLEM, CONFIG, ARCH)
    never = kernels.with_build("never")
    assert kernels.wait(ENOUGH_S) and never.wait(ENOUGH_S)
    assert isinstance(never.ask(PROBLEM, CONFIG, ARCH), Kernel)
    assert (kernels.build, never.build) == ("background", "never")
    with pytest.raises(LaunchError, match="build='never'"):
        never.ask(FUSED, CONFIG, ARCH)
    with pytest.raises(ValueError, match="build='soon' is no policy; valid: allow, never, background"):
        kernels.with_build("soon")


def test_nothing_starts_in_a_capture(gpu: FakeGpu) -> None:
    """A kernel that is missing, or awaited, is refused while a graph is captured."""
    dispatcher = waiting(gpu)
    with pytest.raises(LaunchError, match="make the same call once before the capture"):
        dispatcher.serve(PROBLEM, capturing=True)
    assert not gpu.builders
    assert dispatcher.serve(PROBLEM).awaited is not None
    with pytest.raises(LaunchError, match="make the same call once before the capture"):
        dispatcher.serve(PROBLEM, capturing=True)
    opened(gpu, dispatcher.kernels)
    with pytest.raises(LaunchError, match="make the same call once before the capture"):
        dispatcher.serve(PROBLEM, capturing=True)  # compiled, and never launched
    choice = dispatcher.serve(PROBLEM).choice
    assert choice is not None and choice.first is not None
    choice.first.happened()
    assert dispatcher.serve(PROBLEM, capturing=True).choice is not None


def test_whoever_waited_finds_the_compilation_finished(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call plans look at it and at nothing else: the next call launches the kernel."""
    ending, finish = threading.Event(), PendingKernel.finish

    def late(self: PendingKernel, error: CutegenError | None = None) -> None:
        ending.set()
        time.sleep(0.2)  # the waiting thread runs
        finish(self, error)

    monkeypatch.setattr(PendingKernel, "finish", late)
    kernels = gpu.kernels(build="background")
    found = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(found, PendingKernel)
    assert ending.wait(ENOUGH_S) and kernels.wait(ENOUGH_S) and found.finished


def test_threads_start_one_compilation(gpu: FakeGpu) -> None:
    """Whoever comes first; and all see the kernel when it is there."""
    gpu.gate.clear()
    kernels = gpu.kernels(build="background")
    together = threading.Barrier(8)
    found: list[Kernel | PendingKernel] = []

    def ask() -> None:
        together.wait()
        found.append(kernels.ask(PROBLEM, CONFIG, ARCH))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(item) for item in found}) == 1 and isinstance(found[0], PendingKernel)
    opened(gpu, kernels)
    assert len(gpu.compiled) == len(gpu.loaded) == 1


# --- failures ---


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_failure_is_said_once(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be compiled is not tried again, and PyTorch computes the problem for good."""
    gpu.failure = lambda source: BuildError("boom", outcome="abort")
    dispatcher = waiting(gpu)
    served = dispatcher.serve(PROBLEM)
    assert served.awaited is not None
    opened(gpu, dispatcher.kernels)
    for problem in (PROBLEM, Problem(1024, 1024, 1032)):
        again = dispatcher.serve(problem, config=served.answer.config)
        assert again.choice is again.awaited is None
    assert isinstance(served.awaited.error, BuildError) and served.awaited.error.outcome == "abort"
    assert len(said(caplog)) == 1 and "boom" in said(caplog)[0] and str(PROBLEM) in said(caplog)[0]
    assert dispatcher.serve(PROBLEM, capturing=True).choice is None  # PyTorch, as before the capture


def test_a_failure_in_the_middle_of_a_call_is_seen_by_the_next(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is awaited as if it failed later: else a plan would keep what was to serve meanwhile."""
    gpu.failure = lambda source: BuildError("boom")
    dispatcher, instead = waiting(gpu), Dispatcher._instead

    def late(self: Dispatcher, *arguments: Any) -> Served:
        opened(gpu, self.kernels)
        return instead(self, *arguments)

    monkeypatch.setattr(Dispatcher, "_instead", late)
    awaited = dispatcher.serve(PROBLEM).awaited
    assert awaited is not None and awaited.finished and awaited.error is not None
    assert dispatcher.serve(PROBLEM).awaited is None


def test_a_recorded_failure_is_said_once(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """The next process finds it in the store: nothing is compiled, and PyTorch computes."""
    config = default_config(SPACE, PROBLEM)
    publish(gpu.store, render(PROBLEM, config, ARCH), outcome="abort", message="the compiler died")
    dispatcher = gpu.dispatcher(build="background")
    for _ in range(3):
        served = dispatcher.serve(PROBLEM)
        assert served.choice is served.awaited is None
    assert not gpu.builders
    assert len(said(caplog)) == 1 and "the compiler died" in said(caplog)[0]


def test_a_full_cache_folder_is_said_once(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """However many kernels it keeps from being stored; each is given up, and PyTorch computes."""
    full = StoreError("cannot write to /cache: No space left on device; free the space")
    gpu.failure = lambda source: full
    dispatcher = gpu.dispatcher(build="background")
    problems = [PROBLEM, replace(PROBLEM, out_dtype="fp32"), FUSED]
    for problem in problems:
        dispatcher.serve(problem)
        assert dispatcher.kernels.wait(ENOUGH_S)
    for problem in problems:
        served = dispatcher.serve(problem)
        assert served.choice is served.awaited is None
    assert len(said(caplog)) == 1 and "No space left on device" in said(caplog)[0]


def test_a_kernel_that_cannot_be_stored_or_submitted_costs_no_other(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error is that of its own kernel."""
    gpu.gate.clear()
    kernels = gpu.kernels(build="background")
    fp32 = replace(PROBLEM, out_dtype="fp32")
    errors = {FUSED.signature: StoreError("cannot write to /cache: Input/output error")}
    gpu.failure = lambda source: errors.get(source.signature)
    submit = FakeBuilder.submit

    def refusing(self: FakeBuilder, sources: list[Source]) -> None:
        if any(source.signature == fp32.signature for source in sources):
            raise StoreError("cannot read /cache")
        submit(self, sources)

    monkeypatch.setattr(FakeBuilder, "submit", refusing)
    for problem in (FUSED, fp32, PROBLEM):
        kernels.ask(problem, CONFIG, ARCH)
    opened(gpu, kernels)
    assert isinstance(kernels.ask(PROBLEM, CONFIG, ARCH), Kernel)
    for problem, reason in ((FUSED, "Input/output"), (fp32, "cannot read")):
        found = kernels.ask(problem, CONFIG, ARCH)
        assert isinstance(found, PendingKernel) and reason in str(found.error)


def test_a_library_that_does_not_load_counts_as_failed(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """It was compiled, and nothing can be launched: said once."""

    def load(library: Path, symbol: str) -> Any:
        raise LaunchError("cannot load kernel.so")

    kernels = gpu.kernels(build="background", load=load)
    found = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(found, PendingKernel) and found.wait(ENOUGH_S)
    assert isinstance(found.error, LaunchError) and kernels.ask(PROBLEM, CONFIG, ARCH) is found
    assert len(said(caplog)) == 1 and "cannot load" in said(caplog)[0]


def test_without_anybody_to_stand_in_the_call_is_refused(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it would work soon; after a failure, the failure."""
    monkeypatch.setattr(GEMM, "stand_in", lambda problem: None)
    dispatcher = waiting(gpu)
    gpu.failure = lambda source: BuildError("boom")
    with pytest.raises(LaunchError, match="is being compiled, and nothing else computes it; call again in a"):
        dispatcher.serve(FUSED)
    opened(gpu, dispatcher.kernels)
    with pytest.raises(BuildError, match="boom"):
        dispatcher.serve(FUSED)


def test_an_unexpected_error_leaves_nobody_waiting(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends; what it was to compile counts as failed, and the next request has a new thread."""
    raised: queue.Queue[Any] = queue.Queue()  # the thread says it last
    monkeypatch.setattr(threading, "excepthook", raised.put)
    kernels = gpu.kernels(build="background")
    gpu.failure = lambda source: 1 / 0  # type: ignore[assignment, return-value]
    found = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(found, PendingKernel) and found.wait(ENOUGH_S)
    assert isinstance(found.error, LaunchError)
    gpu.failure = lambda source: None
    kernels.ask(FUSED, CONFIG, ARCH)
    assert kernels.wait(ENOUGH_S)
    assert isinstance(kernels.ask(FUSED, CONFIG, ARCH), Kernel)
    assert raised.get(timeout=ENOUGH_S).exc_type is ZeroDivisionError and raised.empty()


def test_a_loader_that_fails_unexpectedly_leaves_nobody_waiting(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled and then not loaded, for a reason that nobody thought of, has failed too."""
    raised: queue.Queue[Any] = queue.Queue()  # the thread says it last
    monkeypatch.setattr(threading, "excepthook", raised.put)
    kernels = gpu.kernels(build="background", load=lambda library, symbol: 1 / 0)
    found = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(found, PendingKernel) and found.wait(ENOUGH_S)
    assert isinstance(found.error, LaunchError) and kernels.wait(ENOUGH_S)
    assert raised.get(timeout=ENOUGH_S).exc_type is ZeroDivisionError and raised.empty()


# --- what serves meanwhile ---


def test_the_library_call_serves_plain_products(gpu: FakeGpu) -> None:
    """Even where another kernel is loaded: torch.mm is no slower than a kernel for another shape."""
    dispatcher = gpu.dispatcher(build="background")
    dispatcher.kernel(Problem(8, 1024, 1024))
    gpu.gate.clear()
    served = dispatcher.serve(PROBLEM)
    assert served.choice is None and served.awaited is not None
    assert served.answer.config == default_config(SPACE, PROBLEM)


def test_the_nearest_loaded_kernel_serves_fused_products(gpu: FakeGpu) -> None:
    """Of those of the same signature that are valid, the one that is predicted to be the fastest."""
    dispatcher = gpu.dispatcher(build="background")
    base = SPACE.default(FUSED).replace(use_pdl=True, use_tma_store=True, cluster_shape_mn=(1, 1))
    square = base.replace(tile_shape_mn=(128, 128), mma_warpgroups=2, swap_ab=False)
    swapped = base.replace(tile_shape_mn=(64, 8), mma_warpgroups=1, swap_ab=True)
    missing = swapped.replace(tile_shape_mn=(64, 16))
    loaded = [dispatcher.kernel(FUSED, config=square), dispatcher.kernel(replace(FUSED, m=8), config=swapped)]
    gpu.gate.clear()
    # The swapped kernel is not valid for 2000 rows; for 8 rows the other one does sixteen times the work.
    for rows, config, expected in ((2000, square.replace(use_pdl=False), 0), (8, missing, 1)):
        served, near = dispatcher.serve(replace(FUSED, m=rows), config=config), loaded[expected]
        assert served.awaited is not None and served.choice is not None and near is not None
        assert served.choice.function is near.function
    other = replace(FUSED, ab_dtype="fp16", out_dtype="fp16")  # of another signature
    assert dispatcher.serve(other).choice is None


# --- plans ---


class Plan:
    """A plan that counts how often it is planned. Launches fail while ``fails``."""

    def __init__(self, *served: Served) -> None:
        self.served = list(served)
        self.calls: list[str] = []
        self.capturing = False
        self.fails = False
        self.launch = serve_call(self._serve, self._bind, self._keep, lambda: self.capturing)

    def _serve(self, capturing: bool) -> Served:
        assert capturing == self.capturing
        return self.served.pop(0)

    def _bind(self, served: Served) -> Any:
        name = "kernel" if served.awaited is None else "stand-in"

        def launch(*arguments: Any) -> None:
            if self.fails:
                raise RuntimeError("out of memory")
            self.calls.append(name)

        return launch

    def _keep(self, launch: Any) -> None:
        self.launch = launch


ANSWER = Answer(PROBLEM, "default", CONFIG)


def test_a_plan_replaces_its_launcher(caplog: pytest.LogCaptureFixture) -> None:
    """The first call after the kernel is ready launches it; from then on nothing asks any more."""
    awaited = PendingKernel()
    plan = Plan(Served(ANSWER, None, awaited), Served(ANSWER), Served(ANSWER))
    before = plan.launch
    plan.launch()
    assert plan.launch is before
    awaited.finish()
    plan.launch()
    after = plan.launch
    assert after is not before
    plan.launch()
    assert plan.launch is after and plan.calls == ["stand-in", "kernel", "kernel"]
    before()  # a thread that was about to call: it plans once more, and nothing breaks
    assert not plan.served


def test_a_capture_keeps_what_serves(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is swapped in during a capture, even if it is ready, and that is said once."""
    awaited = PendingKernel()
    plan = Plan(Served(ANSWER, None, awaited), Served(ANSWER))
    awaited.finish()
    plan.capturing = True
    for _ in range(3):
        plan.launch()
    assert plan.calls == ["stand-in"] * 3
    assert [str(PROBLEM) in message and "wait_for_kernels" in message for message in said(caplog)] == [True]
    plan.capturing = False
    plan.launch()
    assert plan.calls[-1] == "kernel"


@pytest.mark.parametrize("awaited", [None, PendingKernel()])
def test_a_first_launch_that_fails_is_none(awaited: PendingKernel | None) -> None:
    """A capture is refused until the kernel was launched; what takes note of that leaves the plan."""
    first = FirstLaunch(("key", 0), set())
    choice = Choice(ANSWER, lambda: None, Launch((), 0), first)
    plan = Plan(Served(ANSWER, choice, awaited))
    plan.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        plan.launch()
    plan.fails, plan.capturing = False, True
    with pytest.raises(LaunchError, match="has not run yet, and a CUDA graph is being captured"):
        plan.launch()
    assert not plan.calls and not first.done
    plan.capturing = False
    noting = plan.launch
    plan.launch()
    assert first.done and (plan.launch is noting) == (awaited is not None)
    plan.capturing = True
    plan.launch()
    noting()  # a plan made meanwhile for the same kernel
    assert len(plan.calls) == 3


# --- the thread ---


def test_the_thread_ends_when_it_has_nothing_to_do(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its builder with it; the next missing kernel has a new one."""
    monkeypatch.setattr(background, "IDLE_S", 0.01)
    kernels = gpu.kernels(build="background")
    for count, problem in enumerate((PROBLEM, FUSED), 1):
        kernels.ask(problem, CONFIG, ARCH)
        assert kernels.wait(ENOUGH_S)
        until = time.monotonic() + ENOUGH_S
        while not gpu.builders[-1].closed and time.monotonic() < until:
            time.sleep(0.01)
        assert len(gpu.builders) == count and gpu.builders[-1].closed


def test_closing_ends_what_is_under_way(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of a program nobody reads of kernels that were not finished."""
    gpu.gate.clear()
    kernels = gpu.kernels(build="background")
    found = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(found, PendingKernel)
    kernels._background.close()
    assert found.finished and found.error is not None and gpu.builders[0].closed
    assert not said(caplog)


BACKGROUND = """
import sys
from pathlib import Path
from cutegen.arch import find_arch
from cutegen.build.store import Store
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.runtime.kernel_cache import Kernels
problem, arch = Problem(1024, 1024, 1024), find_arch("sm_90a")
kernels = Kernels(Store(Path(sys.argv[1])), load=lambda library, symbol: print)
config = find_space("gemm", arch).default(problem)
kernels.ask(problem, config, arch)
if sys.argv[2] == "wait":
    assert kernels.wait(200)
print(type(kernels.ask(problem, config, arch)).__name__)
"""


@pytest.mark.dsl
@pytest.mark.parametrize(("mode", "kind"), [("wait", "Kernel"), ("leave", "PendingKernel")])
def test_with_the_real_compiler(tmp_path: Path, mode: str, kind: str) -> None:
    """A kernel comes out of it; a program that ends meanwhile ends cleanly, and at once."""
    command = [sys.executable, "-c", BACKGROUND, str(tmp_path / "cache"), mode]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path), "PATH": "/usr/bin"}
    key = artifact_key(render(PROBLEM, CONFIG, ARCH), Toolchain.current())
    with ExitStack() as held:
        if mode == "leave":  # as if another process compiled it: it is not ready before the program ends
            held.enter_context(Store(tmp_path / "cache").lock("sm_90a", key))
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, kind, "")
    assert not list(tmp_path.glob("cutegen-scratch-*"))
    assert bool(Store(tmp_path / "cache").keys("sm_90a")) == (mode == "wait")


@pytest.mark.dsl
def test_a_cache_that_is_only_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The real builder refuses to write there; calls go on."""
    store = Store(tmp_path, shared=True)
    dispatcher = Dispatcher(
        kernels=Kernels(store), device=lambda index: H200, device_type="cpu", fallback="none"
    )
    assert dispatcher.serve(PROBLEM).choice is None and dispatcher.kernels.wait(ENOUGH_S)
    assert dispatcher.serve(PROBLEM).choice is dispatcher.serve(PROBLEM).awaited is None
    assert len(said(caplog)) == 1 and "is shared, so it is only read" in said(caplog)[0]


def test_sources_reach_the_builder_as_they_were_rendered(gpu: FakeGpu) -> None:
    """What is compiled in the background has the key that lookups ask for."""
    kernels = gpu.kernels(build="background")
    kernels.ask(PROBLEM, CONFIG, ARCH)
    assert kernels.wait(ENOUGH_S)
    source: Source = gpu.compiled[0]
    assert source == render(PROBLEM, CONFIG, ARCH)
