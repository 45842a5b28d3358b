"""What a run remembers: the newest record of a kernel, by the order of writing."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_kernels import H200

from cutegen.build.render import Source
from cutegen.families.gemm.problem import Problem
from cutegen.families.registry import find_space
from cutegen.measure.policy import Policy
from cutegen.measure.timing import Timing
from cutegen.records.trial import Trial
from cutegen.records.trials import TrialStore
from cutegen.space import Launch
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.history import Ledger

PROBLEM = Problem(256, 256, 256)
CONFIG = find_space("gemm", H200.arch).default(PROBLEM)
POLICY = Policy.screen()


def record(outcome: str, created_at: str) -> Trial:
    timing = Timing(1.0, 0.9, 1.1, 15) if outcome == "ok" else None
    return Trial(
        PROBLEM,
        outcome,
        CONFIG,
        artifact_key="k",
        launch=(1,),
        timing=timing,
        policy=POLICY if timing else None,
        device=H200,
        created_at=created_at,
    )


@pytest.mark.parametrize(("first", "second"), [("timeout", "ok"), ("ok", "timeout"), ("ok", "launch_failed")])
def test_the_record_that_was_written_last_counts_whatever_the_clock_said(
    tmp_path: Path, first: str, second: str
) -> None:
    """The clock was set back in between, or two machines disagree."""
    attempt = Attempt(CONFIG, Source("", "sm_90a", PROBLEM.signature, CONFIG), "k", Launch((1,), 0))
    with TrialStore(tmp_path / "trials.db") as store:
        store.add(record(first, "2026-11-22T12:00:00.000+00:00"))
        store.add(record(second, "2026-11-22T11:05:00.000+00:00"))
        Ledger(store, PROBLEM, "sm_90a", H200, "run", POLICY).recall([attempt], POLICY)
        assert attempt.trial == store.find()[-1].id
    assert attempt.outcome == second and (attempt.timing is not None) == (second == "ok")
