"""What answers before anybody measured."""

from __future__ import annotations

from cutegen.families.registry import find_family
from cutegen.family import Predictor, Problem
from cutegen.space import Config, Space

__all__ = ["default_config", "predictor"]


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
