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
#: Kernels without tensor cores take less time than predicted for a single row, others of it more. Source:
#: weights of Llama-3 and 1x3656x3648 on an H200, 0.94 to 0.98 of what is predicted.
_ONE_ROW = 0.95
#: So do those of weights that take up to so many bytes, which launches in a row overlap best. Source: on an
#: H200 2x528x640, 3x640x768 and 4x624x1152 took 0.54 to 0.77 of what is predicted; 0.91 to 1 from 5.7 MB on.
_SMALL_BYTES, _SMALL = 2**22, 0.75


class GatedGemmStrategy(BorrowedStrategy):
    """Chooses configs by the time that a model of the GEMM predicts."""

    @classmethod
    def of(cls, arch: Arch, algorithm: str = "") -> GatedGemmStrategy | None:
        """Return the strategy of an algorithm on ``arch``; None where the model's constants are unknown."""
        gemm = GEMM.strategy(arch, algorithm)
        return None if gemm is None else cls(gemm, plain_gemm)

    def default(self, space: Space, problem: Any, sm_count: int) -> Default:
        """Return the fastest predicted of the default candidates, of which weights apart have fewer.

        The GEMM's model is corrected by what is known of gated GEMMs.
        """
        if not isinstance(self._gemm, GemmStrategy):
            found = super().default(space, problem, sm_count)
            if found.time_us is None:
                return found
            small = plain_gemm(problem).min_bytes <= _SMALL_BYTES
            factor = _SMALL if small else _ONE_ROW if problem.m == 1 else 1.0
            return found._replace(time_us=factor * found.time_us)
        by_time = defaults_by_time(space, plain_gemm(problem), sm_count)
        likely = [*islice((c for c in by_time if space.is_valid(problem, c)), _LOOKED_AT)]
        if not likely:
            return Default(space.default(problem))
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
