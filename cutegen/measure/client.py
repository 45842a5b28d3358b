"""The parent's side of measuring: open a problem, check candidates, time them, survive broken kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutegen import errors
from cutegen.errors import CutegenError, MeasureError
from cutegen.families.registry import loaded_folders
from cutegen.family import Problem
from cutegen.measure.candidate import Candidate, CheckResult
from cutegen.measure.child_process import WorkerDiedError, WorkerHungError, WorkerProcess
from cutegen.measure.device import Device
from cutegen.measure.engine import DEFAULT_ENGINE
from cutegen.measure.policy import Policy
from cutegen.measure.timing_run import TimingRun
from cutegen.system.closing import Closing

__all__ = ["Bench", "Opened"]


@dataclass(frozen=True)
class Opened:
    """A problem that is ready to be measured.

    Attributes:
        problem: The problem.
        reference: The baseline's call, such as ``torch.mm``.
        reference_us: Its rough time in microseconds.
        sets: Operand sets in rotation.
        footprint_bytes: Bytes they span.
        launches: Launches in one graph.
    """

    problem: Problem
    reference: str
    reference_us: float
    sets: int
    footprint_bytes: int
    launches: int


class _LostError(Exception):
    """The measuring process is gone; ``culprit`` is the entry that it last announced."""

    def __init__(self, culprit: str, outcome: str, reason: str) -> None:
        self.culprit = culprit
        self.outcome = outcome
        self.reason = reason
        super().__init__(reason)


class Bench(Closing):
    """Checks and times candidates in one child process, which is replaced when a candidate breaks it.

    A candidate that crashes, hangs or faults affects no other: the process is killed and started anew, the
    problem is opened again, and the others go on.

    Args:
        timeout_s: Longest time that one candidate may take for one step (a check, a capture, a replay).
        device: Index of the GPU, as CUDA counts.
        engine: ``module:function`` that makes the engine in the child; the default needs CUDA and torch.
        search_path: Folders to add to the child's module search path.
        start_timeout_s: Longest time for the child to import torch and open the GPU, or to open a problem.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 10.0,
        device: int = 0,
        engine: str = DEFAULT_ENGINE,
        search_path: Sequence[Path] = (),
        start_timeout_s: float = 180.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._device = device
        self._engine = engine
        self._search_path = tuple(search_path)
        self._start_timeout_s = start_timeout_s
        self._worker: WorkerProcess | None = None
        self._facts: dict[str, Any] | None = None
        self._opened: tuple[Problem, int] | None = None
        self._is_open = False
        self._at = ""
        self.restarts = 0

    def start(self) -> None:
        """Start the child without waiting for it, so that its imports overlap with other work."""
        if self._worker is not None and not self._worker.running:
            self._drop()
        if self._worker is None:
            self._worker = WorkerProcess(self._engine, self._device, self._search_path)

    def close(self) -> None:
        """End the child; calling it again does nothing, and the bench can be started again."""
        self._drop()
        self._opened = None

    def _drop(self) -> None:
        worker, self._worker = self._worker, None
        self._facts, self._is_open = None, False
        if worker is not None:
            worker.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return self._worker.pid if self._worker is not None and self._worker.running else None

    @property
    def runtime(self) -> Mapping[str, Any]:
        """Facts from the child: ``device``, ``torch`` (version), ``cuda_runtime``. Waits for it to be ready.

        Raises:
            DeviceError: There is no GPU.
            MeasureError: The child could not be started.
        """
        return self._ready()[1]

    @property
    def device(self) -> Device:
        """The GPU that is measured. Waits for the child to be ready; raises as :attr:`runtime`."""
        return Device.from_json(self.runtime["device"])

    def _ready(self) -> tuple[WorkerProcess, dict[str, Any]]:
        """Return a child that answers."""
        self.start()
        worker = self._worker
        if worker is None:
            raise MeasureError("measuring process is gone")
        if self._facts is None:
            try:
                message = worker.receive(self._start_timeout_s)
            except (WorkerDiedError, WorkerHungError) as error:
                log = worker.log()
                self._drop()
                raise MeasureError(f"measuring process did not start: {error}\n{log}".rstrip()) from error
            if "error" in message:
                self._drop()
                raise _as_exception(message["error"])
            self._facts = message["result"]
        return worker, self._facts

    def open(self, problem: Problem, seed: int = 0) -> Opened:
        """Allocate operands for ``problem`` and find the reference; the previous problem is forgotten.

        Args:
            problem: What candidates will compute.
            seed: Of the operands' values.

        Raises:
            MeasureError: The problem does not fit, or the reference does not run.
            DeviceError: There is no GPU.
        """
        self._opened = None
        facts = self._send_open(problem, seed)
        self._opened = (problem, seed)
        return Opened(
            problem=problem,
            reference=facts["reference"],
            reference_us=facts["reference_us"],
            sets=facts["sets"],
            footprint_bytes=facts["footprint_bytes"],
            launches=facts["launches"],
        )

    @property
    def opened(self) -> Problem | None:
        """The problem that :meth:`open` was called for last, None before that."""
        return self._opened[0] if self._opened else None

    def _send_open(self, problem: Problem, seed: int) -> dict[str, Any]:
        request: dict[str, Any] = {"op": "open", "problem": str(problem), "seed": seed}
        if folders := loaded_folders():
            request["families"] = [str(folder) for folder in folders]
        self._is_open = False
        try:
            facts = self._exchange(request, self._start_timeout_s)
        except _LostError as lost:
            raise MeasureError(f"cannot open {problem}: {lost.reason}") from lost
        self._is_open = True
        return facts

    def _require_open(self, candidates: Sequence[Candidate]) -> None:
        """Open the candidates' problem in the child again if the child was restarted."""
        if self._opened is None:
            raise MeasureError("no problem is open; call open first")
        problem, seed = self._opened
        for candidate in candidates:
            if candidate.problem != problem:
                raise MeasureError(
                    f"candidate {candidate.name} is for {candidate.problem}, but {problem} is open"
                )
        self._ready()
        if not self._is_open:
            self._send_open(problem, seed)

    def check(self, candidate: Candidate, repeats: int | None = None) -> CheckResult:
        """Run a candidate on poisoned outputs and on its tail problem and compare it with fp64.

        Args:
            candidate: What is checked.
            repeats: Further runs on each problem that must give equal bits; None leaves their number to the
                engine.

        Raises:
            MeasureError: The candidate's problem is not open, or measuring itself failed.
        """
        try:
            result = self._run(
                {"op": "check", "candidate": candidate.to_json(), "repeats": repeats}, [candidate]
            )
        except _LostError as lost:
            return CheckResult(lost.outcome, lost.reason)
        return CheckResult.from_json(result)

    def time(self, candidates: Sequence[Candidate], policy: Policy, keep: Sequence[str] = ()) -> TimingRun:
        """Time candidates and the reference in interleaved rounds, then measure the energy of some alone.

        A candidate that breaks the child is dropped, and the rounds start over with the others.

        Args:
            candidates: What to time; all for the open problem, each with a name of its own. Those that would
                win a tie come first: where time decides, energy is measured for the first of the tied.
            policy: How to time it.
            keep: Names of candidates that take part in bursts and energy measurements, if there are any,
                however slow they are.

        Raises:
            MeasureError: The problem is not open, a name repeats, or the reference failed.
        """
        if len({candidate.name for candidate in candidates}) < len(candidates):
            raise MeasureError("two candidates have the same name")
        failures: dict[str, CheckResult] = {}
        while True:
            left = [candidate for candidate in candidates if candidate.name not in failures]
            request = {
                "op": "time",
                "candidates": [c.to_json() for c in left],
                "policy": policy.to_json(),
                "keep": list(keep),
            }
            try:
                return TimingRun.from_json(self._run(request, left), failures)
            except _LostError as lost:
                if lost.culprit not in {candidate.name for candidate in left}:
                    raise MeasureError(f"timing the reference failed: {lost.reason}") from lost
                failures[lost.culprit] = CheckResult(lost.outcome, lost.reason)

    def _run(self, request: dict[str, Any], candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Send a request about candidates, again if the child died before any of them ran.

        Raises:
            _LostError: The child is gone; the culprit is named, or two children died without one.
        """
        self._require_open(candidates)
        try:
            return self._exchange(request, self._timeout_s)
        except _LostError as lost:
            if lost.culprit:
                raise
        self._require_open(candidates)
        return self._exchange(request, self._timeout_s)

    def _exchange(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one request and return its result; ``limit_s`` starts anew with every entry announced.

        Raises:
            _LostError: The child is gone, and a new one was started.
            CutegenError: The child answered with an error.
        """
        worker, _ = self._ready()
        self._at = ""
        try:
            worker.send(request)
            message = worker.receive(limit_s)
            while "at" in message:
                self._at = message["at"]
                message = worker.receive(limit_s)
        except WorkerHungError:
            raise self._lose("timeout", f"took longer than {limit_s:g} s and was killed") from None
        except WorkerDiedError as error:
            if error.is_bug:
                log = worker.log()
                self._drop()
                raise MeasureError(f"{error}\n{log}".rstrip()) from error
            raise self._lose("launch_failed", str(error)) from error
        except BaseException:
            self._drop()  # an interrupted exchange cannot be resumed
            raise
        if "error" not in message:
            result: dict[str, Any] = message["result"]
            return result
        if message["error"]["fatal"]:
            raise self._lose("launch_failed", message["error"]["message"])
        raise _as_exception(message["error"])

    def _lose(self, outcome: str, reason: str) -> _LostError:
        """Replace the child and return the error that names the entry which it ran last."""
        self._drop()
        self.restarts += 1
        self.start()
        return _LostError(self._at, outcome, reason)


def _as_exception(error: Mapping[str, Any]) -> CutegenError:
    """Return the exception that the child reported."""
    kind = getattr(errors, error["kind"], MeasureError)
    if kind in (errors.DeviceError, errors.LaunchError, errors.ProblemError, errors.CheckError):
        exception: CutegenError = kind(error["message"])
        return exception
    return MeasureError(error["message"])
