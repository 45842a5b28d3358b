"""Recorded problems before and after they are tuned: which come first, and how much of them is answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutegen.arch import Arch
from cutegen.errors import CutegenError, ProblemError
from cutegen.families.gemm.perf_model.gpu_params import H200
from cutegen.families.registry import find_space
from cutegen.family import Problem
from cutegen.records.recorded_calls import Call
from cutegen.records.table import Table
from cutegen.runtime.answer_lookup import Answer, look_up
from cutegen.search.defaults import default_config, predictor

__all__ = ["TUNED", "Coverage", "Weight", "answer_of", "at_rows", "coverage", "is_tuned", "weigh"]

#: Rules of lookup by which an answer was measured for the very problem, or for the range that holds it.
TUNED = ("exact", "range")
#: How far the config of an untuned problem is behind the best, on average, as a fraction. Source: default
#: 16-bit GEMMs of Hopper on matrices that were held out of the fit (tools/fit_gemm.py); a guess for others.
_BEHIND = 0.012
#: Layout of the gradient of a weight, whose k are the rows of a batch.
_OF_WEIGHT = "mn"


@dataclass(frozen=True)
class Weight:
    """The weight of a problem in a program.

    Attributes:
        problem: What is computed.
        calls: How often.
        call_us: Predicted microseconds of one call without tuning. Without a model, the roofline time of an
            H200, which is enough to sort by. 0 if the target cannot compute it.
    """

    problem: Problem
    calls: int
    call_us: float

    @property
    def us(self) -> float:
        """Predicted microseconds of all calls."""
        return self.calls * self.call_us


def weigh(problems: Mapping[Problem, int], arch: Arch, sm_count: int) -> tuple[Weight, ...]:
    """Return the weight of each problem, from its number of calls; those of most predicted time first."""
    weights = [Weight(p, calls, _predicted_us(p, arch, sm_count)) for p, calls in problems.items()]
    return tuple(sorted(weights, key=lambda weight: -weight.us))


def _predicted_us(problem: Problem, arch: Arch, sm_count: int) -> float:
    try:
        space = find_space(problem.family, arch)
        predict = predictor(space, problem, sm_count)
        found = predict(default_config(space, problem, sm_count)) if predict is not None else None
    except CutegenError:
        return 0.0
    if found is None:
        return max(problem.min_bytes / H200.hbm_bytes_us, problem.flops / H200.settled_flops)
    return found


def at_rows(calls: Mapping[Call, int], rows: Sequence[int]) -> dict[Problem, int]:
    """Return how often each problem is called in a run, and those of runs with other numbers of rows.

    Rows are m, but k of a weight's gradient. What has no rows, or none so many, stays as it was recorded.
    """
    found: Counter[Problem] = Counter()
    for call, count in calls.items():
        problem = call.problem
        if call.how == "given":
            continue
        found[problem] += count
        of_weight = call.phase == "backward" and getattr(problem, "layout", "") == _OF_WEIGHT
        size = "k" if of_weight else "m"
        for value in rows:
            if problem.sizes.get(size, value) == value:
                continue
            try:
                found[problem.with_sizes(**{size: value})] += count
            except ProblemError:
                continue
    return dict(found)


def answer_of(table: Table | None, problem: Problem, arch: Arch, sm_count: int) -> Answer | None:
    """Return what ``table`` answers to a problem; None if the target cannot compute it."""
    try:
        return look_up(table, problem, find_space(problem.family, arch), sm_count)
    except CutegenError:
        return None


def is_tuned(answer: Answer | None) -> bool:
    """Return whether an answer rests on a measurement of the very problem, or of its range."""
    return answer is not None and answer.how in TUNED


@dataclass(frozen=True)
class Coverage:
    """How much of a recording has an exact answer.

    Attributes:
        calls: Share of the calls, from 0 to 1.
        time: Share of the predicted time.
        problems: How many problems have one.
        of: How many problems there are.
        gain_us: Microseconds that tuning the others is expected to save, of all calls.
    """

    calls: float
    time: float
    problems: int
    of: int
    gain_us: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.problems} of {self.of} problems, {self.calls:.0%} of the calls, {self.time:.0%} of the "
            "predicted time"
        )


def coverage(weights: Sequence[Weight], table: Table | None, arch: Arch, sm_count: int) -> Coverage:
    """Return how much of the weights ``table`` answers exactly or by a range."""
    known = [w for w in weights if is_tuned(answer_of(table, w.problem, arch, sm_count))]
    calls, us = sum(w.calls for w in weights), sum(w.us for w in weights)
    return Coverage(
        sum(w.calls for w in known) / calls if calls else 0.0,
        sum(w.us for w in known) / us if us else 0.0,
        len(known),
        len(weights),
        _BEHIND * (us - sum(w.us for w in known)),
    )
