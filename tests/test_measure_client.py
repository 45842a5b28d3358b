"""The measuring process: every way a candidate can break costs that candidate only, and leaves no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fake_engine
import pytest
from patient_bench import PatientBench

from cutegen.errors import DeviceError, MeasureError
from cutegen.families.gemm.problem import Problem
from cutegen.measure import REFERENCE, Bench, Candidate, CheckResult
from cutegen.measure.policy import Policy
from cutegen.space import Launch

HERE = Path(__file__).parent
PROBLEM = Problem(256, 256, 256)
TAIL = Problem(72, 40, 24)


def candidate(name: str, symbol: str = "ok") -> Candidate:
    return Candidate(name, Path("kernel.so"), symbol, Launch((1, 2), 0), PROBLEM, TAIL, Launch((1, 1), 0))


def new_bench(engine: str = "make", timeout_s: float = 20.0) -> Bench:
    return PatientBench(timeout_s, engine)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with new_bench() as opened:
        opened.open(PROBLEM)
        yield opened


def living(group: int) -> list[int]:
    """The processes of a process group that have not ended (zombies have)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found


def gone(group: int) -> bool:
    """Whether all processes of a group end soon."""
    deadline = time.monotonic() + 120
    while living(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_open_and_runtime_report_what_the_child_found(bench: Bench) -> None:
    """The parent learns device, reference and rotation from the child."""
    assert bench.device == fake_engine.DEVICE
    opened = bench.open(PROBLEM)
    assert (opened.reference, opened.sets, opened.launches) == ("torch.mm", 2, fake_engine.LAUNCHES)


def test_good_candidate_is_checked_on_problem_and_tail(bench: Bench) -> None:
    """ok means ok on both problems."""
    result = bench.check(candidate("a"))
    assert result.ok and result.verdict and result.tail
    assert (result.verdict.problem, result.tail.problem) == (str(PROBLEM), str(TAIL))


@pytest.mark.parametrize(
    ("symbol", "outcome", "words"),
    [
        ("wrong", "wrong_result", "wrong numbers"),
        ("wrong-tail", "wrong_result", str(TAIL)),
        ("racy", "wrong_result", "racy numbers"),
        ("stray", "wrong_result", "behind its workspace"),
        ("refuses", "launch_failed", "mismatched argument"),
    ],
)
def test_harmless_failures_keep_the_child(bench: Bench, symbol: str, outcome: str, words: str) -> None:
    """A failure that leaves the device healthy has a reason and needs no restart."""
    pid = bench.pid
    result = bench.check(candidate("bad", symbol))
    assert (result.outcome, bench.pid, bench.restarts) == (outcome, pid, 0)
    assert words in result.error
    assert CheckResult.from_json(result.to_json()).error == result.error


@pytest.mark.parametrize(("symbol", "words"), [("crashes", "SIGSEGV"), ("breaks", "illegal memory access")])
def test_child_that_dies_is_replaced_and_the_problem_opened_again(
    bench: Bench, symbol: str, words: str
) -> None:
    """A crash or a sticky error is the candidate's; the next one is checked as if nothing happened."""
    pid = bench.pid
    result = bench.check(candidate("bad", symbol))
    assert result.outcome == "launch_failed"
    assert words in result.error
    assert bench.check(candidate("good")).ok
    assert bench.pid != pid and bench.restarts == 1


def test_hang_is_killed_with_all_its_children() -> None:
    """A candidate over its time limit is a timeout; its whole process group dies, measuring goes on."""
    with new_bench(timeout_s=2.0) as bench:
        bench.open(PROBLEM)
        pid = bench.pid
        assert pid is not None
        result = bench.check(candidate("bad", "forks"))
        assert (result.outcome, result.error) == ("timeout", "took longer than 2 s and was killed")
        assert gone(pid)
        assert bench.check(candidate("good")).ok


def test_stray_prints_do_not_reach_the_protocol(bench: Bench) -> None:
    """Python's and C's standard output of the child go elsewhere."""
    assert bench.check(candidate("loud", "prints")).ok
    assert bench.check(candidate("quiet")).ok


def test_mistake_of_ours_is_not_blamed_on_the_candidate(bench: Bench) -> None:
    """An uncaught exception in the child raises here, with its traceback."""
    with pytest.raises(MeasureError, match="ZeroDivisionError: a mistake of ours"):
        bench.check(candidate("innocent", "bug"))
    assert bench.check(candidate("good")).ok


def test_timing_gives_each_candidate_and_the_reference_a_timing(bench: Bench) -> None:
    """Ratios are reference over own, and the reference is there under its own attribute."""
    run = bench.time([candidate("fast", "ok:5"), candidate("slow", "ok:12.5")], Policy.final())
    assert set(run) == {"fast", "slow"} and not run.failures
    assert (run["fast"].median_us, run["fast"].ratio, run["slow"].ratio) == (5.0, 2.0, 0.8)
    assert (run.reference.median_us, run.reference.ratio, run.reference.reference) == (10.0, 1.0, "torch.mm")
    assert run["fast"].energy_mj == pytest.approx(500 * 5e-6 * 1000, rel=0.01)
    assert run["slow"].energy_mj is None, "it cannot win"
    kept = bench.time([candidate("fast", "ok:5"), candidate("slow", "ok:12.5")], Policy.final(), ["slow"])
    assert kept["slow"].energy_mj == pytest.approx(500 * 12.5e-6 * 1000, rel=0.01)


@pytest.mark.parametrize(
    ("symbol", "outcome"),
    [
        ("time-crashes", "launch_failed"),
        ("time-breaks", "launch_failed"),
        ("time-hangs", "timeout"),
        ("crashes", "launch_failed"),
    ],
)
def test_breaking_while_timed_drops_the_culprit_only(symbol: str, outcome: str) -> None:
    """The others get timings, after a restart."""
    with new_bench(timeout_s=2.0) as bench:
        bench.open(PROBLEM)
        run = bench.time([candidate("a"), candidate("bad", symbol), candidate("b")], Policy.screen())
        assert set(run) == {"a", "b"}
        assert {name: result.outcome for name, result in run.failures.items()} == {"bad": outcome}
        assert bench.restarts == 1


def test_refusing_while_timed_needs_no_restart(bench: Bench) -> None:
    """A launch error on a healthy device is a failure within the same run."""
    run = bench.time([candidate("bad", "time-refuses"), candidate("a")], Policy.screen())
    assert set(run) == {"a"} and run.failures["bad"].outcome == "launch_failed" and bench.restarts == 0


def test_reference_alone_can_be_timed(bench: Bench) -> None:
    """No candidate is a valid question."""
    run = bench.time([], Policy.screen())
    assert len(run) == 0 and run.reference.median_us == fake_engine.REFERENCE_US


def test_misuse_is_refused_with_the_reason(bench: Bench) -> None:
    """Names must differ, and candidates must be for the open problem."""
    with pytest.raises(MeasureError, match="same name"):
        bench.time([candidate("a"), candidate("a")], Policy.screen())
    other = Candidate("x", Path("k.so"), "ok", Launch((), 0), Problem(8, 8, 8))
    with pytest.raises(MeasureError, match="but gemm 256x256x256 bf16 kk is open"):
        bench.check(other)
    with pytest.raises(MeasureError, match="cannot be named 'torch'"):
        candidate(REFERENCE)
    with pytest.raises(MeasureError, match="open first"), new_bench() as fresh:
        fresh.check(candidate("a"))


def test_problem_that_does_not_fit_is_an_error_and_not_the_end(bench: Bench) -> None:
    """The child survives an open that fails."""
    with pytest.raises(MeasureError, match="out of memory"):
        bench.open(Problem(8, 8, 2**30))
    bench.open(PROBLEM)
    assert bench.check(candidate("a")).ok


def test_start_does_not_wait_and_close_can_be_repeated() -> None:
    """Starting twice is one child; closing twice is fine, and a closed bench can be opened again."""
    bench = new_bench()
    bench.start()
    pid = bench.pid
    bench.start()
    assert pid is not None and bench.pid == pid
    bench.close()
    bench.close()
    assert bench.pid is None and gone(pid)
    bench.open(PROBLEM)
    assert bench.check(candidate("a")).ok
    bench.close()


def test_no_gpu_is_a_device_error() -> None:
    """What the engine says about the device reaches the caller as it is."""
    with new_bench("make_without_gpu") as bench, pytest.raises(DeviceError, match="this process sees 0"):
        bench.open(PROBLEM)


def test_child_that_cannot_start_shows_its_log() -> None:
    """The last words of a child that dies while starting are in the message."""
    with (
        new_bench("make_broken") as bench,
        pytest.raises(MeasureError, match="division by zero while starting"),
    ):
        bench.open(PROBLEM)


def test_child_killed_from_outside_while_idle_is_replaced(bench: Bench) -> None:
    """Someone else's kill between two requests is noticed and repaired."""
    pid = bench.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert bench.check(candidate("a")).ok
    assert gone(pid)
    assert bench.pid not in (None, pid)


PARENT = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from test_measure_client import PROBLEM, candidate, new_bench
bench = new_bench(timeout_s=300)
bench.open(PROBLEM)
print(bench.pid, flush=True)
bench.check(candidate("bad", "hangs"))
"""


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_death_of_the_parent_ends_a_hung_child(death: signal.Signals) -> None:
    """Neither a killed parent nor a Ctrl-C leaves an orphan, although the child is stuck."""
    script = PARENT.format(root=str(HERE.parent), here=str(HERE))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)  # let it get into the check
        parent.send_signal(death)
        parent.communicate(timeout=60)
    assert gone(pid)


def test_child_environment_is_cleaned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Switches that change timings do not reach the child; relative search paths are made absolute."""
    from cutegen.measure.child_process import _environment

    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("PYTHONPATH", "some/where")
    monkeypatch.chdir(tmp_path)
    environment = _environment()
    assert "CUDA_LAUNCH_BLOCKING" not in environment
    assert environment["PYTHONPATH"] == str(tmp_path / "some/where")
