"""``cutegen.autotune``: a model's problems recorded, tuned where nothing is known, and used, in one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutegen.build.budget import require_budget
from cutegen.errors import ProblemError, UsageError
from cutegen.family import Problem
from cutegen.measure.context import OVERLAPPING
from cutegen.measure.operand_sets import COPY
from cutegen.records.paths import default_table_path
from cutegen.runtime.answer_lookup import Answer
from cutegen.runtime.dispatch import Dispatcher, autotune_disabled
from cutegen.torch_ops import gemm as gemm_operators
from cutegen.torch_ops.model_run import record_run
from cutegen.torch_ops.recording import Recording
from cutegen.torch_ops.settings import load_table
from cutegen.tuning.autotuner import AutoTuner
from cutegen.tuning.coverage import Weight, answer_of, at_rows, is_tuned, weigh
from cutegen.tuning.result import TuneResult
from cutegen.tuning.sweep import Failed

if TYPE_CHECKING:
    import torch

__all__ = ["Autotuned", "Gain", "autotune", "tuner_of"]

#: Rows, or predicted microseconds of a call, up to which what runs before a kernel in an optimized model is
#: taken for one of cutegen's that overlaps. Source: a Llama-8B on an H200 with the same winners, overlapping
#: or not (docs/results/model.json): decoding 1, 8 and 64 texts takes 1.2, 2.1 and 1.0 % less time with
#: overlap, 2048 tokens as long, and 8192 tokens 1.3 % more. The limits between are judgement.
_FEW_ROWS, _SHORT_US = 256, 10.0


@dataclass(frozen=True)
class Gain:
    """The times of one problem of a model, tuned and untuned.

    Attributes:
        problem: What is computed.
        calls: How often in one run.
        how: The rule of lookup that answers it now; empty if no kernel computes it.
        tuned_us: Measured microseconds of a call as it is answered now; None if the table does not tell.
        default_us: Those of the default config.
        baseline_us: Those of the baseline, such as ``torch.mm``; None if no library call computes it.
    """

    problem: Problem
    calls: int
    how: str
    tuned_us: float | None = None
    default_us: float | None = None
    baseline_us: float | None = None


@dataclass(frozen=True)
class Autotuned:
    """The result of :func:`autotune`, and what it saves; ``str`` of it is a few lines to print.

    Attributes:
        gains: Each problem, the one of most predicted time first.
        tuned: Problems that were tuned by this call.
        failed: Problems without a winner, with reasons.
        recording: What the run of the model recorded.
        table: The dispatch table that the operators ask from now on.
        seconds: Wall-clock time.
    """

    gains: tuple[Gain, ...]
    tuned: tuple[Problem, ...]
    failed: Mapping[Problem, str]
    recording: Recording
    table: Path
    seconds: float

    @property
    def tuned_us(self) -> float:
        """Microseconds of all calls as they are answered now, of problems whose times are known."""
        return sum(gain.calls * (gain.tuned_us or 0.0) for gain in self._timed)

    @property
    def saved_us(self) -> float:
        """Microseconds that these calls take less than with default configs."""
        return sum(gain.calls * (gain.default_us or 0.0) for gain in self._timed) - self.tuned_us

    @property
    def ratio_to_default(self) -> float | None:
        """Time of these calls with default configs over that now; None if nothing was measured."""
        return (self.tuned_us + self.saved_us) / self.tuned_us if self.tuned_us else None

    @property
    def ratio_to_baseline(self) -> float | None:
        """Time of these calls by a library over that now, where one computes them; None if nowhere."""
        known = [gain for gain in self._timed if gain.baseline_us is not None]
        own = sum(gain.calls * (gain.tuned_us or 0.0) for gain in known)
        return sum(gain.calls * (gain.baseline_us or 0.0) for gain in known) / own if own else None

    @property
    def _timed(self) -> list[Gain]:
        return [gain for gain in self.gains if gain.tuned_us is not None and gain.default_us is not None]

    def __str__(self) -> str:
        calls = sum(gain.calls for gain in self.gains)
        lines = [
            f"{len(self.gains)} problems in {calls} calls; {len(self.tuned)} tuned in {self.seconds:.1f} s"
        ]
        lines += [f"without a winner: {problem}: {reason}" for problem, reason in self.failed.items()]
        if self.ratio_to_default is not None:
            known, ratio = len(self._timed), self.ratio_to_baseline
            count = sum(gain.baseline_us is not None for gain in self._timed)
            against = (
                "" if ratio is None else f", {ratio:.3f} times as fast as library calls for {count} of them"
            )
            lines.append(
                f"{self.tuned_us:.0f} us a run, {self.saved_us:.0f} us less than by defaults "
                f"({known} problems with known times: {self.ratio_to_default:.3f} times as fast{against})"
            )
        if not self.gains:
            lines += ["the model called no kernel of cutegen:", self.recording.report()]
        return "\n".join([*lines, f"table: {self.table}"])


def autotune(
    model: torch.nn.Module,
    *inputs: Any,
    training: bool = False,
    budget_s: float | None = None,
    m: int | Iterable[int] | None = None,
    tuner: AutoTuner | None = None,
    say: Callable[[str], None] = print,
) -> Autotuned:
    """Run ``model`` once, tune the problems that it poses, and make the operators use the answers.

    The run is recorded as by :func:`cutegen.record`, with the layers swapped as by
    :func:`cutegen.optimize`; afterwards they are what they were. Problems that the table answers exactly, or
    by a range, are not tuned again: a second call takes seconds. An interrupted call is continued by the
    same call.

    Args:
        model: On the GPU.
        *inputs: What it is called with.
        training: Also record and tune the backward pass, of the sum of all outputs.
        budget_s: Seconds of tuning, for all problems together; more of them for those of more time.
        m: Further numbers of rows to tune for, beside that of ``inputs``.
        tuner: What tunes and into which table; by default an :class:`AutoTuner` of effort ``quick``, into the
            table that the operators ask. For inference it chooses kernels of few rows or a few microseconds
            in the launch context ``overlapping``, unless a compiler calls the model: most of their
            neighbours are kernels of cutegen then. All others, and those of a tuner that is given, are
            chosen in the tuner's own context.
        say: Gets a line with the result of each tuning, and the summary at the end.

    Raises:
        UsageError: The tuner measures nothing, a number of rows or ``budget_s`` is not positive, cutegen is
            frozen, or the operators ask a table that is in no file and no tuner names one.
        CutegenError: As :meth:`AutoTuner.tune`, but for a problem without a winner.
    """
    begun = time.monotonic()
    require_budget(budget_s)
    rows = [m] if isinstance(m, int) else list(m or ())
    if any(count < 1 for count in rows):
        raise UsageError(f"m={rows} must be positive numbers of rows")
    gemm_operators.prepare()
    dispatcher = gemm_operators.default_dispatcher()
    if dispatcher.kernels.on_miss:
        raise UsageError(
            "cutegen is frozen, so new answers would be misses; call cutegen.configure(build=...)"
        )
    overlaps = tuner is None and not training and not _has_compiled_parts(model)
    tuner = tuner or tuner_of(dispatcher)
    table = tuner.setting.table
    if table is None:
        raise UsageError(
            f"a tuner for {tuner.setting.arch} without a GPU measures nothing; leave out its arch"
        )
    recording = record_run(model, inputs, training=training)
    setting = tuner.setting
    weights = weigh(at_rows(recording.calls, rows), setting.arch, setting.sm_count)
    contexts = {w.problem: OVERLAPPING for w in weights if overlaps and _is_short(w)}
    tuned, failed = _tune_missing(tuner, weights, contexts, budget_s, say)
    if table.exists():
        dispatcher = load_table(table)
    gains = tuple(_gain(weight, _answer(dispatcher, weight.problem)) for weight in weights)
    found = Autotuned(gains, tuned, failed, recording, table, time.monotonic() - begun)
    say(str(found))
    return found


def tuner_of(dispatcher: Dispatcher) -> AutoTuner:
    """Return a quick tuner for the GPU and the table that ``dispatcher`` asks.

    Raises:
        UsageError: That table is in no file.
    """
    device, root = dispatcher.device(), dispatcher.kernels.store.root
    path = dispatcher.table_path
    if path is None and dispatcher.has_given_table:
        raise UsageError("the operators ask a table that is in no file; give a tuner with a table")
    # The cache's own table is not named, so that one for other software is set aside and not refused.
    named = None if path is None or path == default_table_path(root, device) else path
    return AutoTuner(device=device, cache_dir=root, table=named, effort="quick")


def _has_compiled_parts(model: Any) -> bool:
    """Return whether a compiler calls some part of ``model``, which then keeps what is around our kernels."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _is_short(weight: Weight) -> bool:
    return weight.problem.sizes.get("m", _FEW_ROWS + 1) <= _FEW_ROWS or weight.call_us <= _SHORT_US


def _tune_missing(
    tuner: AutoTuner,
    weights: Sequence[Weight],
    contexts: Mapping[Problem, str],
    budget_s: float | None,
    say: Callable[[str], None],
) -> tuple[tuple[Problem, ...], dict[Problem, str]]:
    """Tune what the tuner's table does not know; return what was tuned, and what has no winner and why.

    Args:
        tuner: What tunes.
        weights: All problems.
        contexts: Launch contexts of some; the others have the tuner's.
        budget_s: Seconds.
        say: Gets a line for each problem.
    """
    setting, table = tuner.setting, tuner.setting.load_table()
    stakes = {weight.problem: weight.us for weight in weights}
    missing = [p for p in stakes if not is_tuned(answer_of(table, p, setting.arch, setting.sm_count))]
    failed: dict[Problem, str] = {}
    tuned: list[Problem] = []
    if autotune_disabled() or not missing:
        return (), failed
    results = tuner.tune_all(
        missing,
        budget_s=budget_s,
        stakes=[stakes[problem] for problem in missing],
        contexts=[contexts.get(problem, tuner.context) for problem in missing],
    )
    for at, result in enumerate(results, 1):
        if isinstance(result, Failed):
            failed[result.problem] = str(result.error)
        else:
            tuned.append(result.problem)
        say(f"[{at}/{len(missing)}] {_said(result)}")
    return tuple(tuned), failed


def _answer(dispatcher: Dispatcher, problem: Problem) -> Answer | None:
    try:
        return dispatcher.explain(problem)
    except ProblemError:
        return None


def _said(result: TuneResult | Failed) -> str:
    if isinstance(result, Failed):
        return f"{result.problem}: no winner: {result.error}"
    time_us = "" if result.time_us is None else f" {result.time_us:.2f} us,"
    gain = result.ratio_to_default
    ratio = "" if gain is None else f" {gain.mid:.3f} times as fast as the default,"
    return f"{result.problem}:{time_us}{ratio} {result.seconds:.1f} s"


def _gain(weight: Weight, answer: Answer | None) -> Gain:
    how = "" if answer is None else answer.how
    entry = answer.entry if answer is not None and is_tuned(answer) else None
    if answer is None or entry is None or entry.time_us is None or entry.objective != "time":
        return Gain(weight.problem, weight.calls, how)
    own, to_default, to_baseline = entry.time_us, entry.ratio_to_default, entry.ratio_to_baseline
    default = None if to_default is None else own * to_default
    # A copy of as many bytes is a bound: it computes nothing.
    baseline = None if to_baseline is None or entry.baseline == COPY else own * to_baseline
    if answer.config is None and baseline is not None:  # torch answers
        own = baseline
    return Gain(weight.problem, weight.calls, how, own, default, baseline)
