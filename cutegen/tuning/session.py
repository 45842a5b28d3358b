"""What all runs of one tuning share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cutegen.digest import digest
from cutegen.records.trials import TrialStore
from cutegen.tuning.backends import Children
from cutegen.tuning.history import Ledger
from cutegen.tuning.progress import Observer, ignore_progress
from cutegen.tuning.request import Request
from cutegen.tuning.setting import Setting

__all__ = ["Session"]


@dataclass(frozen=True)
class Session:
    """What all runs of one tuning share: the compiler and the GPU's child are started once.

    Attributes:
        setting: Cache, database, table, GPU and toolchain.
        children: Compiler and measuring child.
        trials: The open database.
        observe: Called with the progress.
        again: Whether to measure again what earlier runs measured.
        clock: Seconds of a steady clock.
    """

    setting: Setting
    children: Children
    trials: TrialStore
    observe: Observer = ignore_progress
    again: bool = False
    clock: Callable[[], float] = time.monotonic

    def name_of(self, run: str) -> str:
        """Return the name of a run: where all is measured again, one that no earlier run had."""
        return digest([run, time.time_ns()], length=16) if self.again else run

    def ledger(self, request: Request, run: str) -> Ledger:
        """Return the ledger of a run for the problem of ``request``."""
        arch, device = self.setting.arch.name, self.setting.device
        policy = request.final_policy
        return Ledger(self.trials, request.problem, arch, device, run, policy, forget=self.again)
