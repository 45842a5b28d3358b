"""An engine without a GPU, for tests of the measuring process: a candidate's symbol says what it does.

``ok``, ``ok:12.5`` (microseconds), ``wrong``, ``racy``, ``refuses``, ``stray``, ``breaks`` (the device),
``hangs``, ``crashes``, ``prints``, ``bug``, ``forks``; ``time-`` in front makes it misbehave only when timed.
Time is virtual: measuring advances a clock, so that tests are exact and fast.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from cutegen.check import Verdict
from cutegen.device import ClockReading, Device
from cutegen.errors import CheckError, DeviceError, LaunchError, MeasureError
from cutegen.measure.candidate import Candidate
from cutegen.measure.engine import Prepared
from cutegen.problem import Problem

DEVICE = Device("Fake GPU", (9, 0), 132, 60_000_000, 2**37, "1.2", "13.0", "GPU-fake")
REFERENCE_US = 10.0
LAUNCHES = 100


class FakeEngine:
    """Knows every way in which a candidate can go wrong."""

    def __init__(self, *, drift: float = 0.0, noise: float = 0.0) -> None:
        self.clock_s = 0.0
        self.events: list[str] = []
        self._broken = False
        self._drift = drift
        self._noise = noise
        self._rng = random.Random(0)
        self._problem: Problem | None = None

    def describe(self) -> dict[str, Any]:
        return {"device": DEVICE.to_json(), "torch": "0", "cuda_runtime": "0"}

    def open(self, problem: Problem, seed: int) -> dict[str, Any]:
        self._problem = problem
        self.events.append(f"open {problem}")
        if problem.k > 10**9:
            raise MeasureError(f"cannot set up {problem}: out of memory")
        return {
            "reference": "torch.mm",
            "reference_us": REFERENCE_US,
            "sets": 2,
            "footprint_bytes": 2 * problem.min_bytes,
            "launches": LAUNCHES,
        }

    def check(self, candidate: Candidate, problem: Problem, repeats: int | None = None) -> Verdict:
        self.events.append(f"check {candidate.name} {problem}" + (f" x{repeats}" if repeats else ""))
        behaviour = candidate.symbol.partition(":")[0]
        if behaviour == "wrong-tail":
            behaviour = "ok" if problem == candidate.problem else "wrong"
        self._behave(behaviour)
        ok = behaviour not in ("wrong", "racy")
        return Verdict(
            ok=ok,
            got=float("nan") if behaviour == "wrong" else 1.0,
            deterministic=behaviour != "racy",
            reason="" if ok else f"{behaviour} numbers",
            problem=str(problem),
        )

    def _behave(self, behaviour: str) -> None:
        if self._broken:
            raise LaunchError("CUDA error: an illegal memory access was encountered")
        if behaviour == "refuses":
            raise LaunchError("launch failed: mismatched argument")
        if behaviour == "stray":
            raise CheckError("wrote behind its workspace")
        if behaviour == "breaks":
            self._broken = True
            raise LaunchError("CUDA error: an illegal memory access was encountered")
        if behaviour == "hangs":
            time.sleep(600)
        if behaviour == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "bug":
            raise ZeroDivisionError("a mistake of ours")
        if behaviour == "prints":
            sys.stdout.write("stray words {\n")
            sys.stdout.flush()
            os.write(1, b'{"result": "forged"}\n')
        if behaviour == "forks":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)

    def prepare(self, candidate: Candidate | None) -> Prepared:
        if candidate is None:
            return Prepared("", LAUNCHES, REFERENCE_US)
        self.events.append(f"prepare {candidate.name}")
        behaviour, _, number = candidate.symbol.partition(":")
        self._behave("" if behaviour.startswith("time-") else behaviour)
        return Prepared(behaviour, LAUNCHES, float(number or 20.0))

    def measure(self, prepared: Prepared, replays: int) -> float:
        self._behave(str(prepared.graph).removeprefix("time-"))
        slow = 1 + self._drift * self.clock_s + self._rng.gauss(0, self._noise)
        self.clock_s += prepared.replay_us * replays * slow / 1e6
        return prepared.first_us * slow

    def sm_clock(self) -> float | None:
        return 1980.0 if self.clock_s < 0.15 else 1500.0

    def read_clocks(self) -> ClockReading:
        return ClockReading(self.sm_clock(), self.clock_s * 500_000, 650.0, ("power_cap",))

    def healthy(self) -> bool:
        return not self._broken

    def now(self) -> float:
        return self.clock_s


def make(index: int) -> FakeEngine:
    """Make the engine that most tests use."""
    return FakeEngine()


def make_without_gpu(index: int) -> FakeEngine:
    """Fail as on a machine without a GPU."""
    raise DeviceError(f"no GPU of index {index}; this process sees 0")


def make_broken(index: int) -> FakeEngine:
    """Fail with a mistake of ours."""
    raise ZeroDivisionError("division by zero while starting")
