"""Few candidates of each problem, all of them compiled before the first is measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice, product, zip_longest

from cutegen.arch import Arch
from cutegen.build import Artifact
from cutegen.build.builder import Builder
from cutegen.build.render import Source, render
from cutegen.build.store import Store
from cutegen.families.registry import spaces_beside
from cutegen.family import Problem
from cutegen.search.defaults import default_config, default_of_algorithm, strategy_of
from cutegen.search.strategies import rank
from cutegen.space import Config, Space, Value

__all__ = ["Compilation", "few_candidates", "most_like_default"]

#: How far apart two values of a knob without an order are, where doubling a number is 1. Source: judgement.
_UNORDERED = 0.5
#: At most so many knobs of the default are changed at a time.
_CHANGED = 2


def few_candidates(space: Space, problem: Problem, sm_count: int, count: int) -> list[Config]:
    """Return the default config for ``problem`` and what to try beside it, ``count`` in all.

    These are what the family's model puts first, of each algorithm by turns, or, where it has none, the configs
    most like the default.
    """
    if strategy_of(space) is None:
        return most_like_default(space, problem, sm_count, count)
    default = default_config(space, problem, sm_count)
    ways = [space, *(other for other in spaces_beside(space) if not other.explain(problem, {}))]
    ranked = [_ranked(way, problem, sm_count, count, default) for way in ways]
    turns = chain.from_iterable(zip_longest(*ranked))
    return list(dict.fromkeys([default, *(config for config in turns if config is not None)]))[:count]


def _ranked(space: Space, problem: Problem, sm_count: int, count: int, default: Config) -> list[Config]:
    """Return what the model of one algorithm puts first."""
    lead = default if default.algorithm == space.algorithm else default_of_algorithm(space, problem, sm_count)
    return rank(space, problem, sm_count, count, default=lead)


def most_like_default(space: Space, problem: Problem, sm_count: int, count: int) -> list[Config]:
    """Return the default config for ``problem`` and the valid ones that are most like it, at most ``count``.

    Two numbers are as far apart as one must be doubled to reach the other, and two knobs as both together;
    configs that differ from the default in more than two knobs are left out. Where there are no more than
    ``count`` in all, these are all of them.
    """
    default = default_config(space, problem, sm_count)
    first = list(islice(space.configs(problem), count + 1))
    if len(first) <= count:
        return [default, *(config for config in first if config != default)]
    found = {
        config: _distance(default, config)
        for config in _changed(space, default)
        if not space.explain(problem, config)
    }
    near = sorted(found, key=lambda config: (found[config], space.simplicity(config)))
    return [default, *near][:count]


def _changed(space: Space, default: Config) -> Iterator[Config]:
    for number in range(1, _CHANGED + 1):
        for knobs in combinations(space.domains, number):
            others = [[v for v in space.domains[knob] if v != default[knob]] for knob in knobs]
            for values in product(*others):
                yield default.replace(**dict(zip(knobs, values, strict=True)))


def _distance(one: Config, other: Config) -> float:
    return sum(_apart(one[knob], other[knob]) for knob in one)


def _apart(one: Value, other: Value) -> float:
    if one == other:
        return 0.0
    numbers = type(one) is int and type(other) is int and min(one, other) > 0
    return abs(math.log2(one / other)) if numbers else _UNORDERED  # type: ignore[operator]


class Compilation:
    """Compiles configs of several problems side by side while something else is done.

    Args:
        store: Where artifacts are found and put.
        arch: The target.
        wanted: Problems and configs.
    """

    def __init__(self, store: Store, arch: Arch, wanted: Sequence[tuple[Problem, Config]]) -> None:
        self._builder = Builder(store)
        self._sources: list[Source] = [render(problem, config, arch) for problem, config in wanted]

    def begin(self) -> None:
        """Start, without waiting; raises :class:`cutegen.errors.BuildError` where there is no compiler."""
        self._builder.submit(self._sources)

    def finish(self) -> tuple[int, int]:
        """Wait for the end; return how many kernels there are now, and how many could not be compiled."""
        with self._builder:
            results = [result for _, result in self._builder.build([])]
        good = sum(isinstance(result, Artifact) for result in results)
        return good, len(results) - good
