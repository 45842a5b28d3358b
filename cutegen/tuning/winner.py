"""The result and the table entry of finalists, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cutegen.errors import StoreError
from cutegen.families.registry import space_of
from cutegen.measure.device import Device
from cutegen.measure.statistics import Interval
from cutegen.measure.timing import Timing, against, cost_ratio
from cutegen.records.entry import Entry
from cutegen.records.trial import Trial
from cutegen.search.defaults import default_config
from cutegen.space import Config, Space
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.finalists import choose_winner, pick_finalists
from cutegen.tuning.history import resources_of
from cutegen.tuning.request import Request
from cutegen.tuning.result import Row, TuneResult

__all__ = ["decide", "entry_of", "predicted_result", "recorded_result"]

#: Microseconds, None for a kernel that the model does not know.
Predict = Callable[[Config], "float | None"]


def decide(
    request: Request,
    space: Space,
    device: Device,
    finalists: Sequence[Attempt],
    torch: Timing | None,
    *,
    default: Config,
    incumbent: Config | None,
) -> TuneResult:
    """Return the result that follows from the timings of ``finalists``."""
    timings = {a.config: a.final for a in finalists if a.final is not None}
    objective = request.objective
    choice = choose_winner(
        space,
        timings,
        default=default,
        incumbent=incumbent,
        objective=objective,
        context=request.context,
        torch=torch,
    )
    rows = [_row(a, default, choice.config, choice.equals) for a in finalists]
    ratio = _ratio(timings.get(default), timings[choice.config], objective)
    found = _measured(request, device, rows, torch, ratio)
    return replace(found, baseline_wins=choice.baseline_wins and request.allow_torch)


def _measured(
    request: Request, device: Device, rows: Sequence[Row], torch: Timing | None, ratio: Interval | None
) -> TuneResult:
    """Return the result of rows that were measured on a GPU, the fastest baseline beside them."""
    return TuneResult(
        problem=request.problem,
        arch=request.arch.name,
        device=device.name,
        objective=request.objective,
        context=request.context,
        rows=_winner_first(rows, request.objective),
        torch=torch,
        ratio_to_default=ratio,
    )


def _row(attempt: Attempt, default: Config, chosen: Config, equals: Sequence[Config]) -> Row:
    return Row(
        config=attempt.config,
        default=attempt.config == default,
        chosen=attempt.config == chosen,
        equal=attempt.config in equals,
        timing=attempt.final,
        resources=attempt.resources,
        workspace_bytes=attempt.launch.workspace_bytes,
        artifact_key=attempt.artifact_key,
        trial=attempt.final_trial,
    )


def _winner_first(rows: Sequence[Row], objective: str) -> tuple[Row, ...]:
    def cost(row: Row) -> float:
        found = None if row.timing is None or objective == "time" else row.timing.cost(objective)
        return (row.time_us or row.predicted_us or 0.0) if found is None else found.mid

    def unknown(row: Row) -> bool:
        return row.timing is not None and row.timing.cost(objective) is None

    return tuple(sorted(rows, key=lambda r: (not r.chosen, unknown(r), cost(r), r.config.digest)))


def _ratio(default: Timing | None, winner: Timing, objective: str) -> Interval | None:
    if default is None:
        return None
    return Interval(1.0, 1.0, 1.0) if default is winner else cost_ratio(default, winner, objective)


def entry_of(result: TuneResult, baseline_trial: str) -> Entry:
    """Return the table entry of a measured ``result``.

    Raises:
        StoreError: Nothing was measured.
    """
    winner = result.winner
    timing = result.torch if result.baseline_wins else winner.timing
    if timing is None:
        raise StoreError(f"nothing was measured for {result.problem}, so the table cannot name a winner")
    default = next((row.trial for row in result.rows if row.default), "")
    ratio = against(result.torch, timing, result.objective)
    trials = dict.fromkeys(name for name in (winner.trial, default, baseline_trial) if name)
    return Entry(
        problem=result.problem,
        config=winner.config,
        source="torch" if result.baseline_wins else winner.config.source,
        artifact_key=winner.artifact_key,
        time_us=timing.median_us,
        interval=(timing.low_us, timing.high_us),
        ratio_to_baseline=ratio.mid if ratio else None,
        ratio_to_default=result.ratio_to_default.mid if result.ratio_to_default else None,
        trial_ids=tuple(trials),
        objective=result.objective,
        context=result.context,
        energy_mj=timing.energy_mj,
        baseline=result.baseline,
        contended_by=timing.contended_by,
    )


def recorded_result(
    request: Request, space: Space, device: Device, entry: Entry, finals: Sequence[Trial]
) -> TuneResult | None:
    """Return the result of a finished run from its records, None if they do not hold all of it."""
    if not _has_all(request, entry, finals):
        return None
    if request.at_once:
        finals = _last_set(finals)
    default = default_config(space, request.problem, request.sm_count)
    latest = _worth_showing(request, {t.config: t for t in finals if t.config is not None}, default, entry)
    timings = {config: trial.timing for config, trial in latest.items() if trial.timing is not None}
    if entry.config not in timings or not all(_is_complete(config, space) for config in latest):
        return None
    torch = next((t.timing for t in reversed(finals) if t.origin == "torch"), None)
    objective = request.objective
    choice = choose_winner(
        space,
        timings,
        default=default,
        incumbent=entry.config,
        objective=objective,
        context=request.context,
        torch=torch,
    )
    rows = [_recorded_row(request, trial, default, entry.config, choice.equals) for trial in latest.values()]
    ratio = _ratio(timings.get(default), timings[entry.config], objective)
    found = _measured(request, device, rows, torch, ratio)
    return replace(found, baseline_wins=entry.source == "torch", reused=True, run=finals[-1].run)


def _has_all(request: Request, entry: Entry, finals: Sequence[Trial]) -> bool:
    """Whether an entry is of the objective and context that are asked for, and its trials are recorded."""
    asked = entry.objective == request.objective and entry.context == request.context
    return asked and bool(entry.trial_ids) and {*entry.trial_ids} <= {trial.id for trial in finals}


def _is_complete(config: Config, space: Space) -> bool:
    """Whether a recorded config has the knobs that its space has today."""
    return config.keys() == space_of(config, space.family, space.arch).domains.keys()


def _recorded_row(
    request: Request, trial: Trial, default: Config, chosen: Config, equals: Sequence[Config]
) -> Row:
    assert trial.config is not None
    space = space_of(trial.config, request.problem.family, request.arch)
    # The database sorts knobs by name; they are shown in the order of the space.
    config = Config({knob: trial.config[knob] for knob in space.domains})
    return Row(
        config=config,
        default=config == default,
        chosen=config == chosen,
        equal=config in equals,
        timing=trial.timing,
        resources=resources_of(trial),
        workspace_bytes=space.launch(config, request.problem, request.sm_count).workspace_bytes,
        artifact_key=trial.artifact_key,
        trial=trial.id,
    )


def _last_set(finals: Sequence[Trial]) -> Sequence[Trial]:
    """Return the trials of the last set of rounds; the baseline's is written at the end of each."""
    ends = [at for at, trial in enumerate(finals) if trial.origin == "torch"]
    return finals[(ends[-2] + 1 if len(ends) > 1 else 0) : ends[-1] + 1] if ends else finals


def _worth_showing(
    request: Request, finals: Mapping[Config, Trial], default: Config, entry: Entry
) -> Mapping[Config, Trial]:
    """Leave out the slower candidates where one set of rounds timed all of them."""
    if not request.at_once:
        return finals
    times = {config: trial.timing.paired.mid for config, trial in finals.items() if trial.timing}
    shown = pick_finalists(
        times,
        *request.finalists,
        [default],
        kernel_of=lambda config: finals[config].artifact_key,
        alike=request.effort.alike,
    )
    return {config: trial for config, trial in finals.items() if config in (*shown, entry.config)}


def predicted_result(
    request: Request, attempts: Sequence[Attempt], default: Config, predict: Predict | None
) -> TuneResult:
    """Return the ranking by the model of candidates that were only compiled; without one, as they come."""
    best_first = list(attempts)
    if predict is not None:
        times = {a.config: predict(a.config) for a in best_first}
        best_first.sort(key=lambda a: (times[a.config] is None, times[a.config] or 0.0, a.config.digest))
    rows = [
        Row(
            config=attempt.config,
            default=attempt.config == default,
            chosen=at == 0,
            predicted_us=None if predict is None else predict(attempt.config),
            resources=attempt.resources,
            workspace_bytes=attempt.launch.workspace_bytes,
            artifact_key=attempt.artifact_key,
            trial=attempt.trial,
        )
        for at, attempt in enumerate(best_first)
    ]
    return TuneResult(problem=request.problem, arch=request.arch.name, device="", rows=tuple(rows))
