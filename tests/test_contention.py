"""Other processes on the GPU: who counts, what is done about them, and what NVML says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_watch import NOTEBOOK, OURS, TRAINING, FakeWatch

from cutegen.errors import DeviceError, UsageError
from cutegen.measure import watch as watch_module
from cutegen.measure.contention import Guard, Look, Process, contenders, is_blind
from cutegen.measure.watch import NvmlWatch

QUIET = Process(40, "idle", None, 4.9)
SECRET = Process(50, "hidden", 2**30, None)


@pytest.mark.parametrize(
    ("processes", "complete", "idle_percent", "blind", "found"),
    [
        ((), True, None, False, ""),
        ((OURS,), True, None, False, ""),
        ((OURS, NOTEBOOK, QUIET), True, None, False, ""),
        ((OURS, TRAINING), True, None, False, "pid 30 (train, 50.0 GB, 97 % of the time)"),
        (
            (OURS, replace(QUIET, percent=5.0), TRAINING),
            True,
            None,
            False,
            "pid 30 (train, 50.0 GB, 97 % of the time), pid 40 (idle, 5 % of the time)",
        ),
        # Nobody knows how much it computes: what the GPU does while we are idle decides.
        ((OURS, SECRET), True, None, True, ""),
        ((OURS, SECRET), True, 3.0, True, ""),
        ((OURS, SECRET), True, 60.0, True, "pid 50 (hidden, 1.1 GB) (60 % of the time)"),
        ((OURS, NOTEBOOK), True, 60.0, False, "a process that NVML does not list (60 % of the time)"),
        # In a container.
        ((), False, None, True, ""),
        ((), False, 2.0, True, ""),
        ((), False, 40.0, True, "a process that NVML does not list (40 % of the time)"),
        (
            (Process(4321, memory_bytes=10**9), Process(99)),
            False,
            40.0,
            True,
            "a process outside of this container (40 % of the time); "
            "NVML lists pid 99, pid 4321 (1.0 GB), ours included",
        ),
        ((TRAINING,), False, 1.0, True, ""),
    ],
)
def test_who_competes(
    processes: tuple[Process, ...], complete: bool, idle_percent: float | None, blind: bool, found: str
) -> None:
    """Whoever computes and is not ours; holding memory is no offence, and ids of a host name nobody."""
    look = Look(processes, complete)
    assert is_blind(look) == blind
    assert contenders(look, idle_percent) == found


def guard(watch: FakeWatch, mode: str, said: list[str]) -> Guard:
    return Guard(watch, mode, say=said.append, clock=watch.clock, sleep=watch.sleep)


@pytest.mark.parametrize("mode", ["wait", "warn", "refuse"])
def test_an_idle_gpu_is_used_without_a_word(mode: str) -> None:
    """Nothing is said, waited for or read twice where everyone else only holds memory."""
    watch, said = FakeWatch((OURS, NOTEBOOK)), []
    one = guard(watch, mode, said)
    for _ in range(3):
        assert one.begin(thorough=True) == "" and one.end(thorough=True) == ""
    assert not said and watch.now == 1000.0 and not watch.readings


@pytest.mark.parametrize("mode", ["wait", "warn", "refuse"])
def test_where_nothing_can_be_known_nothing_is_said(mode: str) -> None:
    """Without NVML tuning goes on as if it were alone."""
    watch, said = FakeWatch(complete=False), []
    one = guard(watch, mode, said)
    assert one.begin(thorough=True) == one.end(thorough=True) == "" and not said and watch.now == 1000.0


def test_refusing_names_the_process_and_the_option() -> None:
    """The message says who, why it matters, and how to go on."""
    said: list[str] = []
    with pytest.raises(DeviceError, match=r"in use by pid 30 \(train, 50\.0 GB, 97 % of .*--busy warn") as e:
        guard(FakeWatch((OURS, TRAINING)), "refuse", said).begin(thorough=False)
    assert not said and "waiting" not in str(e.value)


def test_warning_is_said_once_as_long_as_it_lasts() -> None:
    """Each begin returns who it is, so that timings are marked; the words come once per visit."""
    other = replace(TRAINING, percent=50.0)
    watch, said = FakeWatch((TRAINING,), (other,), (OURS,), (TRAINING,)), []
    one = guard(watch, "warn", said)
    found = [one.begin(thorough=False) for _ in range(4)]
    assert [bool(who) for who in found] == [True, True, False, True]
    assert len(said) == 2 and "pid 30 (train" in said[0] and "recorded as contended" in said[0]
    assert watch.now == 1000.0


def test_waiting_ends_when_the_gpu_is_free() -> None:
    """It says whom it waits for, once, and then measures as if nothing had been."""
    watch, said = FakeWatch(*[(OURS, TRAINING)] * 5, (OURS, NOTEBOOK)), []
    assert guard(watch, "wait", said).begin(thorough=False) == ""
    assert len(said) == 1 and "pid 30 (train" in said[0] and "waiting up to 600 s" in said[0]
    assert 5 <= watch.now - 1000.0 <= 15


@pytest.mark.parametrize(("limit_s", "waited"), [(None, 600), (30.0, 30), (-5.0, 0)])
def test_waiting_has_an_end(limit_s: float | None, waited: int) -> None:
    """Ten minutes, or what is left of the budget; then it is refused like at once."""
    watch, said = FakeWatch((TRAINING,)), []
    with pytest.raises(DeviceError, match=f"after {waited} s of waiting.*--busy warn"):
        guard(watch, "wait", said).begin(thorough=True, limit_s=limit_s)
    assert waited <= watch.now - 1000.0 <= waited + 3


def test_an_unknown_mode_is_refused() -> None:
    """The message lists those that there are."""
    with pytest.raises(UsageError, match="busy='ignore' is unknown; valid: wait, warn, refuse"):
        Guard(FakeWatch(), "ignore")


def test_who_has_gone_counts_for_what_was_measured_only() -> None:
    """A process that used the GPU a moment ago and ended does not hinder; during the rounds it did."""
    gone = replace(TRAINING, running=False)
    watch = FakeWatch((OURS, gone))
    one = guard(watch, "refuse", [])
    watch.now = 5000.0
    assert one.begin(thorough=False) == ""
    assert "pid 30" in one.end(thorough=False)
    before, since = watch.looks
    assert 4990 < before < 5000.0 == since


def test_in_a_container_the_gpu_must_fall_idle_by_itself() -> None:
    """Our own use fades from NVML's sample; what does not fade is somebody else's."""
    fading = FakeWatch(complete=False, percents=(100.0, 60.0, 0.0))
    assert guard(fading, "refuse", []).begin(thorough=True) == ""
    assert fading.readings == 3 and fading.now < 1001
    with pytest.raises(DeviceError, match=r"a process that NVML does not list \(88 % of the time\)"):
        guard(FakeWatch(complete=False, percents=(100.0, 88.0)), "refuse", []).begin(thorough=True)


def test_in_a_container_only_thorough_looks_take_time() -> None:
    """Between them, what the last one found still holds."""
    said: list[str] = []
    watch = FakeWatch(complete=False, percents=(50.0,))
    one = guard(watch, "warn", said)
    assert one.begin(thorough=False) == "" and not watch.readings
    who = one.begin(thorough=True)
    took, readings = watch.now, watch.readings
    assert who and one.begin(thorough=False) == who and one.end(thorough=False) == ""
    assert (watch.now, watch.readings, len(said)) == (took, readings, 1)
    assert one.end(thorough=True) == who


# --- NVML ---


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def sample(pid: int, percent: int, at_s: float) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=int(at_s * 1e6))


class FakeNvml(SimpleNamespace):
    """As much of pynvml as is asked about processes."""

    def __init__(self, listed: dict[int, int | None], samples: Any) -> None:
        def processes(handle: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in listed.items()]

        def used(handle: str, since_us: int) -> Any:
            if isinstance(samples, int):
                raise NVMLError(samples)
            return samples

        def refuse(*arguments: Any) -> Any:
            raise NVMLError(3)

        super().__init__(
            NVMLError=NVMLError,
            NVML_SUCCESS=0,
            NVML_ERROR_NOT_FOUND=6,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "580.1",
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetComputeRunningProcesses=processes,
            nvmlDeviceGetMPSComputeRunningProcesses=refuse,
            nvmlDeviceGetProcessUtilization=used,
            nvmlSystemGetProcessName=lambda pid: f"/usr/bin/p\x1b[31m{pid} --flag",
            nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=42),
        )


@pytest.fixture
def open_watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NvmlWatch]:
    def open_it(listed: dict[int, int | None], samples: Any = 6, *, host: bool = True) -> NvmlWatch:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(listed, samples))
        monkeypatch.setattr(watch_module, "_has_host_pids", lambda: host)
        return NvmlWatch("GPU-0")

    return open_it


@pytest.fixture
def child() -> Iterator[int]:
    """A process of ours that lives on until the test ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_nvml_says_who_and_how_much(open_watch: Callable[..., NvmlWatch]) -> None:
    """The largest sample counts; old ones, nonsense and idle ones do not. Names cannot hold escapes."""
    samples = [
        sample(1, 20, 101.0),
        sample(1, 30, 102.0),
        sample(1, 99, 99.0),
        sample(7, 4_000_000, 101.0),
        sample(8, 12, 101.0),
    ]
    look = open_watch({1: 5 * 10**9, 2: None}, samples).look(100.0)
    found = {p.pid: p for p in look.processes}
    assert look.complete and set(found) == {1, 2, 8}
    assert found[1] == Process(1, r"p\x1b[31m1", 5 * 10**9, 30.0)
    assert found[2] == Process(2, r"p\x1b[31m2", None, 0.0)
    assert found[8].percent == 12.0 and not found[8].running and found[8].memory_bytes is None


@pytest.mark.parametrize(("error", "percent"), [(0, 0.0), (6, 0.0), (3, None)])
def test_no_samples_are_no_use_but_no_support_is_unknown(
    open_watch: Callable[..., NvmlWatch], error: int, percent: float | None
) -> None:
    """NVML answers "not found", or success with an error's face, where nobody computed."""
    [process] = open_watch({1: 1}, error).look(0.0).processes
    assert process.percent == percent


def test_children_are_ours_and_so_are_the_dead(open_watch: Callable[..., NvmlWatch], child: int) -> None:
    """This process, what it started, and what it started that has ended; a parent is somebody else."""
    watch = open_watch({os.getpid(): 1, child: 1, os.getppid(): 1})
    assert {p.pid for p in watch.look(0.0).processes if p.own} == {os.getpid(), child}
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert {p.pid for p in watch.look(0.0).processes if p.own} == {os.getpid(), child}


def test_ids_of_the_host_are_not_looked_up_here(open_watch: Callable[..., NvmlWatch]) -> None:
    """In a container an id may be that of anyone here: nothing but memory is told."""
    look = open_watch({os.getpid(): 7}, [sample(os.getpid(), 50, 10.0)], host=False).look(0.0)
    assert look == Look((Process(os.getpid(), memory_bytes=7),), complete=False)


def test_without_nvml_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package, no driver, no list: an empty look, and no utilisation."""
    nothing = Look((), complete=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert NvmlWatch("GPU-0").look(0.0) == nothing and NvmlWatch("GPU-0").percent() is None
    nvml = FakeNvml({}, 3)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert NvmlWatch("GPU-0").percent() == 42.0
    del nvml.nvmlDeviceGetComputeRunningProcesses
    nvml.nvmlDeviceGetUtilizationRates = nvml.nvmlDeviceGetMPSComputeRunningProcesses
    with NvmlWatch("GPU-0") as watch:
        assert watch.look(0.0) == nothing and watch.percent() is None
    assert watch.look(0.0) == nothing and watch.percent() is None
