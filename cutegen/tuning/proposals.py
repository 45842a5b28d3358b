"""Which configs to try for one problem: before anything is measured, and after some were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cutegen.families.registry import find_family, find_space, is_legal, spaces_beside
from cutegen.measure.context import BACK_TO_BACK, OVERLAPPING
from cutegen.search.defaults import default_config, default_of_algorithm
from cutegen.search.strategies import likely, rank, refine, spread
from cutegen.search.twins import WITH, WITHOUT, all_overlapped, with_twins
from cutegen.space import Config, Space, Value
from cutegen.tuning.request import Request

__all__ = ["Proposals"]

#: Each further algorithm of the family gets this fraction of the candidates that the general one gets.
_FURTHER_SHARE = 4
#: An algorithm whose fastest config is behind the fastest of all by more than this factor is not refined.
_HOPELESS = 1.25
#: Configs that the search proposes for a kernel, at most: its run-time arguments.
_PER_KERNEL = 4


class Proposals:
    """What the search proposes for a request, of all algorithms and sources.

    Args:
        request: What is asked for.
        offers: Configs of another source, of which as many are tried as of our own.
        incumbent: The config that the table names now; it competes if it is valid.

    Attributes:
        space: Of the general algorithm.
        default: What an untuned call runs.
        incumbent: As given, if it is valid; else None.
    """

    def __init__(self, request: Request, offers: Sequence[Config], incumbent: Config | None) -> None:
        problem = request.problem
        legal = incumbent is not None and is_legal(incumbent, problem, request.arch)
        self.incumbent = incumbent if legal else None
        self.space = find_space(problem.family, request.arch)
        self.default = default_config(self.space, problem, request.sm_count)
        self._request = request
        self._offers = offers
        self._further = [space for space in spaces_beside(self.space) if self._competes(space)]

    def likely(self) -> list[Config]:
        """Return candidates that the search is sure to propose; the whole search takes about a second."""
        request, space = self._request, self.space
        if request.explicit or "cutegen" not in request.sources:
            return []
        found = likely(space, request.problem, request.sm_count, self._most, request.fixed or None)
        if self.default.algorithm == space.algorithm:
            found = [self.default, *found]
        if request.effort.most is not None:
            found = found[: request.effort.most // _PER_KERNEL]
        return self._with_twins(space, found, request.effort.twins)

    def everything(self) -> list[Config]:
        """Return the incumbent, then the caller's configs or, if there are none, what the search proposes."""
        configs = [*self._request.explicit] or self._searched()
        extra = [] if self.incumbent is None else [self.incumbent]
        return list(dict.fromkeys([*extra, *configs]))

    def refined(
        self,
        results: Mapping[Config, float | None],
        limit: int,
        fastest: float,
        fixed: Mapping[str, Sequence[Value]] | None = None,
    ) -> list[Config]:
        """Return configs that the measurements suggest, for each algorithm that is not far behind.

        Args:
            results: Microseconds of what was tried; None for what does not work.
            limit: Kernels of each algorithm, at most.
            fastest: Microseconds of the fastest of all.
            fixed: Values that knobs keep to; those of the request if None.
        """
        fixed = self._request.fixed if fixed is None else fixed
        spaces = (self.space, *self._further)
        return [config for space in spaces for config in self._refined(space, results, limit, fastest, fixed)]

    def without_overlap(self, best: Config) -> dict[str, tuple[Value, ...]]:
        """Return the fixed knobs, and overlap of launches fixed to off if it is off in ``best``."""
        fixed = dict(self._request.fixed)
        if self._request.context == BACK_TO_BACK or best.get("split_k", 1) != 1:
            return fixed
        return {**{knob: (value,) for knob, value in WITHOUT.items() if best.get(knob) == value}, **fixed}

    def _searched(self) -> list[Config]:
        """Return what the search proposes, then those of the other source that satisfy the fixed knobs."""
        request, own = self._request, []
        if "cutegen" in request.sources:
            own = self._ranked(self.space)
            for space in self._further:
                own += self._ranked(space, _FURTHER_SHARE)
        fits = [c for c in self._offers if all(c.get(k) in values for k, values in request.fixed.items())]
        return own + spread(fits, request.effort.kernels)

    def _ranked(self, space: Space, share: int = 1) -> list[Config]:
        """Return what one algorithm proposes, one ``share``-th as much as the effort says."""
        request, effort, default = self._request, self._request.effort, self.default
        if default.algorithm != space.algorithm:
            default = default_of_algorithm(space, request.problem, request.sm_count)
        limit, fixed = max(1, self._most // share), request.fixed or None
        found = rank(space, request.problem, request.sm_count, limit, fixed, default=default)[: effort.most]
        return self._with_twins(space, found, -(-effort.twins // share))

    @property
    def _most(self) -> int:
        """Most kernels that the search proposes. Users' kernels have no twins, so they get those places."""
        effort = self._request.effort
        is_users = find_family(self._request.problem.family).default_is_its_authors
        return effort.classes + (effort.twins if is_users else 0)

    def _with_twins(self, space: Space, configs: Sequence[Config], count: int) -> list[Config]:
        """Return ``configs`` with twins: behind other kernels the model cannot predict which is faster.

        Between kernels that overlap there are none, since all overlap.
        """
        request = self._request
        if request.context == OVERLAPPING:
            return all_overlapped(space, request.problem, configs, request.fixed)
        count = 0 if request.context == BACK_TO_BACK else count
        return with_twins(space, request.problem, configs, count, request.fixed, others=request.usual_overlap)

    def _refined(
        self,
        space: Space,
        results: Mapping[Config, float | None],
        limit: int,
        fastest: float,
        fixed: Mapping[str, Sequence[Value]],
    ) -> list[Config]:
        request = self._request
        if request.context == OVERLAPPING:
            usual = {knob: (value,) for knob, value in WITH.items() if value in space.domains.get(knob, ())}
            fixed = {**usual, **fixed}
        fixed = {knob: values for knob, values in fixed.items() if knob in space.domains}
        own = {config: us for config, us in results.items() if config.algorithm == space.algorithm}
        best = min((us for us in own.values() if us is not None), default=math.inf)
        if best > fastest * _HOPELESS:
            return []
        return refine(
            space,
            request.problem,
            own,
            limit,
            sm_count=request.sm_count,
            fixed=fixed or None,
            new_kernels=not request.explicit,
        )

    def _competes(self, space: Space) -> bool:
        """Whether a further algorithm can compute this problem and has all fixed knobs and values."""
        fixed = self._request.fixed
        has = all(set(values) <= set(space.domains.get(knob, ())) for knob, values in fixed.items())
        return has and not space.explain(self._request.problem, {})
