"""The interface between the logic of the measuring process and torch with CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cutegen.family import Problem
from cutegen.measure.candidate import Candidate
from cutegen.measure.check import Verdict
from cutegen.measure.context import BACK_TO_BACK
from cutegen.measure.nvml import ClockReading

__all__ = ["DEFAULT_ENGINE", "Engine", "EngineFactory", "Feed", "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """Launches that are ready to be replayed.

    Attributes:
        graph: The engine's own object.
        launches: Launches in one replay.
        first_us: Microseconds per launch of the first replay, as an estimate.
        back_to_back: Whether replays may follow one another; if not, tensors are restored before each.
    """

    graph: Any
    launches: int
    first_us: float
    back_to_back: bool = True

    @property
    def replay_us(self) -> float:
        """Estimated microseconds of one replay."""
        return self.launches * self.first_us


class Feed(Protocol):
    """Replays of one entry without gaps between them, queued while the host does other things.

    A failed launch raises ``LaunchError``, at the latest in :meth:`finish`.
    """

    def top_up(self) -> None:
        """Queue replays until some milliseconds of work are waiting; returns without waiting."""
        ...

    def finish(self) -> float:
        """Wait for what is queued; return microseconds per launch over all of it."""
        ...


class Engine(Protocol):
    """Runs candidates on one device.

    A launch that fails raises ``LaunchError``; ``healthy`` then says whether the device still works. A kernel
    that writes where it must not raises ``CheckError``. ``MeasureError`` means that the problem does not fit
    the device.
    """

    def describe(self) -> dict[str, Any]:
        """Return facts about the device and the libraries, as JSON data with key ``device``."""
        ...

    def open(self, problem: Problem, seed: int) -> dict[str, Any]:
        """Allocate operands for ``problem`` in place of the previous one; return facts for the record."""
        ...

    def check(self, candidate: Candidate, problem: Problem, repeats: int | None = None) -> Verdict:
        """Run the candidate against the reference, on the open problem or on its tail problem.

        It runs ``repeats`` times more for equal bits; None leaves the number to the engine.
        """
        ...

    def prepare(self, candidate: Candidate | None, context: str = BACK_TO_BACK) -> Prepared:
        """Load, launch once and capture a graph of the candidate; None is the baseline.

        With another context than ``back_to_back``, the graph holds what runs before each launch as well.
        """
        ...

    def prepare_predecessor(self, context: str) -> Prepared:
        """Capture a graph of what runs before launches in ``context``, alone."""
        ...

    def measure(self, prepared: Prepared, replays: int) -> float:
        """Replay and wait; return microseconds per launch."""
        ...

    def feed(self, prepared: Prepared) -> Feed:
        """Begin to replay back to back, with the first replays queued."""
        ...

    def energy_mj(self) -> float | None:
        """Return the device's energy counter in millijoules; one query, None where it cannot be read."""
        ...

    def idle(self, seconds: float) -> None:
        """Leave the device without work."""
        ...

    def sm_clock(self) -> float | None:
        """Return the present SM clock in MHz; one query, cheaper than :meth:`read_clocks`."""
        ...

    def read_clocks(self) -> ClockReading:
        """Return the present clock, power, energy and the reasons for a limit."""
        ...

    def healthy(self) -> bool:
        """Return whether the device still works after a failed launch."""
        ...

    def now(self) -> float:
        """Return seconds of a steady clock."""
        ...


#: Makes the engine for the device of an index; named as ``module:function`` on the worker's command line.
EngineFactory = Callable[[int], Engine]
DEFAULT_ENGINE = "cutegen.measure.torch_engine:open_cuda"
