"""What answers before anything was measured."""

from __future__ import annotations

from collections.abc import Sequence

from cutegen.errors import ProblemError
from cutegen.families.registry import find_family, spaces_beside
from cutegen.families.same_kind import problems_of_kind
from cutegen.family import Problem
from cutegen.search.short_list import short_choice
from cutegen.space import Config, Space
from cutegen.strategy import Default, OpenLibrary, Predictor, Strategy

__all__ = [
    "choose_default",
    "default_config",
    "default_of_algorithm",
    "default_set",
    "predictor",
    "prepare_defaults",
    "strategy_of",
]


#: Rules that look at no knob say whether an algorithm computes a problem at all.
_NOTHING = Config({})


def default_config(space: Space, problem: Problem, sm_count: int | None = None) -> Config:
    """Return the config of :func:`choose_default`, which has the arguments and errors."""
    return choose_default(space, problem, sm_count).config


def choose_default(space: Space, problem: Problem, sm_count: int | None = None) -> Default:
    """Return what answers ``problem`` without a table and without a measurement.

    The family's performance model chooses it, among those algorithms of the family that have default
    candidates for the problem; without a model it is what the family's short list names for such a problem,
    or the space's own default.

    Args:
        space: Where configs come from: that of the family's general algorithm stands for all of them.
        problem: What is to be computed.
        sm_count: SMs of the GPU; the architecture's main product's by default.

    Raises:
        ProblemError: No config computes the problem.
    """
    own = _default_of_algorithm(space, problem, sm_count)
    able = [other for other in spaces_beside(space) if other.is_valid(problem, _NOTHING)]
    others = [_by_model(other, problem, sm_count) for other in able]
    timed = [(other.time_us, other) for other in others if other is not None and other.time_us is not None]
    if not timed:
        return own
    time_us = own.time_us
    if time_us is None:
        predict = predictor(space, problem, sm_count)
        time_us = None if predict is None else predict(own.config)
        if time_us is None:
            return own
    least, other = min(timed, key=lambda each: each[0])
    return other if least < time_us else Default(own.config, time_us)


def default_of_algorithm(space: Space, problem: Problem, sm_count: int | None = None) -> Config:
    """Return the config for one algorithm, that of ``space``; raises as :func:`choose_default`."""
    return _default_of_algorithm(space, problem, sm_count).config


def _default_of_algorithm(space: Space, problem: Problem, sm_count: int | None) -> Default:
    found = _by_model(space, problem, sm_count)
    if found is not None:
        return found
    short = short_choice(space, problem) if strategy_of(space) is None else None
    return Default(short or space.default(problem))


def _by_model(space: Space, problem: Problem, sm_count: int | None) -> Default | None:
    """Return what a performance model chooses among default candidates, None without either."""
    strategy = strategy_of(space)
    known = sm_count or space.arch.nominal_sm_count
    return None if strategy is None else strategy.default(space, problem, known)


def prepare_defaults(space: Space, problem: Problem, sm_count: int, library: OpenLibrary) -> None:
    """Make ready what :func:`choose_default` needs for problems of the signature of ``problem``.

    It answers the same without, in several times the time.

    Args:
        space: Where configs come from: that of the family's general algorithm stands for all of them.
        problem: Any problem of that signature.
        sm_count: SMs of the GPU.
        library: Opens a C file of the package; None if it was not compiled.
    """
    for each in (space, *spaces_beside(space)):
        strategy = strategy_of(each)
        if strategy is not None:
            strategy.prepare(each, problem, sm_count, library)


def default_set(
    space: Space, problem: Problem, sm_count: int | None = None
) -> Sequence[tuple[Problem, Config]]:
    """Return every kernel that :func:`choose_default` may answer to problems of the signature of ``problem``.

    Without a model that knows them, these are the answers at sizes on a grid.

    Args:
        space: Where configs come from: that of the family's general algorithm stands for all of them.
        problem: Any problem of that signature.
        sm_count: SMs of the GPU; the architecture's main product's by default.

    Returns:
        Each kernel once: as a problem of that signature, and a config of it that is valid there. Empty if
        no config computes such problems.
    """
    strategy = strategy_of(space)
    if strategy is not None:
        found: list[tuple[Problem, Config]] = []
        for each in (space, *spaces_beside(space)):
            chooser = strategy_of(each)
            if chooser is not None:
                found += chooser.default_set(each, problem, sm_count or space.arch.nominal_sm_count)
        return tuple(found)
    grid: dict[Config, tuple[Problem, Config]] = {}
    for kin in problems_of_kind(problem):
        try:
            config = default_of_algorithm(space, kin)
        except ProblemError:
            continue
        grid.setdefault(space.compile_view(config), (kin, config))
    return tuple(grid.values())


def predictor(
    space: Space, problem: Problem, sm_count: int | None = None, configs: Sequence[Config] = ()
) -> Predictor | None:
    """Return what predicts microseconds of configs for ``problem``; None without a model of the target.

    Args:
        space: Where configs come from: that of the family's general algorithm stands for all of them.
        problem: What is to be computed.
        sm_count: SMs of the GPU; the architecture's main product's by default.
        configs: Many that will be asked about: predicting them together takes less time.
    """
    sms = sm_count or space.arch.nominal_sm_count
    strategy = strategy_of(space)
    if strategy is None:
        return None
    predictors = {space.algorithm: strategy.predictor(space, problem, sms, configs)}

    def predict(config: Config) -> float | None:
        if config.algorithm not in predictors:
            for other in spaces_beside(space):
                chooser = strategy_of(other)
                if chooser is not None:
                    predictors[other.algorithm] = chooser.predictor(other, problem, sms, configs)
        known = predictors.get(config.algorithm)
        return known(config) if known is not None else None

    return predict


def strategy_of(space: Space) -> Strategy | None:
    """Return the performance model of the algorithm that ``space`` is of; None where there is none.

    It says nothing of kernels that are not of cutegen's templates.
    """
    if space.source != "cutegen":
        return None
    return find_family(space.family).strategy(space.arch, space.algorithm)
