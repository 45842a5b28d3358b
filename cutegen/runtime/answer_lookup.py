"""Which config answers a problem, and why: an entry's, the default, or none where PyTorch computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cutegen.families.registry import find_family, is_legal, require_legal
from cutegen.family import Family, Problem
from cutegen.records.entry import Entry
from cutegen.records.lookup import Lookup
from cutegen.records.range_entry import RangeEntry
from cutegen.records.table import Table
from cutegen.search.defaults import choose_default, predictor
from cutegen.space import Config, Space

__all__ = ["DEFAULT_FALLBACK", "MEASURED_LEAD", "Answer", "estimate", "look_up"]

#: Where PyTorch answers if neither the dispatcher nor the table says it: where it was measured to be faster,
#: or is expected to be, of what nobody measured. Source: docs/tuning.md, "Never slower than PyTorch".
DEFAULT_FALLBACK = "expected"
#: Measured leads of PyTorch up to this fraction count as none. Source: judgement; medians of repeated finals
#: differ by up to 0.6 %.
MEASURED_LEAD = 0.01
#: So many times as long must PyTorch be expected to take before a kernel that nobody measured runs, by
#: fallback. Source: 4,019 products measured on an H200, each (n, k) left out of the fits: docs/tuning.md.
_EXPECTED_LEAD = {"torch": 1.1, "expected": 1.0}


@dataclass(frozen=True)
class Answer:
    """What a lookup found.

    Attributes:
        problem: What was asked.
        how: ``exact``, ``range``, ``bucket``, ``nearest``, ``default``, or ``given`` for a config that the
            caller chose.
        config: The config to run; None where torch is to compute the problem.
        entry: The table's entry behind it, if any; for a range, what it says of this problem.
        skipped: Why closer entries could not answer.
        within: The range that answers, if one does.
        because: Why torch computes it although there is a config, in words; empty otherwise.
        expected_us: Predicted microseconds of the config, where choosing it took a prediction.
    """

    problem: Problem
    how: str
    config: Config | None
    entry: Entry | None = None
    skipped: tuple[str, ...] = ()
    within: RangeEntry | None = None
    because: str = ""
    expected_us: float | None = None

    @property
    def known_key(self) -> str:
        """Where the artifact was when the entry was written; empty if it was made for another signature."""
        entry = self.entry
        same = entry is not None and entry.problem.signature == self.problem.signature
        return entry.artifact_key if entry is not None and same else ""

    def __str__(self) -> str:
        what = "torch" if self.config is None else str(self.config)
        reasons = [f"measured for {self.entry.problem}"] if self.entry and self.how != "exact" else []
        if self.within is not None:
            reasons = [f"tuned as {self.within.range}"]
        if self.because:
            reasons.append(self.because)
        if self.entry is not None and self.entry.objective != "time":
            reasons.append(f"tuned for {self.entry.objective}")
        if self.entry is not None and self.entry.contended_by:
            reasons.append("timed beside other work")
        because = f" ({', '.join(reasons)})" if reasons else ""
        return f"{self.problem}: {self.how}{because}: {what}"


def look_up(
    table: Table | None, problem: Problem, space: Space, sm_count: int, fallback: str = "none"
) -> Answer:
    """Return what ``table`` answers to ``problem`` on so many SMs, or else the default config.

    Args:
        table: The table, if there is one that holds.
        problem: What is to be computed.
        space: Where configs come from.
        sm_count: SMs of the GPU.
        fallback: Where PyTorch's own call answers, as
            :class:`~cutegen.runtime.dispatch.Dispatcher`.

    Raises:
        ProblemError: No config computes it.
    """
    answer = _kernel_for(table, problem, space, sm_count)
    wanted = fallback or (table.fallback if table is not None else "") or DEFAULT_FALLBACK
    family = find_family(problem.family)
    served = family.is_library_calls if wanted == "torch" else family.is_library_call
    if wanted == "none" or answer.config is None or not served(problem):
        return answer
    because = _measured_slower(answer)
    if because is None:
        tuned = answer.how in ("exact", "range")
        asked = wanted == "torch" or (wanted == "expected" and not tuned)
        because = _expected_slower(answer, family, space, sm_count, _EXPECTED_LEAD[wanted]) if asked else ""
    return replace(answer, config=None, because=because) if because else answer


def _measured_slower(answer: Answer) -> str | None:
    """Return in words that a measurement of this very answer prefers PyTorch, empty if not, None without."""
    entry = answer.entry
    ratio = entry.ratio_to_baseline if entry is not None and not entry.contended_by else None
    if entry is None or ratio is None or answer.how not in ("exact", "range"):
        return None
    what = entry.baseline or "torch.mm"
    return f"{what} was measured {1 / ratio:.2f} times as good" if ratio < 1 - MEASURED_LEAD else ""


def _expected_slower(answer: Answer, family: Family, space: Space, sm_count: int, lead: float) -> str:
    """Return in words that PyTorch is expected to take less than ``lead`` times as long; else nothing.

    More than ``lead`` is asked for where the family doubts what it expects.
    """
    problem = answer.problem
    torch_us = family.baseline_us(problem, space.arch, sm_count)
    own_us = None if torch_us is None else _predicted_us(answer, space, sm_count)
    if torch_us is None or own_us is None:
        return ""
    own_us += family.fused_us(problem) + family.hidden_us
    if torch_us >= own_us * lead * family.doubt(problem):
        return ""
    return f"expected {torch_us:.1f} us of torch, {own_us:.1f} us of the kernel"


def _predicted_us(answer: Answer, space: Space, sm_count: int) -> float | None:
    """Return what the config of an answer is predicted to take, if there is one and anybody predicts it."""
    if answer.expected_us is not None or answer.config is None:
        return answer.expected_us
    predict = predictor(space, answer.problem, sm_count)
    return None if predict is None else predict(answer.config)


def _kernel_for(table: Table | None, problem: Problem, space: Space, sm_count: int) -> Answer:
    """Return the answer without a look at what PyTorch would take."""
    skipped: tuple[str, ...] = ()
    answer: Answer | None = None
    if table is not None:
        predicted = estimate(space, problem, sm_count)
        found = table.lookup(problem, lambda config: require_legal(config, problem, space.arch), predicted)
        skipped = found.skipped
        answer = _of_entry(problem, found, space)
        if answer is not None and not _competes(answer, space):
            return answer
    config, expected_us = choose_default(space, problem, sm_count)
    default = Answer(problem, "default", config, skipped=skipped, expected_us=expected_us)
    if answer is None:
        return default
    if config == answer.config or not _is_faster(default, answer, space, sm_count):
        return answer
    because = [f"{answer.entry.problem}: the default is expected to be faster here"] if answer.entry else []
    return replace(default, skipped=(*skipped, *because))


def _competes(answer: Answer, space: Space) -> bool:
    """Whether the default may be better: a neighbour's winner answers, and predictions are fitted."""
    by_time = answer.entry is not None and answer.entry.objective == "time"
    fitted = find_family(answer.problem.family).is_fitted(answer.problem, space.arch)
    return fitted and by_time and answer.config is not None and answer.how in ("bucket", "nearest")


def _is_faster(answer: Answer, other: Answer, space: Space, sm_count: int) -> bool:
    """Whether the config of ``answer`` is predicted to be faster than that of another."""
    own, others = (_predicted_us(each, space, sm_count) for each in (answer, other))
    return own is not None and others is not None and own < others


def _of_entry(problem: Problem, found: Lookup, space: Space) -> Answer | None:
    """Return what an entry answers, or None if it has nothing for this problem."""
    entry = found.entry
    if entry is None:
        return None
    if entry.source == "torch" and find_family(problem.family).is_library_call(problem):
        return Answer(problem, found.how, None, entry, found.skipped, found.within)
    if entry.config is None or not is_legal(entry.config, problem, space.arch):
        return None
    return Answer(problem, found.how, entry.config, entry, found.skipped, found.within)


def estimate(space: Space, problem: Problem, sm_count: int) -> Callable[[Config], float] | None:
    """Return the model's estimate in microseconds for configs of ``problem``, None without a model."""
    predict = predictor(space, problem, sm_count)
    if predict is None:
        return None

    def microseconds(config: Config) -> float:
        found = predict(config)
        return math.inf if found is None else found

    return microseconds
