"""The result of tuning one problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cutegen.build import Resources
from cutegen.families.registry import find_family
from cutegen.family import Problem
from cutegen.measure.context import DEFAULT_CONTEXT
from cutegen.measure.statistics import Interval
from cutegen.measure.timing import Timing, against
from cutegen.space import Config

__all__ = ["Row", "TuneResult"]


@dataclass(frozen=True)
class Row:
    """One candidate that is worth showing.

    Attributes:
        config: All its knobs.
        default: Whether it is what is used without tuning.
        chosen: Whether it is the winner.
        equal: Whether it is statistically tied with the fastest.
        timing: Measurement with settled clocks, None if it was only compiled.
        predicted_us: The model's estimate in microseconds, never a measurement; None without a model, and in
            a measured run.
        resources: Registers, shared memory and the like.
        workspace_bytes: Scratch memory of a launch.
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
    workspace_bytes: int = 0
    artifact_key: str = ""
    trial: str = ""

    @property
    def time_us(self) -> float | None:
        """Measured microseconds; None if it was not measured."""
        return self.timing.median_us if self.timing else None


@dataclass(frozen=True)
class TuneResult:
    """The winner of one problem, the other finalists, and what it took.

    Attributes:
        problem: What was tuned.
        arch: The target's name.
        device: The GPU's name; empty when nothing was measured.
        rows: The winner first, then the others by the objective; the default is among them if it works.
        objective: What the winner was chosen by: one of :data:`cutegen.measure.policy.OBJECTIVES`.
        context: What ran before each launch that was timed: one of
            :data:`cutegen.measure.context.CONTEXTS`.
        torch: The timing of ``torch.mm`` in the same rounds.
        baseline_wins: Whether the baseline was allowed to win and did.
        ratio_to_default: Default's time (or energy, by the objective) over the winner's, with its interval.
        outcomes: How many candidates ended in each outcome.
        untried: Candidates that the budget left no time for.
        kernels: Compiled kernels behind the candidates; configs that differ in run-time knobs share one.
        seconds: Wall-clock time of this call.
        stages: Seconds of the run by what was done in them; empty if nothing ran.
        reused: Whether everything came from records and nothing ran.
        run: Name of the run that measured it.
        refused: Kernels of the Operator API that were no candidates, with reasons.
        failed: Sentences on why candidates do not work, each reason once.
        dead_knobs: Sentences on knobs of a user's kernel that changed nothing.
    """

    problem: Problem
    arch: str
    device: str
    rows: tuple[Row, ...]
    objective: str = "time"
    context: str = DEFAULT_CONTEXT
    torch: Timing | None = None
    baseline_wins: bool = False
    ratio_to_default: Interval | None = None
    outcomes: Mapping[str, int] = field(default_factory=dict)
    untried: int = 0
    kernels: int = 0
    seconds: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    reused: bool = False
    run: str = ""
    refused: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    dead_knobs: tuple[str, ...] = ()

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
        """Measured microseconds of the winner; None if nothing was measured."""
        return self.winner.time_us

    @property
    def predicted_us(self) -> float | None:
        """Microseconds that the model predicts for the winner; None in a measured run or without a model."""
        return self.winner.predicted_us

    @property
    def ratio(self) -> Interval | None:
        """The baseline's cost over the winner's, with its 95 % interval; None if either was not measured."""
        return self.against_baseline(self.winner.timing) if self.winner.timing else None

    def against_baseline(self, timing: Timing) -> Interval | None:
        """Return cost of ``torch.mm`` over that of ``timing``, by the objective; None if it is not known."""
        return against(self.torch, timing, self.objective)

    @property
    def baseline(self) -> str:
        """What the kernels were compared with, such as ``torch.mm``; empty if nothing was measured."""
        return self.torch.reference if self.torch else ""

    @property
    def metric(self) -> str:
        """Unit of :meth:`rate`: ``TFLOP/s`` or ``GB/s``, as the family is measured."""
        return find_family(self.problem.family).metric

    def rate(self, time_us: float) -> float:
        """Return operations or bytes per second, in the unit of :attr:`metric`."""
        if self.metric == "TFLOP/s":
            return self.problem.flops / time_us / 1e6
        return self.problem.min_bytes / time_us / 1e3

    @property
    def tflops(self) -> float | None:
        """Measured 10**12 operations per second of the winner; None if nothing was measured."""
        return self.problem.flops / self.time_us / 1e6 if self.time_us else None

    @property
    def candidates(self) -> int:
        """Candidates that got an outcome."""
        return sum(self.outcomes.values())
