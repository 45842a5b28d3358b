"""One run's view of the trial store: what earlier runs found out, and recording what this one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

from cutegen.build import Artifact, Resources
from cutegen.family import Problem
from cutegen.measure.device import Device
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.trial import Trial
from cutegen.records.trials import TrialStore
from cutegen.tuning.attempt import Attempt

__all__ = ["FAILED", "Ledger", "resources_of"]

#: Outcomes that are not tried again: the same kernel would fail in the same way.
FAILED = ("invalid", "build_failed", "launch_failed", "wrong_result", "timeout")


class Ledger:
    """Reads and writes the trials of one problem on one kind of GPU.

    Args:
        trials: The database.
        problem: What is tuned.
        arch: The target's name.
        device: The GPU, None where candidates are only compiled.
        run: Name of the run, written into every trial.
        final: The policy of the finals.
        forget: Whether to ignore earlier trials.
    """

    def __init__(
        self,
        trials: TrialStore,
        problem: Problem,
        arch: str,
        device: Device | None,
        run: str,
        final: Policy,
        *,
        forget: bool = False,
    ) -> None:
        self.run = run
        self._final = final
        self._trials = trials
        self._problem = problem
        self._arch = arch
        self._device = device
        known = [] if forget else trials.find(problem, device.key if device else "")
        self._known = [trial for trial in known if _same_driver(trial.device, device)]

    def recall(self, attempts: Sequence[Attempt], policy: Policy | None) -> None:
        """Fill in what earlier runs found out about ``attempts``: failures, and timings under ``policy``.

        Without a policy no timings count.
        """
        # The database returns trials in the order they were written in, whatever the clock said then.
        newest = {t.key: t for t in self._known if t.outcome in FAILED or _is_timed(t, policy)}
        for attempt in attempts:
            trial = newest.get(attempt.key)
            if trial is None or (trial.timing is not None and not _is_sound(trial)):
                continue
            if trial.timing is None:
                attempt.fail(trial.outcome, trial.error, trial.id)
            else:
                attempt.screened(trial.timing, trial.id)
                attempt.resources = resources_of(trial)

    def compiled(self, attempt: Attempt) -> str:
        """Return the id of the trial that recorded that ``attempt`` compiles; empty if there is none."""
        return next((t.id for t in self._known if t.key == attempt.key and t.outcome == "ok"), "")

    def finals(self) -> list[Trial]:
        """Return the undisturbed finals of earlier runs of this name and their baselines, newest last."""
        return [t for t in self._known if t.run == self.run and t.policy == self._final and _is_sound(t)]

    def outcomes(self) -> Counter[str]:
        """Return how the candidates of earlier runs of this name ended, each by its newest trial."""
        latest = {t.key: t.outcome for t in self._known if t.run == self.run and t.origin != "torch"}
        return Counter(latest.values())

    def together(self) -> AbstractContextManager[None]:
        """Record all trials of the ``with`` block in one transaction; raises as :meth:`write`."""
        return self._trials.together()

    def write(
        self,
        attempt: Attempt,
        outcome: str,
        *,
        error: str = "",
        timing: Timing | None = None,
        policy: Policy | None = None,
    ) -> str:
        """Record how ``attempt`` ended and return the trial's id.

        Raises:
            StoreError: It could not be written.
        """
        artifact = attempt.artifact
        resources = artifact.resources if artifact else attempt.resources
        trial = Trial(
            problem=self._problem,
            outcome=outcome,
            config=attempt.config,
            origin=attempt.config.source,
            arch=self._arch,
            source_digest=attempt.source.digest,
            artifact_key=attempt.artifact_key,
            launch=attempt.launch.scalars,
            error=error,
            resources=resources.to_json() if resources else None,
            timing=timing,
            policy=policy,
            device=self._device,
            build_s=artifact.build_s if isinstance(artifact, Artifact) else None,
            run=self.run,
        )
        self._trials.add(trial)
        return trial.id

    def write_baseline(self, timing: Timing, policy: Policy) -> str:
        """Record the baseline's time and return the trial's id.

        Raises:
            StoreError: It could not be written.
        """
        trial = Trial(
            problem=self._problem,
            outcome="ok",
            origin="torch",
            arch=self._arch,
            timing=timing,
            policy=policy,
            device=self._device,
            run=self.run,
        )
        self._trials.add(trial)
        return trial.id


def _is_timed(trial: Trial, policy: Policy | None) -> bool:
    """Whether a trial has a timing under ``policy``."""
    return policy is not None and trial.timing is not None and trial.policy == policy


def _is_sound(trial: Trial) -> bool:
    """Whether a trial has a timing made while no other process used the GPU; others are measured again."""
    return trial.timing is not None and not trial.timing.contended_by


def _same_driver(then: Device | None, now: Device | None) -> bool:
    """Whether two readings of one kind of GPU were made under drivers that a table treats alike."""
    if then is None or now is None:
        return then is now
    return then.cuda_driver_version == now.cuda_driver_version


def resources_of(trial: Trial) -> Resources | None:
    """Return the resources that a trial recorded, if it did."""
    return Resources.from_json(trial.resources) if trial.resources else None
