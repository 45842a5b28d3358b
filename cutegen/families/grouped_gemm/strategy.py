"""The GEMM's performance model, asked about the batched GEMM that has about the tiles of a grouped one.

It chooses from the space of that GEMM, or from that of gated products, whose rules take a GEMM's problem too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from cutegen.arch import Arch
from cutegen.families.declared import DeclaredProblem
from cutegen.families.gemm.perf_model.strategy import GemmStrategy, defaults_by_time
from cutegen.families.grouped_gemm.as_gemm import activation_of, as_gemm, uncut, whole
from cutegen.families.registry import find_space
from cutegen.family import Predictor
from cutegen.space import Config, Space, Value

__all__ = ["GroupedStrategy"]

_Fixed = Mapping[str, Sequence[Value]] | None


class GroupedStrategy:
    """Chooses configs of grouped GEMMs by predicted time."""

    def __init__(self, gemm: GemmStrategy) -> None:
        self._gemm = gemm
        self.tile = gemm.tile
        #: This one asks the space of the grouped GEMM alone.
        self.default_set = gemm.default_set

    @classmethod
    def of(cls, arch: Arch) -> GroupedStrategy | None:
        """Return the strategy for ``arch``; None where the model's constants are not known."""
        gemm = GemmStrategy.of(arch)
        return None if gemm is None else cls(gemm)

    def rank(
        self,
        space: Space,
        problem: DeclaredProblem,
        sm_count: int,
        limit: int,
        fixed: _Fixed = None,
        *,
        default: Config | None = None,
    ) -> list[Config]:
        """Return the default, then what the GEMM would try first, up to ``limit`` with its default kernels.

        Of what the GEMM tries some cut k.
        """
        gemm, gemm_space = as_gemm(problem), _gemm_space(space, problem)
        first = default or space.default(problem)
        whole_only, lead = _whole_only(gemm_space, fixed), _whole(gemm_space, first)
        found = self._gemm.rank(gemm_space, gemm, sm_count, limit, whole_only, default=lead)
        found = _own(space, problem, [first, *found])
        known = {space.compile_view(config) for config in found}
        others = (c for c in defaults_by_time(gemm_space, gemm, sm_count) if c["split_k"] == 1)
        more = (c for c in _own(space, problem, others) if space.compile_view(c) not in known)
        return [c for c in (*found, *islice(more, max(0, limit - len(known)))) if _keeps(c, fixed)]

    def likely(
        self,
        space: Space,
        problem: DeclaredProblem,
        sm_count: int,
        limit: int,
        fixed: _Fixed = None,
        *,
        everywhere: bool = False,
    ) -> list[Config]:
        """Return the GEMM's likely ones."""
        gemm_space = _gemm_space(space, problem)
        asked = gemm_space, as_gemm(problem), sm_count, limit, _whole_only(gemm_space, fixed)
        return _own(space, problem, self._gemm.likely(*asked, everywhere=everywhere))

    def refine(
        self,
        space: Space,
        problem: DeclaredProblem,
        results: Mapping[Config, float | None],
        limit: int,
        *,
        sm_count: int | None = None,
        fixed: _Fixed = None,
        new_kernels: bool = True,
    ) -> list[Config]:
        """Return untried configs that measured times make promising for the GEMM."""
        gemm_space = _gemm_space(space, problem)
        found = self._gemm.refine(
            gemm_space,
            as_gemm(problem),
            {_whole(gemm_space, config): time for config, time in results.items()},
            limit,
            sm_count=sm_count,
            fixed=_whole_only(gemm_space, fixed),
            new_kernels=new_kernels,
        )
        return [config for config in _own(space, problem, found) if config not in results]

    def precompute(self, space: Space, problem: DeclaredProblem, sm_count: int, fixed: _Fixed = None) -> None:
        """Work out in advance what the GEMM's predictions start from."""
        gemm_space = _gemm_space(space, problem)
        self._gemm.precompute(gemm_space, as_gemm(problem), sm_count, _whole_only(gemm_space, fixed))

    def default(self, space: Space, problem: DeclaredProblem, sm_count: int) -> Config:
        """Return the fastest predicted of the default candidates that leave k whole."""
        for config in defaults_by_time(_gemm_space(space, problem), as_gemm(problem), sm_count):
            own = uncut(config)
            if config["split_k"] == 1 and space.is_valid(problem, own):
                return own
        return space.default(problem)

    def predictor(
        self, space: Space, problem: DeclaredProblem, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return the GEMM's predictions."""
        gemm_space = _gemm_space(space, problem)
        asked = [_whole(gemm_space, config) for config in configs]
        predict = self._gemm.predictor(gemm_space, as_gemm(problem), sm_count, asked)
        return lambda config: predict(_whole(gemm_space, config))


def _gemm_space(space: Space, problem: DeclaredProblem) -> Space:
    return find_space("gated_gemm" if activation_of(problem) else "gemm", space.arch)


def _whole(gemm_space: Space, config: Mapping[str, Value]) -> Config:
    """Return a config as the space of the GEMM, or of gated products, has it."""
    return Config({knob: value for knob, value in whole(config).items() if knob in gemm_space.domains})


def _whole_only(gemm_space: Space, fixed: _Fixed) -> Mapping[str, Sequence[Value]]:
    return {**(fixed or {}), **{knob: (value,) for knob, value in _whole(gemm_space, {}).items()}}


def _keeps(config: Config, fixed: _Fixed) -> bool:
    return all(config[knob] in values for knob, values in (fixed or {}).items())


def _own(space: Space, problem: DeclaredProblem, configs: Iterable[Config]) -> list[Config]:
    """Return configs of a GEMM as those of the grouped one that are valid, each once."""
    own = dict.fromkeys(uncut(config) for config in configs)
    return [config for config in own if space.is_valid(problem, config)]
