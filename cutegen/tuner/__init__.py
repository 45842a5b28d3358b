"""The loop: search, build, check, measure, record, choose; and :class:`AutoTuner` around it."""

from cutegen.tuner.auto import AutoTuner, HistoryEntry
from cutegen.tuner.progress import Observer, Progress, ignore_progress
from cutegen.tuner.request import Effort, Request
from cutegen.tuner.result import Row, TuneResult
from cutegen.tuner.setting import Setting
from cutegen.tuner.tuning import Failed, Tuning

__all__ = [
    "AutoTuner",
    "Effort",
    "Failed",
    "HistoryEntry",
    "Observer",
    "Progress",
    "Request",
    "Row",
    "Setting",
    "TuneResult",
    "Tuning",
    "ignore_progress",
]
