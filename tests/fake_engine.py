"""An engine without a GPU, for tests of the measuring process: a candidate's symbol says what it does.

``ok``, ``ok:12.5`` (microseconds), ``wrong``, ``racy``, ``refuses``, ``stray``, ``breaks`` (the device),
``hangs``, ``crashes``, ``prints``, ``bug``, ``forks``; ``time-`` in front makes it misbehave only when timed,
``energy-`` only while its energy is measured; ``@300`` at the end makes it draw 300 W instead of 500;
``ok:10~12`` takes 10 us back to back and 12 behind another kernel, which takes 3; ``ok:10!7`` 10 us once
the clock has settled, 7 before.
Time is virtual: measuring advances a clock, so that tests are exact and fast. So does asking for the energy
counter, which moves in steps.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from cutegen.errors import CheckError, DeviceError, LaunchError, MeasureError
from cutegen.families.gemm.problem import Problem
from cutegen.measure.candidate import Candidate
from cutegen.measure.check import Verdict
from cutegen.measure.context import BACK_TO_BACK
from cutegen.measure.device import Device
from cutegen.measure.engine import Prepared
from cutegen.measure.nvml import ClockReading

DEVICE = Device("Fake GPU", (9, 0), 132, 60_000_000, 2**37, "1.2", "13.0", "GPU-fake")
REFERENCE_US = 10.0
LAUNCHES = 100
PREDECESSOR_US = 3.0
WATTS = 500.0
#: Seconds that one reading of the energy counter takes, and between two steps of it.
READING_S, STEP_S = 0.0005, 0.02
#: The clock until the engine has been loaded for 0.15 s.
FAST_MHZ = 1980.0


class FakeEngine:
    """Knows every way in which a candidate can go wrong."""

    def __init__(
        self, *, drift: float = 0.0, noise: float = 0.0, step_s: float = STEP_S, counts: bool = True
    ) -> None:
        self.clock_s = 0.0
        self.watts = 0.0
        self.step_s = step_s
        self.counts = counts
        self._drawn_mj = 0.0
        self._shown_mj = 0.0
        self._next_step_s = step_s
        self.events: list[str] = []
        self._broken = False
        self._drift = drift
        self._noise = noise
        self._rng = random.Random(0)
        self._idled_s = 0.0
        self._problem: Problem | None = None

    def describe(self) -> dict[str, Any]:
        return {"device": DEVICE.to_json(), "torch": "0", "cuda_runtime": "0"}

    def open(self, problem: Problem, seed: int) -> dict[str, Any]:
        self._problem = problem
        self.events.append(f"open {problem}")
        if problem.sizes.get("k", 0) > 10**9:
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

    def prepare_predecessor(self, context: str) -> Prepared:
        self.events.append(f"prepare what runs before, {context}")
        return Prepared(f"@{WATTS}", LAUNCHES, PREDECESSOR_US)

    def prepare(self, candidate: Candidate | None, context: str = BACK_TO_BACK) -> Prepared:
        before = 0.0 if context == BACK_TO_BACK else PREDECESSOR_US
        if candidate is None:
            return Prepared(f"@{WATTS}", LAUNCHES, REFERENCE_US + before)
        self.events.append(f"prepare {candidate.name}")
        behaviour, _, rest = candidate.symbol.partition(":")
        number, _, watts = rest.partition("@")
        self._behave("" if behaviour.startswith(("time-", "energy-")) else behaviour)
        number, _, burst = number.partition("!")
        own = float(number.split("~")[-1 if before else 0] or 20.0)
        faster = f"!{float(burst) - own}" if burst else ""
        return Prepared(f"{behaviour}@{watts or WATTS}{faster}", LAUNCHES, own + before)

    def measure(self, prepared: Prepared, replays: int) -> float:
        behaviour, watts = _behaviour(prepared)
        self._behave("" if behaviour.startswith("energy-") else behaviour.removeprefix("time-"))
        slow = 1 + self._drift * self.clock_s + self._rng.gauss(0, self._noise)
        own_us = (prepared.first_us + (_gain(prepared) if self.sm_clock() == FAST_MHZ else 0.0)) * slow
        self.pass_time(own_us * prepared.launches * replays / 1e6, watts)
        return own_us

    def idle(self, seconds: float) -> None:
        self.events.append(f"idle {seconds:g} s")
        self.pass_time(seconds, 0)
        self._idled_s = self.clock_s

    def pass_time(self, seconds: float, watts: float) -> None:
        """Advance the clock while so much power is drawn; the counter shows what it was at its last step."""
        until = self.clock_s + seconds
        while self._next_step_s <= until:
            self._drawn_mj += (self._next_step_s - self.clock_s) * watts * 1000
            self.clock_s = self._next_step_s
            self._shown_mj = self._drawn_mj
            self._next_step_s += self.step_s
        self._drawn_mj += (until - self.clock_s) * watts * 1000
        self.clock_s = until

    def feed(self, prepared: Prepared) -> FakeFeed:
        behaviour, watts = _behaviour(prepared)
        self._behave(behaviour.removeprefix("energy-"))
        self.watts = watts
        return FakeFeed(self, prepared)

    def energy_mj(self) -> float | None:
        self.pass_time(READING_S, self.watts)
        return self._shown_mj if self.counts else None

    def sm_clock(self) -> float | None:
        return FAST_MHZ if self.clock_s - self._idled_s < 0.15 else 1500.0

    def read_clocks(self) -> ClockReading:
        return ClockReading(self.sm_clock(), self._drawn_mj, 650.0, ("power_cap",))

    def healthy(self) -> bool:
        return not self._broken

    def now(self) -> float:
        return self.clock_s


class FakeFeed:
    """Replays that never run dry."""

    def __init__(self, engine: FakeEngine, prepared: Prepared) -> None:
        self._engine = engine
        self._us = prepared.first_us

    def top_up(self) -> None:
        return None

    def finish(self) -> float:
        self._engine.watts = 0.0
        return self._us


def _behaviour(prepared: Prepared) -> tuple[str, float]:
    behaviour, _, watts = str(prepared.graph).partition("!")[0].partition("@")
    return behaviour, float(watts)


def _gain(prepared: Prepared) -> float:
    """Microseconds that are added at the fast clock."""
    return float(str(prepared.graph).partition("!")[2] or 0.0)


def make(index: int) -> FakeEngine:
    """Make the engine that most tests use."""
    return FakeEngine()


class DoubtfulEngine(FakeEngine):
    """For artifacts of the real compiler, whose symbols say nothing: those that split k are wrong."""

    def check(self, candidate: Candidate, problem: Problem, repeats: int | None = None) -> Verdict:
        wrong = candidate.launch.workspace_bytes > 0
        return super().check(replace(candidate, symbol="wrong" if wrong else "ok"), problem, repeats)

    def prepare(self, candidate: Candidate | None, context: str = BACK_TO_BACK) -> Prepared:
        """The later a candidate is captured, the slower it is."""
        count = sum(event.startswith("prepare") for event in self.events)
        return super().prepare(candidate and replace(candidate, symbol=f"ok:{count + 5}"), context)


def make_doubtful(index: int) -> FakeEngine:
    """Make an engine for artifacts of the real compiler."""
    return DoubtfulEngine()


def make_without_gpu(index: int) -> FakeEngine:
    """Fail as on a machine without a GPU."""
    raise DeviceError(f"no GPU of index {index}; this process sees 0")


def make_broken(index: int) -> FakeEngine:
    """Fail with a mistake of ours."""
    raise ZeroDivisionError("division by zero while starting")
