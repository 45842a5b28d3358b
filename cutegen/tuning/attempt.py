"""One candidate of a run: its source, its artifact, its timings, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from cutegen.build import Artifact, Resources
from cutegen.build.render import Source
from cutegen.measure.timing import Timing
from cutegen.records.trial import Key
from cutegen.space import Config, Launch

__all__ = ["Attempt"]


@dataclass
class Attempt:
    """What is known of one candidate.

    Attributes:
        config: All its knobs.
        source: Its rendered kernel.
        artifact_key: Key of its artifact, whether or not it is compiled yet.
        launch: Its run-time arguments on the problem.
        artifact: The compiled kernel; None until it is there, or while records make it unnecessary.
        resources: Registers, shared memory and so on; None until they are known.
        outcome: How it ended; empty while it has not.
        error: Why it failed.
        timing: Timing from screening.
        trial: Id of the recorded outcome.
        final: Timing from the finals; None unless it was a finalist.
        final_trial: Id of the recorded final.
    """

    config: Config
    source: Source
    artifact_key: str
    launch: Launch
    artifact: Artifact | None = None
    resources: Resources | None = None
    outcome: str = ""
    error: str = ""
    timing: Timing | None = None
    trial: str = ""
    final: Timing | None = None
    final_trial: str = ""

    @property
    def name(self) -> str:
        """Names it among the candidates of one problem."""
        return self.config.digest

    @property
    def key(self) -> Key:
        """What is run, as in :attr:`cutegen.records.trial.Trial.key`."""
        return self.artifact_key, self.launch.scalars

    @property
    def kernel(self) -> str:
        """Names the kernel. Different sources that open a user's module may be one kernel."""
        return (self.artifact.trace if self.artifact else "") or self.artifact_key

    @property
    def done(self) -> bool:
        """Whether it has its outcome."""
        return bool(self.outcome)

    @property
    def ok(self) -> bool:
        """Whether it works, as far as it was run."""
        return self.outcome == "ok"

    def fail(self, outcome: str, error: str, trial: str) -> None:
        """End it with a failure."""
        self.outcome, self.error, self.trial = outcome, error, trial

    def built(self, artifact: Artifact) -> None:
        """Note the compiled kernel."""
        self.artifact, self.resources = artifact, artifact.resources

    def screened(self, timing: Timing | None, trial: str) -> None:
        """End it with a success; the timing is None where nothing is measured."""
        self.outcome, self.timing, self.trial = "ok", timing, trial
