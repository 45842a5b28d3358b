"""What answers before anything was measured."""

from __future__ import annotations

from collections.abc import Sequence

from cutegen.errors import ProblemError
from cutegen.families.registry import find_family
from cutegen.families.same_kind import problems_of_kind
from cutegen.family import Predictor, Problem
from cutegen.space import Config, Space

__all__ = ["default_config", "default_set", "predictor"]


def default_config(space: Space, problem: Problem, sm_count: int | None = None) -> Config:
    """Return the config for ``problem`` that needs neither a table nor a measurement.

    The family's performance model chooses it; without a model it is the space's own default.

    Args:
        space: Where configs come from.
        problem: What is to be computed.
        sm_count: SMs of the GPU; the architecture's main product's by default.

    Raises:
        ProblemError: No config computes the problem.
    """
    strategy = find_family(problem.family).strategy(space.arch)
    if strategy is None:
        return space.default(problem)
    return strategy.default(space, problem, sm_count or space.arch.nominal_sm_count)


def default_set(
    space: Space, problem: Problem, sm_count: int | None = None
) -> Sequence[tuple[Problem, Config]]:
    """Return every kernel that :func:`default_config` may answer to problems of the signature of ``problem``.

    Without a model that knows them, these are the answers at sizes on a grid.

    Args:
        space: Where configs come from.
        problem: Any problem of that signature.
        sm_count: SMs of the GPU; the architecture's main product's by default.

    Returns:
        Each kernel once: as a problem of that signature, and a config of it that is valid there. Empty if
        no config computes such problems.
    """
    strategy = find_family(problem.family).strategy(space.arch)
    if strategy is not None:
        return strategy.default_set(space, problem, sm_count or space.arch.nominal_sm_count)
    found: dict[Config, tuple[Problem, Config]] = {}
    for kin in problems_of_kind(problem):
        try:
            config = space.default(kin)
        except ProblemError:
            continue
        found.setdefault(space.compile_view(config), (kin, config))
    return tuple(found.values())


def predictor(space: Space, problem: Problem, sm_count: int | None = None) -> Predictor | None:
    """Return what predicts microseconds of configs for ``problem``; None without a model of the target.

    Args:
        space: Where configs come from.
        problem: What is to be computed.
        sm_count: SMs of the GPU; the architecture's main product's by default.
    """
    strategy = find_family(problem.family).strategy(space.arch)
    if strategy is None:
        return None
    return strategy.predictor(space, problem, sm_count or space.arch.nominal_sm_count)
