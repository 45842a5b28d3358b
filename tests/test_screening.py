"""Sets of candidates timed on several problems: what is shared between these, and what is not."""

from __future__ import annotations

from pathlib import Path

from fake_tuning import Rig
from test_tuning import ARCH, DEFAULT

from cutegen.families.gemm.problem import Problem
from cutegen.records.trials import TrialStore
from cutegen.tuning.screening import Screening, SourceCache
from cutegen.tuning.session import Session

SIZES = (1024, 2048)


def test_a_config_is_checked_once_for_each_signature(tmp_path: Path) -> None:
    """Right results in bf16 say nothing of the kernel for fp16; those for one size hold for another."""
    rig = Rig(tmp_path)
    setting = rig.tuner.setting
    problems = [Problem(m, 4096, 4096, ab_dtype=dtype) for dtype in ("bf16", "fp16") for m in SIZES]
    with TrialStore(setting.db) as trials, setting.children() as children:
        screening = Screening(Session(setting, children, trials), "run", SourceCache())
        runs = [screening.start(rig.tuner.request(problem)) for problem in problems]
        for run in runs:
            run.screen([DEFAULT])
    assert rig.bench.checked == [DEFAULT.digest] * 2
    assert rig.bench.opened == problems
    assert all(run.attempts[DEFAULT].ok and run.attempts[DEFAULT].timing for run in runs)


def test_problems_of_one_signature_share_their_sources() -> None:
    """Rendering takes longer than asking whether it was done."""
    render = SourceCache()
    small, large, other = (
        render(problem, DEFAULT, ARCH)
        for problem in (*(Problem(m, 4096, 4096) for m in SIZES), Problem(1024, 4096, 4096, ab_dtype="fp16"))
    )
    assert small is large and small.text != other.text
