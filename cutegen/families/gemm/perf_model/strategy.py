"""The performance model as a search strategy: what to try first, what next, and what without measuring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cutegen.arch import Arch
from cutegen.families.gemm.perf_model import proposals
from cutegen.families.gemm.perf_model.estimator import Estimator
from cutegen.families.gemm.perf_model.gpu_params import is_modelled
from cutegen.families.gemm.perf_model.ranking import Ranker
from cutegen.families.gemm.problem import Problem
from cutegen.families.same_kind import problems_of_kind
from cutegen.family import Predictor
from cutegen.space import Config, Space

__all__ = ["GemmStrategy"]


class GemmStrategy:
    """Chooses GEMM configs by predicted time."""

    @classmethod
    def of(cls, arch: Arch) -> GemmStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        return cls() if is_modelled(arch) else None

    rank = staticmethod(proposals.rank)
    refine = staticmethod(proposals.refine)
    precompute = staticmethod(proposals.precompute)

    def default(self, space: Space, problem: Problem, sm_count: int) -> Config:
        """Return the fastest predicted of the space's default candidates.

        They are few, so that programs that never tune compile few kernels.
        """
        safe = space.default(problem)
        ranker = Ranker(space, problem, sm_count, None)
        candidates = _default_candidates(space, problem, safe)
        found = [ranker.finish(config) for config in candidates if not space.explain(problem, config)]
        return min(found, key=lambda candidate: candidate.time_us).config if found else safe

    def default_set(self, space: Space, problem: Problem, sm_count: int) -> Sequence[tuple[Problem, Config]]:
        """Return the space's default candidates, and its own default where none of them is valid."""
        found: dict[Config, tuple[Problem, Config]] = {}
        for kin in problems_of_kind(problem, 1500):
            if space.explain(kin, {}):
                continue
            safe = space.default(kin)
            valid = [c for c in _default_candidates(space, kin, safe) if not space.explain(kin, c)]
            for config in valid or [safe]:
                found.setdefault(space.compile_view(config), (kin, config))
        return tuple(found.values())

    def predictor(self, space: Space, problem: Problem, sm_count: int) -> Predictor:
        """Return the model's time of a config; None for kernels that are not of cutegen's templates."""
        estimator = Estimator(problem, space.arch, sm_count)

        def predict(config: Config) -> float | None:
            if config.source != "cutegen":
                return None
            return estimator.estimate(config, space.derive(config, problem, space.arch)).time_us

        return predict


def _default_candidates(space: Space, problem: Problem, safe: Config) -> Iterator[Config]:
    return (safe.replace(**knobs) for knobs in space.default_candidates(problem))
