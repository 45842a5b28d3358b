"""Check and time candidates on the GPU, in a child process that a broken kernel cannot take along."""

from cutegen.measure.candidate import REFERENCE, Candidate, CheckResult
from cutegen.measure.client import Bench, Opened
from cutegen.measure.contention import BUSY_MODES
from cutegen.measure.timing_run import TimingRun

__all__ = [
    "BUSY_MODES",
    "REFERENCE",
    "Bench",
    "Candidate",
    "CheckResult",
    "Opened",
    "TimingRun",
]
