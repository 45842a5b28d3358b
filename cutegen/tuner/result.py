"""What tuning one problem came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutegen.build import Resources
from cutegen.policy import Timing, against
from cutegen.problem import Problem
from cutegen.space import Config
from cutegen.stats import Interval

__all__ = ["Row", "TuneResult"]


@dataclass(frozen=True)
class Row:
    """One candidate that is worth showing.

    Attributes:
        config: All its knobs.
        default: Whether it is what is used without tuning.
        chosen: Whether it is the winner.
        equal: Whether it cannot be told apart from the fastest.
        timing: Settled measurement, None if it was only compiled.
        predicted_us: The model's estimate in microseconds; never a measurement.
        resources: Registers, shared memory and the like.
        artifact_key: Its artifact in the store.
        trial: The record of its measurement.
    """

    config: Config
    default: bool = False
    chosen: bool = False
    equal: bool = False
    timing: Timing | None = None
    predicted_us: float | None = None
    resources: Resources | None = None
    artifact_key: str = ""
    trial: str = ""

    @property
    def time_us(self) -> float | None:
        """Microseconds, measured if it was measured, else predicted."""
        return self.timing.median_us if self.timing else self.predicted_us


@dataclass(frozen=True)
class TuneResult:
    """The winner of one problem, its rivals, and what it took.

    Attributes:
        problem: What was tuned.
        arch: The target's name.
        device: The GPU's name; empty when nothing was measured.
        rows: The winner first, then its rivals by the objective; the default is among them if it works.
        objective: What the winner was chosen by: one of :data:`cutegen.policy.OBJECTIVES`.
        torch: The timing of ``torch.mm`` in the same rounds.
        torch_wins: Whether the vendor library was allowed to win and did.
        ratio_to_default: Default's time (or energy, by the objective) over the winner's, with its interval.
        outcomes: How many candidates ended in each outcome.
        untried: Candidates that the budget left no time for.
        seconds: Wall-clock time of this call.
        reused: Whether everything came from records and nothing ran.
        run: Name of the run that measured it.
        refused: Kernels of the Operator API that were no candidates, with reasons.
    """

    problem: Problem
    arch: str
    device: str
    rows: tuple[Row, ...]
    objective: str = "time"
    torch: Timing | None = None
    torch_wins: bool = False
    ratio_to_default: Interval | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    untried: int = 0
    seconds: float = 0.0
    reused: bool = False
    run: str = ""
    refused: tuple[str, ...] = ()

    @property
    def winner(self) -> Row:
        """The row to use."""
        return self.rows[0]

    @property
    def config(self) -> Config:
        """The config to use."""
        return self.winner.config

    @property
    def measured(self) -> bool:
        """Whether the times are measurements rather than predictions."""
        return self.winner.timing is not None

    @property
    def contended_by(self) -> str:
        """Other processes that used the GPU while it was measured, in words; empty if none was seen."""
        return self.winner.timing.contended_by if self.winner.timing else ""

    @property
    def time_us(self) -> float | None:
        """Microseconds of the winner, measured or predicted (see :attr:`measured`)."""
        return self.winner.time_us

    def against_torch(self, timing: Timing) -> Interval | None:
        """Return cost of ``torch.mm`` over that of ``timing``, by the objective; None if it is not known."""
        return against(self.torch, timing, self.objective)

    @property
    def tflops(self) -> float | None:
        """10**12 operations per second of the winner."""
        return self.problem.flops / self.time_us / 1e6 if self.time_us else None

    @property
    def candidates(self) -> int:
        """Candidates that got an outcome."""
        return sum(self.outcomes.values())
