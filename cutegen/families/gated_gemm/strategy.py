"""The GEMM's performance models, asked about gated products: they cost as a GEMM with twice the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.as_gemm import as_gemm
from cutegen.families.gemm.family import GEMM
from cutegen.family import Predictor, Strategy
from cutegen.space import Config, Space, Value

__all__ = ["GatedGemmStrategy"]


class GatedGemmStrategy:
    """Chooses configs by the time that a model of the GEMM predicts; arguments as its methods have them."""

    def __init__(self, gemm: Strategy) -> None:
        self._gemm = gemm

    @classmethod
    def of(cls, arch: Arch, algorithm: str = "") -> GatedGemmStrategy | None:
        """Return the strategy for an algorithm on ``arch``; None where the model's constants are not known."""
        gemm = GEMM.strategy(arch, algorithm)
        return None if gemm is None else cls(gemm)

    def rank(
        self,
        space: Space,
        problem: Any,
        sm_count: int,
        limit: int,
        fixed: Mapping[str, Sequence[Value]] | None = None,
        *,
        default: Config | None = None,
    ) -> list[Config]:
        """Return the default, then the best by prediction."""
        return self._gemm.rank(space, as_gemm(problem), sm_count, limit, fixed, default=default)

    def likely(
        self,
        space: Space,
        problem: Any,
        sm_count: int,
        limit: int,
        fixed: Mapping[str, Sequence[Value]] | None = None,
        *,
        everywhere: bool = False,
    ) -> list[Config]:
        """Return the best by the fit to measured products."""
        return self._gemm.likely(space, as_gemm(problem), sm_count, limit, fixed, everywhere=everywhere)

    def refine(
        self,
        space: Space,
        problem: Any,
        results: Mapping[Config, float | None],
        limit: int,
        *,
        sm_count: int | None = None,
        fixed: Mapping[str, Sequence[Value]] | None = None,
        new_kernels: bool = True,
    ) -> list[Config]:
        """Return untried configs that the measured microseconds make promising."""
        return self._gemm.refine(
            space, as_gemm(problem), results, limit, sm_count=sm_count, fixed=fixed, new_kernels=new_kernels
        )

    def precompute(
        self, space: Space, problem: Any, sm_count: int, fixed: Mapping[str, Sequence[Value]] | None = None
    ) -> None:
        """Work out in advance what the other methods look up."""
        self._gemm.precompute(space, as_gemm(problem), sm_count, fixed)

    def default(self, space: Space, problem: Any, sm_count: int) -> Config:
        """Return the fastest predicted of the space's default candidates."""
        return self._gemm.default(space, as_gemm(problem), sm_count)

    def default_set(self, space: Space, problem: Any, sm_count: int) -> Sequence[tuple[Any, Config]]:
        """Return every kernel that :meth:`default` may answer with."""
        return self._gemm.default_set(space, problem, sm_count)

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along m or n; along n half of it are gates."""
        extent = self._gemm.tile(config, size)
        return max(1, extent // 2) if size == "n" else extent

    def predictor(
        self, space: Space, problem: Any, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return the model's time of a config."""
        return self._gemm.predictor(space, as_gemm(problem), sm_count, configs)
