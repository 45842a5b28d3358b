"""Other processes on a real GPU: seen while they compute, ignored while they do not, never ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hopper import GPU, NEEDS_HOPPER

from cutegen.errors import DeviceError
from cutegen.families.gemm.problem import Problem
from cutegen.families.gemm.tail_shapes import tail_problems
from cutegen.measure import Bench, Candidate
from cutegen.measure.contention import Guard
from cutegen.measure.policy import Policy
from cutegen.measure.watch import NvmlWatch
from cutegen.records.table import Table
from cutegen.space import Launch
from cutegen.tuning import AutoTuner, Effort

HERE = Path(__file__).parent
pytestmark = [*NEEDS_HOPPER, pytest.mark.alone]

SQUARE = Problem(1024, 1024, 1024)
#: A process that is nobody's child: it holds a context, and multiplies without a pause if told to.
OTHER = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
import torch
a = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.mm(a, a)
torch.cuda.synchronize()
print(os.getpid(), flush=True)
end = time.time() + 120
while time.time() < end:
    if sys.argv[1] == "busy":
        for _ in range(50):
            torch.mm(a, a)
        torch.cuda.synchronize()
    else:
        time.sleep(0.1)
"""


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    """Start a process that is ``busy`` or ``idle`` and return its id; it is gone when the test ends."""
    started: list[int] = []

    def begin(what: str) -> int:
        command = [sys.executable, "-c", OTHER, what]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            started.append(int(parent.stdout.readline()))
        time.sleep(3)  # NVML samples at least once a second
        return started[-1]

    yield begin
    for pid in started:
        end(pid)


def end(pid: int) -> None:
    """End a process that one of these tests started, and wait until it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
        while True:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return  # whoever adopted it does not reap
            time.sleep(0.05)
    except (ProcessLookupError, FileNotFoundError):
        return


@pytest.fixture
def watch() -> Iterator[NvmlWatch]:
    assert GPU is not None
    with NvmlWatch(GPU.uuid) as opened:
        if opened.percent() is None and not opened.look(0.0).complete:
            pytest.skip("NVML tells neither processes nor utilisation here")
        yield opened


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """A measuring child whose kernel is torch's, so that nothing compiles."""
    with Bench(engine="gpu_engine:make", search_path=[HERE], timeout_s=20) as opened:
        opened.open(SQUARE)
        yield opened


def measure(bench: Bench, seconds: float = 0.0) -> None:
    """Let the child work, for so long at least."""
    plain = Launch((), 0)
    right = Candidate("right", Path("none.so"), "right", plain, SQUARE, tail_problems(SQUARE)[0], plain)
    start = time.monotonic()
    while True:
        bench.time([right], replace(Policy.final(), settle_s=0.5))
        if time.monotonic() - start >= seconds:
            return


def guard(watch: NvmlWatch, mode: str, said: list[str] | None = None) -> Guard:
    return Guard(watch, mode, say=(said if said is not None else []).append)


def test_our_own_measuring_is_not_foreign(watch: NvmlWatch, bench: Bench) -> None:
    """Right after the child has worked for seconds, and around its rounds, nobody is blamed."""
    measure(bench, 3.0)
    said: list[str] = []
    for mode in ("refuse", "warn", "wait"):
        one = guard(watch, mode, said)
        assert one.begin(thorough=True) == ""
        measure(bench)
        assert one.end(thorough=True) == ""
    assert not said
    look = watch.look(time.time() - 2)
    if look.complete:
        assert bench.pid in {p.pid for p in look.processes if p.own}


def test_a_busy_process_is_seen(watch: NvmlWatch, bench: Bench, start: Callable[[str], int]) -> None:
    """It is refused, or told, before the rounds; after them, if it came in between."""
    before = guard(watch, "refuse")
    assert before.begin(thorough=True) == ""
    pid = start("busy")
    assert before.end(thorough=True)
    with pytest.raises(DeviceError, match=r"the GPU is in use by .*--busy warn") as refused:
        guard(watch, "refuse").begin(thorough=True)
    said: list[str] = []
    who = guard(watch, "warn", said).begin(thorough=True)
    assert who and len(said) == 1 and who in said[0]
    if watch.look(0.0).complete:
        assert f"pid {pid} (python" in who and " GB" in who and f"pid {pid} " in str(refused.value)
    print(who)  # noqa: T201 - read by whoever runs this by hand


def test_an_idle_process_is_no_obstacle(watch: NvmlWatch, bench: Bench, start: Callable[[str], int]) -> None:
    """A context and memory alone, as of a notebook, neither stop nor slow anything."""
    start("idle")
    said: list[str] = []
    one = guard(watch, "refuse", said)
    assert one.begin(thorough=True) == ""
    measure(bench)
    assert one.end(thorough=True) == "" and not said


def test_waiting_ends_with_the_other(watch: NvmlWatch, bench: Bench, start: Callable[[str], int]) -> None:
    """The run goes on by itself as soon as the other process has ended."""
    pid = start("busy")
    said: list[str] = []
    killer = threading.Timer(4.0, end, [pid])
    killer.start()
    began = time.monotonic()
    assert guard(watch, "wait", said).begin(thorough=True, limit_s=60) == ""
    killer.join()
    assert time.monotonic() - began >= 3 and len(said) == 1 and "waiting up to 60 s" in said[0]


@pytest.mark.dsl
def test_tuning_beside_a_busy_process(
    watch: NvmlWatch, tmp_path: Path, start: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Refused with nothing measured; with ``warn`` measured, marked, and measured again when alone."""
    problem = Problem(512, 512, 512)
    pid = start("busy")
    few = Effort(classes=2, refinements=0)
    with pytest.raises(DeviceError, match="the GPU is in use by"):
        AutoTuner(cache_dir=tmp_path, effort=few, busy="refuse").tune_problem(problem)
    result = AutoTuner(cache_dir=tmp_path, effort=few, busy="warn").tune_problem(problem)
    assert result.contended_by and "the GPU is in use by" in caplog.text
    end(pid)
    time.sleep(3)
    tuner = AutoTuner(cache_dir=tmp_path, effort=few, busy="refuse")
    again = tuner.tune_problem(problem)
    assert not again.contended_by and not again.reused
    assert tuner.setting.table is not None
    assert not Table.load(tuner.setting.table).entries[problem].contended_by
    print(f"{result.time_us:.2f} us beside it, {again.time_us:.2f} us alone")  # noqa: T201
