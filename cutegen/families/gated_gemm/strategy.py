"""The GEMM's performance models, asked about gated products: they cost as a GEMM with twice the columns."""

from __future__ import annotations

from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.as_gemm import as_gemm
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.perf_model.borrowed import BorrowedStrategy
from cutegen.families.gemm.perf_model.strategy import GemmStrategy, defaults_by_time
from cutegen.space import Config, Space

__all__ = ["GatedGemmStrategy"]


class GatedGemmStrategy(BorrowedStrategy):
    """Chooses configs by the time that a model of the GEMM predicts."""

    @classmethod
    def of(cls, arch: Arch, algorithm: str = "") -> GatedGemmStrategy | None:
        """Return the strategy of an algorithm on ``arch``; None where the model's constants are unknown."""
        gemm = GEMM.strategy(arch, algorithm)
        return None if gemm is None else cls(gemm, as_gemm)

    def default(self, space: Space, problem: Any, sm_count: int) -> Config:
        """Return the fastest predicted of the default candidates, of which weights apart have fewer."""
        if isinstance(self._gemm, GemmStrategy):
            by_time = defaults_by_time(space, as_gemm(problem), sm_count)
            fits = (config for config in by_time if space.is_valid(problem, config))
            return next(fits, None) or space.default(problem)
        return super().default(space, problem, sm_count)

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along m or n; along n half of it are gates."""
        extent = self._gemm.tile(config, size)
        return max(1, extent // 2) if size == "n" else extent
