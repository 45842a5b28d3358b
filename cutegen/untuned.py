"""What answers before anybody measured: the model's choice among a few kernels that a space names."""

from __future__ import annotations

from collections.abc import Callable

from cutegen.machine import is_modelled
from cutegen.model import Estimator
from cutegen.problem import Problem
from cutegen.ranker import Ranker
from cutegen.space import Config, Space

__all__ = ["default_config", "predictor"]


def default_config(space: Space, problem: Problem, sm_count: int | None = None) -> Config:
    """Return the config for ``problem`` that needs neither a table nor a measurement.

    It is the one that the model predicts to be fastest among the space's starters, which are few so that
    programs that never tune compile few kernels. Where the model knows nothing of the architecture, or no
    starter is legal, it is the space's own default.

    Args:
        space: Where configs come from.
        problem: What is to be computed.
        sm_count: Multiprocessors of the GPU; the architecture's main product's by default.

    Raises:
        ProblemError: No config computes the problem.
    """
    safe = space.default(problem)
    if not is_modelled(space.arch):
        return safe
    ranker = Ranker(space, problem, sm_count or space.arch.nominal_sm_count, None)
    starters = (safe.replace(**knobs) for knobs in space.starters(problem))
    found = [ranker.finish(config) for config in starters if not space.explain(problem, config)]
    return min(found, key=lambda candidate: candidate.time_us).config if found else safe


def predictor(
    space: Space, problem: Problem, sm_count: int | None = None
) -> Callable[[Config], float | None] | None:
    """Return what predicts microseconds of configs for ``problem``, None where no model knows the target.

    Args:
        space: Where our own configs come from; of those of another source the model knows nothing.
        problem: What is to be computed.
        sm_count: Multiprocessors of the GPU; the architecture's main product's by default.
    """
    if not is_modelled(space.arch):
        return None
    estimator = Estimator(problem, space.arch, sm_count or space.arch.nominal_sm_count)

    def predict(config: Config) -> float | None:
        if config.source != "cutegen":
            return None
        return estimator.estimate(config, space.derive(config, problem, space.arch)).time_us

    return predict
