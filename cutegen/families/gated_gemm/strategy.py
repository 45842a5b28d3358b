"""The GEMM's performance models, asked about gated GEMMs: they cost as a GEMM with twice the columns."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from cutegen.arch import Arch
from cutegen.families.gated_gemm.plain_gemm import plain_gemm
from cutegen.families.gemm.family import GEMM
from cutegen.families.gemm.perf_model.borrowed import BorrowedStrategy
from cutegen.families.gemm.perf_model.strategy import GemmStrategy, defaults_by_time
from cutegen.family import Default
from cutegen.space import Config, Space

__all__ = ["GatedGemmStrategy"]

#: So many default candidates are compared where there are many rows. There swapped tiles take longer than
#: those of a plain GEMM: 1.02, 1.03 and 1.05 times as long as the same tile unswapped, which by the GEMM's
#: fit takes as long. Source: 1024 and 4096 rows of Llama-3 on an H200 (docs/results/gated_gemm.json).
_LOOKED_AT, _MANY_ROWS, _SWAPPED = 6, 2048, 1.03


class GatedGemmStrategy(BorrowedStrategy):
    """Chooses configs by the time that a model of the GEMM predicts."""

    @classmethod
    def of(cls, arch: Arch, algorithm: str = "") -> GatedGemmStrategy | None:
        """Return the strategy of an algorithm on ``arch``; None where the model's constants are unknown."""
        gemm = GEMM.strategy(arch, algorithm)
        return None if gemm is None else cls(gemm, plain_gemm)

    def default(self, space: Space, problem: Any, sm_count: int) -> Default:
        """Return the fastest predicted of the default candidates, of which weights apart have fewer."""
        if not isinstance(self._gemm, GemmStrategy):
            return super().default(space, problem, sm_count)
        by_time = defaults_by_time(space, plain_gemm(problem), sm_count)
        found = [*islice((c for c in by_time if space.is_valid(problem, c)), _LOOKED_AT)]
        if problem.m < _MANY_ROWS or len(found) < 2:
            return Default(next(iter(found), None) or space.default(problem))
        predict = self.predictor(space, problem, sm_count, found)
        return Default(
            min(found, key=lambda c: (predict(c) or math.inf) * (_SWAPPED if c.flag("swap_ab") else 1.0))
        )

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along m or n; along n half of it are gates."""
        extent = self._gemm.tile(config, size)
        return max(1, extent // 2) if size == "n" else extent
