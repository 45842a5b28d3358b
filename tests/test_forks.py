"""A child of fork has one thread: it waits for no lock of another, and for nothing that never ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deployments import LINES, Workshop, load, operands, write_table
from fake_kernels import FakeGpu

from cutegen.arch import find_arch
from cutegen.deploy import pin_table
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.records.trials import Trial, TrialStore
from cutegen.runtime import recorder
from cutegen.runtime.background import PendingKernel
from cutegen.runtime.kernel_cache import Kernel, Kernels
from cutegen.runtime.recorder import Recorder
from cutegen.system.forks import RenewedLock
from cutegen.torch_ops import fallbacks, gates
from cutegen.torch_ops import gemm as operators

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

ARCH = find_arch("sm_90a")
PROBLEM = Problem.parse("gemm 64x128x256 bf16 kk")
CONFIG = find_space("gemm", ARCH).default(PROBLEM)
LIMIT_S = 60.0


def child_succeeds(work: Callable[[], bool]) -> bool:
    """Return whether a child of fork ends ``work`` in time, and well."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def free(lock: RenewedLock) -> bool:
    with lock:
        return True


@contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    """Hold a lock for the length of the block, in a thread that no child of fork has."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_lock_of_another_thread_is_free_in_a_child() -> None:
    lock = RenewedLock()
    with held_by_another_thread(lock):
        assert child_succeeds(lambda: free(lock))


def test_a_lock_of_the_thread_that_forks_stays_its_own() -> None:
    lock = RenewedLock()
    with lock:
        assert child_succeeds(lambda: free(lock))
    assert child_succeeds(lambda: free(lock))


@pytest.mark.parametrize("copied", [False, True])
def test_a_child_waits_for_no_kernel_of_its_parent_and_compiles_its_own(tmp_path: Path, copied: bool) -> None:
    gpu = FakeGpu(tmp_path)
    gpu.gate.clear()
    kernels: Kernels = gpu.kernels(build="background")
    pending = kernels.ask(PROBLEM, CONFIG, ARCH)
    assert isinstance(pending, PendingKernel) and not pending.finished
    if copied:
        kernels = kernels.with_build("background")

    def work() -> bool:
        if not kernels.wait(LIMIT_S / 4) or not pending.finished:
            return False
        gpu.gate.set()
        again = kernels.ask(PROBLEM, CONFIG, ARCH)
        if isinstance(again, PendingKernel) and not again.wait(LIMIT_S / 4):
            return False
        return isinstance(kernels.ask(PROBLEM, CONFIG, ARCH), Kernel)

    assert child_succeeds(work)
    assert not pending.finished  # here, where the gate is closed
    gpu.gate.set()
    assert kernels.wait(LIMIT_S)
    assert isinstance(kernels.ask(PROBLEM, CONFIG, ARCH), Kernel)


def test_a_child_is_answered_while_another_thread_compiles(tmp_path: Path) -> None:
    """Under build="allow" a thread has the lock for as long as it compiles."""
    gpu, begun, done = FakeGpu(tmp_path), threading.Event(), threading.Event()
    parent = os.getpid()

    def compile_slowly(source, store):  # type: ignore[no-untyped-def]
        if os.getpid() == parent:
            begun.set()
            done.wait()
        return gpu.compile(source, store)

    kernels = gpu.kernels(build="allow", compile=compile_slowly)
    thread = threading.Thread(target=lambda: kernels.get(PROBLEM, CONFIG, ARCH))
    thread.start()
    begun.wait()
    try:
        assert child_succeeds(lambda: isinstance(kernels.get(PROBLEM, CONFIG, ARCH), Kernel))
    finally:
        done.set()
        thread.join()


def does(work: Callable[..., object], *arguments: Any) -> Callable[[], bool]:
    """Return what does the work and says that it came to its end."""
    return lambda: work(*arguments) is not NotImplemented


def new_recorder() -> Recorder:
    return Recorder(lambda: False, lambda problem: pytest.fail("nothing is asked"))


RECORDER = new_recorder()


@pytest.mark.parametrize(
    ("lock", "work"),
    [
        (operators._lock, does(operators.drop_plans)),
        (gates._forward._lock, does(gates._forward.forget)),
        (fallbacks._lock, does(fallbacks.count, "a reason")),
        (recorder._lock, does(recorder.stop, RECORDER)),
        (RECORDER._lock, lambda: not RECORDER.counts),
    ],
    ids=["plans of gemm", "plans of a family", "fallbacks", "recorders", "counts"],
)
def test_a_child_waits_for_no_thread_of_its_parent(lock: Any, work: Callable[[], bool]) -> None:
    with held_by_another_thread(lock):
        assert child_succeeds(work)


def test_a_child_launches_pinned_kernels_while_a_thread_of_its_parent_loads_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_LOG", str(tmp_path / "calls.txt"))
    line = LINES[0]
    pin_table(
        write_table(tmp_path / "t.json", [line]), tmp_path / "deploy", kernels=Workshop(tmp_path).kernels()
    )
    deployment, torch = load(tmp_path / "deploy")
    a, b, options = operands(Problem.parse(line), torch)
    with held_by_another_thread(deployment._lock):
        assert child_succeeds(lambda: deployment.gemm(a, b, **options) is options["out"])


def test_a_child_writes_trials_over_a_connection_of_its_own(tmp_path: Path) -> None:
    with TrialStore(tmp_path / "trials.sqlite") as store:
        connection = store._db
        store.add(Trial(PROBLEM, "build_failed", CONFIG, id="parent", error="no"))

        def work() -> bool:
            store.add(Trial(PROBLEM, "build_failed", CONFIG, id="child", error="no"))
            found = [trial.id for trial in store.find()]
            store.close()
            return found == ["parent", "child"] and store._db is not connection

        with held_by_another_thread(store._lock):
            assert child_succeeds(work)
        store.add(Trial(PROBLEM, "build_failed", CONFIG, id="later", error="no"))
        assert [trial.id for trial in store.find()] == ["parent", "child", "later"]
