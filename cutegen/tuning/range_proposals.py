"""Which configs compete over a range: those of the table, default candidates, the best of the whole space."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from threading import Thread

from cutegen.build.parallelism import default_workers
from cutegen.families.registry import find_space, is_legal, space_of, spaces_beside
from cutegen.family import Problem
from cutegen.measure.context import BACK_TO_BACK
from cutegen.records.table import Table
from cutegen.search.defaults import default_config
from cutegen.search.parallel_rank import rank_all
from cutegen.search.range_plan import Cell, first_sizes, shortlist
from cutegen.search.range_predict import Predictions
from cutegen.search.strategies import likely
from cutegen.space import Config
from cutegen.tuning.range_request import RangeRequest

__all__ = ["RangeProposals", "coarse_first"]

#: Default candidates are proposed as a search for so many kernels would: eight. They are this share of the
#: kernels. Source: predictions, for two matrices and sizes from 257 to 512: the best of the kernels is 2.3 %
#: and 0.6 % behind the best of the space with 0.6, and the space ranked at one size in three; 0.5 % and 0.5 %
#: with 0.4 and the space ranked at every size, since tiles have to fit each size.
_LIKELY_OF, _DEFAULTS = 24, 0.4
#: Most processes that rank: the compiler needs the other cores.
_RANKERS = 6
#: A kernel that is proposed at a size is considered at this many sizes on either side of it.
_NEARBY = 2

#: Takes kernels to be compiled, each as a problem and a config of it, in order of urgency.
Submit = Callable[[Iterable[tuple[Problem, Config]]], None]
#: Configs that compete, each with the sizes at which it was proposed.
Pool = dict[Config, list[int]]
#: The configs that the whole space has for each problem, the best first.
_Ranked = dict[Problem, list[Config]]


class RangeProposals:
    """Chooses the kernels to compile for a range, and the sizes at which each config competes.

    Args:
        request: What is asked for.
        cells: Of the range.
        predict: Predicted times at every size.
    """

    def __init__(self, request: RangeRequest, cells: Sequence[Cell], predict: Predictions) -> None:
        self._request = request
        self._cells = cells
        self._predict = predict
        self._space = find_space(request.range.low.family, request.base.arch)
        self._incumbents: Mapping[int, Sequence[Config]] = {}
        self._kernels: dict[Config, None] = {}
        self._proposals: dict[int, list[Config]] = {}
        self._searched_problems: Mapping[int, Problem] = {}
        self._search: Future[_Ranked] | None = None

    def incumbents(self, table: Table | None) -> dict[int, list[Config]]:
        """Return cutegen's own configs that ``table`` names now, by size."""
        whole = self._request.range
        found: dict[int, list[Config]] = {}
        if table is None:
            return found
        named = [(entry.problem, entry.config) for entry in table.entries.values() if entry.problem in whole]
        for old in table.ranges:
            if old.range.kind == whole.kind:
                named += [
                    (p, piece.config) for piece in old.pieces if (p := whole.at_most(piece.last)) is not None
                ]
        for problem, config in named:
            own = config is not None and config.source == "cutegen"
            if config is not None and own and is_legal(config, problem, self._request.base.arch):
                found.setdefault(problem.sizes[whole.size], []).append(config)
        return found

    def choose(self, incumbents: Mapping[int, Sequence[Config]], submit: Submit) -> Pool:
        """Return the configs that compete first, each with the sizes at which it was proposed.

        Default candidates are known at once, and many kernels are of these: they go to ``submit``, and what
        competes is of their kernels. Meanwhile the whole space is ranked: see :meth:`searched`. Where nothing
        is known at once, this waits for it.

        Args:
            incumbents: Configs that the table names now, by size.
            submit: Asks the compiler for kernels.
        """
        request, effort, base = self._request, self._request.effort, self._request.base
        sizes = first_sizes(self._cells, effort.ranked)
        problems = {size: problem for size in sizes if (problem := request.range.at(size)) is not None}
        self._incumbents = incumbents
        named = [config for configs in incumbents.values() for config in configs]
        self._predict.trust(named)
        self._kernels = dict.fromkeys(islice(dict.fromkeys(map(self.kernel_of, named)), effort.kernels))

        proposals = {size: self._likely(problem) for size, problem in problems.items()}
        self._proposals = proposals
        workers, fixed = min(_RANKERS, default_workers()), base.fixed or None
        wanted, count = [*problems.values()], effort.proposed
        self._search = _in_background(
            lambda: rank_all(wanted, base.arch, base.sm_count, count, fixed, workers=workers)
        )
        self._searched_problems = problems
        first = self._shortlist(proposals, round(_DEFAULTS * (effort.kernels - len(self._kernels))))
        submit(self._most_urgent_first(set(first), proposals))
        self._kernels |= dict.fromkeys(first)
        if not any(len(configs) > 1 for configs in proposals.values()):
            return self.searched() or {}
        return self._pool(self._with_incumbents(proposals), self._kernels)

    def waits(self, size: int) -> bool:
        """Return whether further algorithms compute ``size``: only ranking the space proposes these."""
        problem = self._request.range.at(size)
        others = spaces_beside(self._space)
        return problem is not None and any(not other.explain(problem, {}) for other in others)

    def is_ranked(self) -> bool:
        """Whether :meth:`searched` would return at once."""
        return self._search is None or self._search.done()

    def searched(self) -> Pool | None:
        """Wait until the whole space is ranked and return what competes then; None if that was asked before.

        Raises:
            ConfigError: A knob is fixed to a value that does not exist.
            ProblemError: No config computes a size.
        """
        search, effort = self._search, self._request.effort
        if search is None:
            return None
        self._search, ranked, proposals = None, search.result(), self._proposals
        for size, problem in self._searched_problems.items():
            more = (self._for_context(problem, config) for config in ranked[problem])
            proposals[size] = [*dict.fromkeys([*proposals[size], *more])]
        proposals = self._with_incumbents(proposals)
        left = effort.kernels - len(self._kernels)
        self._kernels |= dict.fromkeys(self._shortlist(proposals, left, self._kernels))
        return self._pool(proposals, self._kernels)

    def _with_incumbents(self, proposals: Mapping[int, Sequence[Config]]) -> dict[int, list[Config]]:
        """Return what is proposed at each size, what the table names before all else."""
        found = {size: [*configs] for size, configs in proposals.items()}
        for size, configs in self._incumbents.items():
            found[size] = [*configs, *found.get(size, [])]
        return found

    def default(self, problem: Problem) -> Config:
        """Return what a call of ``problem`` would run without the range."""
        default = default_config(self._space, problem, self._request.base.sm_count)
        return self._for_context(problem, default)

    def kernel_of(self, config: Config) -> Config:
        """Return the part of a config that is compiled in, which names its kernel."""
        return space_of(config, self._space.family, self._space.arch).compile_view(config)

    def _pool(self, proposals: Mapping[int, Sequence[Config]], kernels: Collection[Config]) -> Pool:
        """Return the proposed configs of ``kernels`` and their run-time variants, with their sizes."""
        pool: Pool = {}
        for size, configs in proposals.items():
            for config in configs:
                if self.kernel_of(config) in kernels:
                    pool.setdefault(config, []).append(size)
        for config, sizes in [*pool.items()]:
            for variant in self._run_time_variants(config):
                pool.setdefault(variant, []).extend(sizes)
        self._predict.expect(pool)
        return pool

    def _run_time_variants(self, config: Config) -> list[Config]:
        """Return ``config`` with each boolean run-time knob, such as the order of tiles, flipped in turn.

        They cost no compilation, and the fit does not see what they change. Source: on an H200 the order of
        tiles that is chosen is 0.7 % behind the best in the mean, and 6.1 % at most
        (docs/results/gemm_orders_parts.json).
        """
        base, space = self._request.base, space_of(config, self._space.family, self._space.arch)
        flags = [k for k in sorted(space.run_time_knobs) if set(space.domains[k]) == {False, True}]
        return [config.replace(**{k: not config[k]}) for k in flags if k not in base.fixed]

    def _likely(self, problem: Problem) -> list[Config]:
        """Return what a model puts first of the default candidates, or the default alone."""
        base = self._request.base
        found = likely(self._space, problem, base.sm_count, _LIKELY_OF, base.fixed or None)
        found = list(map(partial(self._for_context, problem), found)) or [self.default(problem)]
        return [c for c in found if all(c.get(knob) in values for knob, values in base.fixed.items())]

    def _for_context(self, problem: Problem, config: Config) -> Config:
        """Return ``config`` without the overlap of launches where that is likely to be slower.

        Between launches of one kernel, and behind one that lets the next start early, the overlap pays;
        behind another kernel mostly not.
        """
        base = self._request.base
        if base.context == BACK_TO_BACK:
            return config
        space = space_of(config, self._space.family, self._space.arch)
        return base.usual_overlap(space, problem, config, base.fixed)

    def _shortlist(
        self, proposals: Mapping[int, Sequence[Config]], limit: int, chosen: Collection[Config] = ()
    ) -> list[Config]:
        self._predict.expect(dict.fromkeys(config for configs in proposals.values() for config in configs))
        return shortlist(self._times_of_kernels(proposals), limit, chosen)

    def _times_of_kernels(self, proposals: Mapping[int, Sequence[Config]]) -> dict[int, dict[Config, float]]:
        """Return what kernels are predicted to take at each size: those proposed there and nearby."""
        sizes, found = sorted(proposals), {}
        for at, size in enumerate(sizes):
            near = sizes[max(0, at - _NEARBY) : at + _NEARBY + 1]
            times: dict[Config, float] = {}
            for config in dict.fromkeys(config for other in near for config in proposals[other]):
                if (us := self._predict(size, config)) is not None:
                    kernel = self.kernel_of(config)
                    times[kernel] = min(us, times.get(kernel, us))
            found[size] = times
        return found

    def _most_urgent_first(
        self, kernels: Collection[Config], proposals: Mapping[int, Sequence[Config]]
    ) -> Iterable[tuple[Problem, Config]]:
        """Yield a problem and a config of each kernel, first of those proposed where measuring begins."""
        found: dict[Config, tuple[int, Config]] = {}
        for size in coarse_first([*proposals]):
            for config in proposals[size]:
                found.setdefault(self.kernel_of(config), (size, config))
        for kernel, (size, config) in found.items():
            problem = self._request.range.at(size)
            if kernel in kernels and problem is not None:
                yield problem, config


def _in_background(work: Callable[[], _Ranked]) -> Future[_Ranked]:
    """Return what ``work`` will return, from a thread that no process waits for when it ends."""
    found: Future[_Ranked] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            found.set_exception(error)

    Thread(target=run, name="cutegen-range", daemon=True).start()
    return found


def coarse_first(sizes: Sequence[int]) -> list[int]:
    """Return the ends, then every fourth, then the others: what is known early tells what to try later."""
    last = len(sizes) - 1
    places = sorted(range(len(sizes)), key=lambda at: (at not in (0, last), at % 4 != 0, at % 2 != 0, at))
    return [sizes[at] for at in places]
