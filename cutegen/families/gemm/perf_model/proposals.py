"""What to try next: the model's ranking, of each way to cut up the work one first, and steps from what won.

Compiling costs more than measuring, so ``limit`` counts kernels. What a kernel takes as arguments
(``split_k``, rasterization) the model chooses for each; further values cost no compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import log

from cutegen.errors import UsageError
from cutegen.families.gemm.perf_model.ranking import FAMILY_SLACK, Candidate, Ranker, family_of
from cutegen.families.gemm.perf_model.residuals import Lessons
from cutegen.families.gemm.problem import Problem
from cutegen.space import Config, Query, Space, Value, as_pair

__all__ = ["precompute", "promising", "rank", "refine"]

#: So many kernels of the best predictions are looked at.
_POOL = 500
#: How a kernel goes about the same work: of those that differ in nothing else the likeliest is tried first,
#: and refinement sees to the others where the work was cut up well. Source: 240 kernels for each of 12 shapes
#: on an H200; the best of the first 48 was 0.8 % behind the best of all, 1.5 % when these came one by one.
_SCHEDULE = ("mma_warpgroups", "pingpong", "use_tma_store", "use_clc", "use_pdl")
#: Tiles, by the names that Hopper's and Blackwell's kernels give them.
_TILES = ("tile_shape_mn", "mma_tiler_mn")
#: Refinement starts from so many of the fastest, none slower than the best by more than this factor.
_PARENTS = 3
_PARENT_SLACK = 1.25
#: Fewer measured configs than this teach nothing about the model.
_ENOUGH = 16


def rank(
    query: Query,
    limit: int,
    *,
    variants: int = 2,
    default: Config | None = None,
    first: Iterable[Config] = (),
) -> list[Config]:
    """Return the configs to try first: the default, then the model's best of many kinds.

    Each kernel's most promising run-time arguments come first, in predicted order; their variants follow.

    Args:
        query: Which configs are in question. The default leads the list only if it is one of them.
        limit: Most kernels to compile.
        variants: Most further run-time arguments for each kernel.
        default: What leads; the space's own default if not given.
        first: What follows it, as far as it is in question, before the model's choice.

    Raises:
        ArchError: The model knows nothing of the space's architecture.
        ConfigError: ``query.fixed`` names a knob or a value that does not exist.
        UsageError: ``limit`` is not positive.
    """
    if limit < 1:
        raise UsageError(f"limit={limit} kernels must be at least 1")
    space = query.space
    ranker, pool = _ranked(query)
    best = {candidate.view: candidate for candidate in pool}
    default = default or space.default(query.problem)
    given: dict[Config, Config] = {}
    for config in filter(ranker.legal, (default, *first)):
        given.setdefault(space.compile_view(config), config)
    start = [Candidate(config, view, ranker.predict(config)) for view, config in given.items()]
    chosen = _spread(start[:limit], pool, limit)
    lead = [c.config for c in chosen]
    for candidate in chosen:
        if candidate.config == default and candidate.view in best:
            lead.append(best[candidate.view].config)
        lead += ranker.variants(best.get(candidate.view, candidate), variants)
    return list(dict.fromkeys(lead))


def promising(
    query: Query, times_us: Callable[[Sequence[Config]], Sequence[float]], limit: int
) -> list[Config]:
    """Return what another model likes best of the model's best, one of each way to cut up the work.

    Args:
        query: Which configs are in question.
        times_us: That model: microseconds of each config.
        limit: Most configs.

    Raises:
        ArchError: The model knows nothing of the space's architecture.
        ConfigError: ``query.fixed`` names a knob or a value that does not exist.
    """
    _, pool = _ranked(query)
    times = times_us([candidate.config for candidate in pool])
    ordered = (pool[at] for at in sorted(range(len(pool)), key=times.__getitem__))
    return [candidate.config for candidate in islice(_first_of_each(ordered, _work_of), limit)]


def precompute(query: Query) -> None:
    """Make the predictions that :func:`rank` and :func:`refine` of the same query start from.

    Raises:
        ArchError: The model knows nothing of the space's architecture.
        ConfigError: ``query.fixed`` names a knob or a value that does not exist.
    """
    _ranked(query)


@lru_cache(maxsize=8)
def _ranked(query: Query) -> tuple[Ranker, Sequence[Candidate]]:
    """Return predictions for a problem, which take a second, once for all that ask while it is tuned."""
    ranker = Ranker(query.space, query.problem, query.sm_count, dict(query.fixed))
    return ranker, tuple(ranker.best(_POOL))


def _spread(start: Sequence[Candidate], pool: Sequence[Candidate], limit: int) -> list[Candidate]:
    """Return ``start`` and the best of ``pool``: of each family, of each way to cut up the work, the rest."""
    views = {c.view for c in start}
    rest = [c for c in pool if c.view not in views]
    first: list[Candidate] = []
    if rest and limit - len(start) >= 6:
        within = rest[0].time_us * FAMILY_SLACK
        first = [c for c in _first_of_each(rest, lambda c: family_of(c.config)) if c.time_us <= within]
    ways = {_work_of(c) for c in (*start, *first)}
    lead = [c for c in _first_of_each(rest, _work_of) if _work_of(c) not in ways]
    chosen = list(dict.fromkeys([*first, *lead, *rest]))[: max(0, limit - len(start))]
    return [*start, *sorted(chosen, key=lambda c: c.time_us)]


def _first_of_each(candidates: Iterable[Candidate], kind: Callable[[Candidate], Hashable]) -> list[Candidate]:
    found: dict[Hashable, Candidate] = {}
    for candidate in candidates:
        found.setdefault(kind(candidate), candidate)
    return list(found.values())


def _work_of(candidate: Candidate) -> Hashable:
    """How a kernel cuts up the work: tile, cluster, parts of k, operands swapped."""
    return tuple(value for knob, value in candidate.view.items() if knob not in _SCHEDULE)


def refine(
    query: Query, results: Mapping[Config, float | None], limit: int, *, new_kernels: bool = True
) -> list[Config]:
    """Return untried neighbours of the fastest measured configs, then what the measurements make promising.

    A neighbour differs in one knob by one step (tile width, cluster, pingpong, split, raster, ...), plus
    whatever else the rules then ask for. It is judged by its parent's measured time scaled by the ratio of
    their predictions, so errors that the model makes on both cancel. Steps that need no new kernel start from
    more of the fastest: they are cheap, and of rasterization the model knows little. Source: on an H200
    the kernel in sixth place for 1024x1024x1024 came first when rasterized along the other axis. What
    follows comes from the whole space, ranked by the model with its errors on the measured configs learned
    (:mod:`cutegen.families.gemm.perf_model.residuals`).

    Args:
        query: Which configs are in question.
        results: Microseconds of every config tried so far; None for one that failed.
        limit: Most kernels to compile of either kind. As many neighbours that need none may be added, twice
            as many where no new kernels are asked for.
        new_kernels: Whether kernels may be asked for that are not compiled yet; if not, what comes are
            neighbours in run-time knobs.

    Raises:
        ArchError: The model knows nothing of the space's architecture.
    """
    space, problem = query.space, query.problem
    ranker, pool = _ranked(query)
    timed = sorted((t, space.simplicity(c), c) for c, t in results.items() if t is not None)
    fast = [(time, config) for time, _, config in timed if time <= timed[0][0] * _PARENT_SLACK]
    failed = {space.compile_view(c) for c, t in results.items() if t is None}
    built = {space.compile_view(c) for c, t in results.items() if t is not None}
    new, free = (limit, limit) if new_kernels else (0, 2 * limit)
    scored: dict[Config, float] = {}
    for time, predicted, neighbour in (
        *_around(space, problem, ranker, fast[:_PARENTS], space.domains),
        *_same_kernels(space, problem, ranker, fast, free),
    ):
        if neighbour not in results and ranker.legal(neighbour):
            score = time * ranker.predict(neighbour) / predicted
            scored[neighbour] = min(score, scored.get(neighbour, score))
    ordered = sorted(scored, key=lambda c: (scored[c], space.simplicity(c)))
    untainted = [c for c in ordered if space.compile_view(c) not in failed - built]
    chosen = _within_limit(space, untainted, built, new, free)
    if len(timed) < _ENOUGH or not new_kernels:
        return chosen
    known = failed | built | {space.compile_view(config) for config in chosen}
    lessons = Lessons(space, [(config, log(time / ranker.predict(config))) for time, _, config in timed])
    fresh = [candidate for candidate in pool if candidate.view not in known]
    fresh.sort(key=lambda candidate: lessons.corrected(candidate.config, candidate.time_us))
    return chosen + [candidate.config for candidate in fresh[:limit]]


def _around(
    space: Space,
    problem: Problem,
    ranker: Ranker,
    parents: Iterable[tuple[float, Config]],
    knobs: Iterable[str],
) -> Iterator[tuple[float, float, Config]]:
    """Yield each parent's measured and predicted time with a neighbour that is a step of ``knobs`` away."""
    for time, parent in parents:
        predicted = ranker.predict(parent)
        near = _neighbours(space, problem, parent, knobs)
        for neighbour in _with_best_splits(ranker, near) if parent.get("split_k", 1) != 1 else near:
            yield time, predicted, neighbour


def _same_kernels(
    space: Space, problem: Problem, ranker: Ranker, fast: Iterable[tuple[float, Config]], count: int
) -> Iterator[tuple[float, float, Config]]:
    """Yield as :func:`_around` what needs no new kernel, around the fastest config of ``count`` kernels."""
    best: dict[Config, tuple[float, Config]] = {}
    for time, config in fast:
        best.setdefault(space.compile_view(config), (time, config))
    knobs = [knob for knob in space.domains if knob in space.run_time_knobs]
    for view, parent in islice(best.items(), count):
        for found in _around(space, problem, ranker, [parent], knobs):
            if space.compile_view(found[-1]) == view:
                yield found


def _with_best_splits(ranker: Ranker, configs: Iterable[Config]) -> Iterator[Config]:
    """Yield each config, and if it splits k, the same kernel with the split that fits its own tiles."""
    for config in configs:
        yield config
        if config["split_k"] != 1:
            yield config.replace(split_k=ranker.finish(config).config["split_k"])


def _within_limit(
    space: Space, configs: Sequence[Config], built: set[Config], new: int, free: int
) -> list[Config]:
    """Keep the first ``new`` unbuilt kernels and the first ``free`` configs that need no further one."""
    views = set(built)
    kept = []
    for config in configs:
        view = space.compile_view(config)
        if view in views and free > 0:
            free -= 1
            kept.append(config)
        elif view not in views and new > 0:
            new -= 1
            views.add(view)
            kept.append(config)
    return kept


def _neighbours(space: Space, problem: Problem, config: Config, knobs: Iterable[str]) -> Iterator[Config]:
    """Yield valid configs one step of ``knobs`` away, mending others where a step breaks a rule."""
    for knob, value in _steps(space, config, knobs):
        moved = config.replace(**{knob: value})
        violations = space.explain(problem, moved)
        if not violations:
            yield moved
            continue
        broken = {v.rule for v in violations}
        ruled = {k for rule in space.rules if rule.name in broken for k in rule.knobs} - {knob}
        for other in (k for k in space.domains if k in ruled and k not in (*_TILES, "cluster_shape_mn")):
            mended = (moved.replace(**{other: v}) for v in space.domains[other] if v != config[other])
            fine = next((c for c in mended if not space.explain(problem, c)), None)
            if fine is not None:
                yield fine
                break


def _steps(space: Space, config: Config, knobs: Iterable[str]) -> Iterator[tuple[str, Value]]:
    """Yield single changes: neighbouring tiles, the next values of ordered knobs, all values of others."""
    for knob in knobs:
        domain = space.domains[knob]
        if knob in _TILES:
            yield from ((knob, tile) for tile in _near_tiles(domain, config.pair(knob)))
        elif all(type(value) is int for value in domain):
            at = domain.index(config[knob])
            yield from ((knob, domain[i]) for i in (at - 1, at + 1) if 0 <= i < len(domain))
        else:
            yield from ((knob, value) for value in domain if value != config[knob])


def _near_tiles(domain: Sequence[Value], tile: tuple[int, int]) -> list[tuple[int, int]]:
    """Tiles next to ``tile``: one step along n, one along m, or the two exchanged."""
    shapes = [as_pair(value) for value in domain]
    widths = sorted({n for m, n in shapes if m == tile[0]})
    heights = sorted({m for m, n in shapes if n == tile[1]})
    near = []
    for line, at, make in (
        (widths, tile[1], lambda n: (tile[0], n)),
        (heights, tile[0], lambda m: (m, tile[1])),
    ):
        i = line.index(at)
        near += [make(line[j]) for j in (i - 1, i + 1) if 0 <= j < len(line)]
    exchanged = (tile[1], tile[0])
    return near + ([exchanged] if exchanged != tile and exchanged in shapes else [])
