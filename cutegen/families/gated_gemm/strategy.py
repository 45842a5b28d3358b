"""The GEMM's performance models, asked about gated GEMMs: they cost as a GEMM with twice the columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.gated_fit import load_gated_fit
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.perf_model.borrowed import BorrowedStrategy
from cutegen.families.gemm.perf_model.fitted import is_fitted
from cutegen.families.gemm.perf_model.strategy import GemmStrategy, defaults_by_time
from cutegen.space import Config, Space
from cutegen.strategy import Default

__all__ = ["GatedGemmStrategy"]

#: So many default candidates are compared.
_LOOKED_AT = 12


class GatedGemmStrategy(BorrowedStrategy):
    """Chooses configs by the time that a model of the GEMM predicts."""

    @classmethod
    def of(cls, arch: Arch, algorithm: str = "") -> GatedGemmStrategy | None:
        """Return the strategy of an algorithm on ``arch``; None where the model's constants are unknown."""
        gemm = GEMM.strategy(arch, algorithm)
        return None if gemm is None else cls(gemm, plain_gemm)

    def default(self, space: Space, problem: Any, sm_count: int) -> Default | None:
        """Return the fastest predicted of the default candidates, of which weights apart have fewer.

        The GEMM's model is corrected by what is known of gated GEMMs.
        """
        if not isinstance(self._gemm, GemmStrategy):
            return super().default(space, problem, sm_count)
        by_time = defaults_by_time(space, plain_gemm(problem), sm_count)
        likely = [*islice((c for c in by_time if space.is_valid(problem, c)), _LOOKED_AT)]
        if not likely:
            return None
        predict = self.predictor(space, problem, sm_count, likely)
        slower = self._beside_plain(space, problem, sm_count, likely)
        times = [
            (predict(config) or math.inf) * factor for config, factor in zip(likely, slower, strict=True)
        ]
        return Default(likely[times.index(min(times))])

    def _beside_plain(
        self, space: Space, problem: Any, sm_count: int, configs: Sequence[Config]
    ) -> Sequence[float]:
        """Return how much longer each kernel takes than the GEMM's model says; 1 where nothing is fitted."""
        gemm = plain_gemm(problem)
        if is_fitted(gemm, space.arch):
            return load_gated_fit().slower(gemm, configs, space.arch, sm_count)
        return [1.0] * len(configs)

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along m or n; along n half of it are gates."""
        extent = self._gemm.tile(config, size)
        return max(1, extent // 2) if size == "n" else extent
