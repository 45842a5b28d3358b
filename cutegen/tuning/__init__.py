"""The loop: search, build, check, measure, record, choose; and :class:`AutoTuner` around it."""

from cutegen.tuning.autotuner import AutoTuner
from cutegen.tuning.progress import Observer, Progress, ignore_progress
from cutegen.tuning.range_request import RangeEffort, RangeRequest
from cutegen.tuning.range_result import RangeResult
from cutegen.tuning.request import EFFORTS, Effort, Request
from cutegen.tuning.result import Row, TuneResult
from cutegen.tuning.result_cache import HistoryEntry
from cutegen.tuning.session import Session
from cutegen.tuning.setting import Setting
from cutegen.tuning.sweep import Failed, Tuning

__all__ = [
    "EFFORTS",
    "AutoTuner",
    "Effort",
    "Failed",
    "HistoryEntry",
    "Observer",
    "Progress",
    "RangeEffort",
    "RangeRequest",
    "RangeResult",
    "Request",
    "Row",
    "Session",
    "Setting",
    "TuneResult",
    "Tuning",
    "ignore_progress",
]
