"""A bench of the fake engine that gives up on what hangs and waits for all else, however busy the machine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from cutegen.measure import Bench
from cutegen.measure.child_process import WorkerProcess

__all__ = ["PatientBench"]

PATIENCE_S = 120.0


class PatientBench(Bench):
    """As :class:`Bench`, but candidates that do not hang have minutes.

    Args:
        timeout_s: Longest time for one that hangs.
        engine: The function of ``fake_engine`` that makes the engine.
    """

    def __init__(self, timeout_s: float = 20.0, engine: str = "make") -> None:
        super().__init__(
            engine=f"fake_engine:{engine}", search_path=[Path(__file__).parent], timeout_s=timeout_s
        )
        self._hanging: Collection[str] = ()

    def _exchange(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        told = request.get("candidates") or ([request["candidate"]] if "candidate" in request else [])
        hangs = ("hangs", "time-hangs", "forks")
        self._hanging = {candidate["name"] for candidate in told if candidate["symbol"] in hangs}
        return super()._exchange(request, limit_s)

    def _ready(self) -> Any:
        worker, facts = super()._ready()
        return _PatientWorker(self, worker), facts


class _PatientWorker:
    """The child, with the time limit of whoever it says is running."""

    def __init__(self, bench: PatientBench, worker: WorkerProcess) -> None:
        self._bench, self._worker = bench, worker
        self.send, self.log = worker.send, worker.log

    def receive(self, limit_s: float) -> dict[str, Any]:
        hangs = self._bench._at in self._bench._hanging
        return self._worker.receive(limit_s if hangs else max(limit_s, PATIENCE_S))
