"""The GEMM's performance model, asked about the batched GEMM that has about the tiles of a grouped one.

It chooses from the space of that GEMM, or from that of gated products, whose rules take a GEMM's problem too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice

from cutegen.arch import Arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.borrowed import BorrowedStrategy, Fixed
from cutegen.families.gemm.perf_model.strategy import GemmStrategy, defaults_by_time
from cutegen.families.grouped_gemm.as_gemm import activation_of, as_gemm, uncut, whole
from cutegen.families.registry import find_space
from cutegen.space import Config, Space, Value

__all__ = ["GatedGroupedStrategy", "GroupedStrategy"]


class GroupedStrategy(BorrowedStrategy):
    """Chooses configs of grouped GEMMs by predicted time; of what the GEMM tries some cut k."""

    @classmethod
    def of(cls, arch: Arch) -> GroupedStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        gemm = GemmStrategy.of(arch)
        return None if gemm is None else cls(gemm, as_gemm)

    def asked_space(self, space: Space, problem: DeclaredProblem) -> Space:
        """Return the space of the GEMM, or of gated products."""
        return find_space("gated_gemm" if activation_of(problem) else "gemm", space.arch)

    def theirs(self, asked: Space, config: Mapping[str, Value]) -> Config:
        """Return a config with the knobs of a GEMM whose k is whole."""
        return Config({knob: value for knob, value in whole(config).items() if knob in asked.domains})

    def ours(self, space: Space, problem: DeclaredProblem, configs: Iterable[Config]) -> list[Config]:
        """Return configs that leave k whole and are valid, each once."""
        found = dict.fromkeys(uncut(config) for config in configs if config["split_k"] == 1)
        return [config for config in found if space.is_valid(problem, config)]

    def rank(
        self,
        space: Space,
        problem: DeclaredProblem,
        sm_count: int,
        limit: int,
        fixed: Fixed = None,
        *,
        default: Config | None = None,
    ) -> list[Config]:
        """Return the default, then what the GEMM tries first, up to ``limit`` with its default kernels."""
        first = default or space.default(problem)
        found = [first, *super().rank(space, problem, sm_count, limit, fixed, default=first)]
        known = {space.compile_view(config) for config in found}
        others = self._defaults(space, problem, sm_count)
        more = (config for config in others if space.compile_view(config) not in known)
        found = list(dict.fromkeys([*found, *islice(more, max(0, limit - len(known)))]))
        return [c for c in found if all(c[knob] in values for knob, values in (fixed or {}).items())]

    def default(self, space: Space, problem: DeclaredProblem, sm_count: int) -> Config:
        """Return the fastest predicted of the default candidates that leave k whole."""
        found = self._defaults(space, problem, sm_count)
        known = {space.compile_view(config) for config in found}
        safe = space.default(problem)
        complete = (safe.replace(**knobs) for knobs in space.default_candidates(problem))
        own = [c for c in complete if space.compile_view(c) not in known and space.is_valid(problem, c)]
        if not found or not own:
            return next(iter([*found, *own]), safe)
        first = [found[0], *own]  # those of the GEMM are in order
        predict = self.predictor(space, problem, sm_count, first)
        return min(first, key=lambda config: predict(config) or math.inf)

    def _defaults(self, space: Space, problem: DeclaredProblem, sm_count: int) -> list[Config]:
        """Return the GEMM's default candidates that are ours, the fastest predicted first."""
        by_time = defaults_by_time(self.asked_space(space, problem), as_gemm(problem), sm_count)
        return self.ours(space, problem, by_time)


class GatedGroupedStrategy(GroupedStrategy):
    """The same for gated products."""

    def tile(self, config: Config, size: str) -> int:
        """Return the extent of a tile of the output along m or n; along n half of it are gates."""
        return super().tile(config, size) // (2 if size == "n" else 1)
