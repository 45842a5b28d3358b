"""What to try next on any target: the model's ranking where there is a model, else a survey of the space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from cutegen.errors import UsageError
from cutegen.family import Problem
from cutegen.search.defaults import strategy_of
from cutegen.search.short_list import find_short_list
from cutegen.space import Config, Query, Space, Value

__all__ = ["likely", "precompute", "rank", "refine", "spread"]

_T = TypeVar("_T")

#: Without a model, so many further values of what a kernel takes as an argument (``split_k``) are tried.
_VARIANTS = 4
#: Without a model, refinement starts from so many of the fastest, from more if nothing can be compiled.
_PARENTS = 3


def rank(
    space: Space,
    problem: Problem,
    sm_count: int,
    limit: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    *,
    default: Config | None = None,
) -> list[Config]:
    """Return the configs to try first: the default, then the most promising kernels.

    Without a model of the target the configs of the family's short list come first. Nothing else is known to
    be promising: kernels are then taken at even distances from the whole space, in its own order, with the
    run-time arguments of the default or, where a rule asks for others, the simplest and a few more at even
    distances: into how many parts k is best split depends on the problem, and refinement goes one step at a
    time.

    Args:
        space: Where configs come from.
        problem: What is to be computed.
        sm_count: SMs of the GPU.
        limit: Most kernels to compile.
        fixed: Knobs restricted to some values. The default leads the list only if it keeps to them.
        default: What leads; the space's own default if not given.

    Raises:
        ConfigError: ``fixed`` names a knob or a value that does not exist.
        UsageError: ``limit`` is not positive.
    """
    query, strategy = Query.of(space, problem, sm_count, fixed), strategy_of(space)
    if strategy is not None:
        return strategy.rank(query, limit, default=default)
    if limit < 1:
        raise UsageError(f"limit={limit} kernels must be at least 1")
    fixed = fixed or {}
    default = default or space.default(problem)
    known = find_short_list(space)
    listed = [] if known is None else [c for c in known.configs if not space.explain(problem, c)]
    lead = [*filter(query.keeps, dict.fromkeys([default, *listed]))][:limit]
    ruled = {knob for rule in space.rules for knob in rule.knobs}
    free = {k: fixed.get(k, [default[k]])[:1] for k in space.run_time_knobs if k not in ruled}
    kernels = {space.compile_view(config): [config] for config in lead}
    for config in space.configs(problem, {**fixed, **free}):
        kernels.setdefault(space.compile_view(config), []).append(config)
    chosen = lead + spread([c[0] for c in kernels.values() if c[0] not in lead], limit - len(lead))
    more = [v for c in chosen for v in spread(kernels[space.compile_view(c)][1:], _VARIANTS)]
    return list(dict.fromkeys(chosen + more))


def likely(
    space: Space,
    problem: Problem,
    sm_count: int,
    limit: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    *,
    everywhere: bool = False,
) -> list[Config]:
    """Return what :func:`rank` will return behind the default, as far as that is known at once.

    It can be compiled while the rest is worked out, which takes a second. Each is of another kernel. There is
    nothing where ``fixed`` names a knob or a value that does not exist, which :func:`rank` refuses. From
    ``everywhere``, the most promising of the whole space are among them.
    """
    strategy = strategy_of(space)
    if strategy is None:
        return []
    return strategy.likely(Query.of(space, problem, sm_count, fixed), limit, everywhere=everywhere)


def refine(
    space: Space,
    problem: Problem,
    results: Mapping[Config, float | None],
    limit: int,
    *,
    sm_count: int | None = None,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    new_kernels: bool = True,
) -> list[Config]:
    """Return untried neighbours of the fastest measured configs, the most promising first.

    Without a model they are taken at even distances from all that differ in one knob.

    Args:
        space: Where configs come from.
        problem: What is computed.
        results: Microseconds of every config tried so far; None for one that failed.
        limit: Most kernels to compile; twice as many configs where none may be.
        sm_count: SMs of the GPU; the architecture's main product's by default.
        fixed: Knobs restricted to some values.
        new_kernels: Whether kernels may be asked for that are not compiled yet.
    """
    query, strategy = Query.of(space, problem, sm_count, fixed), strategy_of(space)
    if strategy is not None:
        return strategy.refine(query, results, limit, new_kernels=new_kernels)
    timed = sorted((time, space.simplicity(c), c) for c, time in results.items() if time is not None)
    parents, count = (_PARENTS, limit) if new_kernels else (limit, 2 * limit)
    near = [
        neighbour
        for _, _, parent in timed[:parents]
        for neighbour in space.neighbours(problem, parent)
        if neighbour not in results and query.keeps(neighbour)
    ]
    built = {space.compile_view(config) for config in results}
    return spread(dict.fromkeys(c for c in near if new_kernels or space.compile_view(c) in built), count)


def precompute(
    space: Space, problem: Problem, sm_count: int, fixed: Mapping[str, Sequence[Value]] | None = None
) -> None:
    """Work out what :func:`rank` and :func:`refine` of the same arguments look up; safe in any thread.

    Raises:
        ConfigError: ``fixed`` names a knob or a value that does not exist.
    """
    strategy = strategy_of(space)
    if strategy is not None:
        strategy.precompute(Query.of(space, problem, sm_count, fixed))


def spread(items: Iterable[_T], count: int) -> list[_T]:
    """Return at most ``count`` of ``items`` at even distances, in their order."""
    found = list(items)
    kept = min(count, len(found))
    return [found[i * len(found) // kept] for i in range(kept)]
