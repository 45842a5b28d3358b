"""What a space holds for a problem: how many configs are valid, and which rules cut the others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from cutegen.family import Problem
from cutegen.space.config import Value
from cutegen.space.space import Space, Violation

__all__ = ["MOST_COMPLETIONS", "Census", "blockers", "take_census"]

#: Enough completions to show which rules stand in the way; more would only repeat them.
MOST_COMPLETIONS = 20_000


@dataclass(frozen=True)
class Census:
    """Counts over the valid configs of one problem.

    Attributes:
        legal: Valid configs.
        classes: Kernels to compile: configs that differ in run-time knobs only count once.
        raw: Points of the plain product of the domains.
        used: How many valid configs hold each value, by knob.
    """

    legal: int
    classes: int
    raw: int
    used: Mapping[str, Mapping[Value, int]] = field(default_factory=dict)


def take_census(space: Space, problem: Problem, fixed: Mapping[str, Sequence[Value]] | None = None) -> Census:
    """Count the valid configs of ``space`` for ``problem``.

    Raises:
        ConfigError: ``fixed`` names a knob or a value that does not exist.
    """
    classes = set()
    used: dict[str, Counter[Value]] = {knob: Counter() for knob in space.domains}
    legal = 0
    for config in space.configs(problem, fixed):
        legal += 1
        classes.add(space.compile_view(config))
        for knob, value in config.items():
            used[knob][value] += 1
    raw = 1
    for domain in space.domains.values():
        raw *= len(domain)
    return Census(legal, len(classes), raw, used)


def blockers(
    space: Space, problem: Problem, fixed: Mapping[str, Sequence[Value]]
) -> tuple[tuple[Violation, int, int], ...]:
    """Return the fewest rules that together reject the completions of ``fixed``, with how many of how many.

    Use it when no valid config satisfies ``fixed`` although no single rule speaks about it alone. Only knobs
    that share a rule with a fixed one are varied; the others keep the value of the default config.

    Raises:
        ConfigError: ``fixed`` names a knob or a value that does not exist.
    """
    direct = [set(space.explain(problem, values)) for values in _points(fixed, {})]
    if all(direct):
        return _fewest(direct)
    near = {knob for rule in space.rules if set(rule.knobs) & set(fixed) for knob in rule.knobs}
    default = space.default(problem)
    around = {
        knob: space.domains[knob] if knob in near else (default[knob],)
        for knob in space.domains
        if knob not in fixed
    }
    return _fewest([set(space.explain(problem, values)) for values in _points(fixed, around)])


def _fewest(broken: Sequence[set[Violation]]) -> tuple[tuple[Violation, int, int], ...]:
    """Cover all points with few rules: the one that rejects most, then of the rest, and so on."""
    left = list(broken)
    found: list[tuple[Violation, int, int]] = []
    while left := [violations for violations in left if violations]:
        counts = Counter(violation for violations in left for violation in violations)
        worst = max(counts, key=lambda violation: (counts[violation], violation.rule))
        found.append((worst, counts[worst], len(broken)))
        left = [violations for violations in left if worst not in violations]
    return tuple(found)


def _points(
    fixed: Mapping[str, Sequence[Value]], around: Mapping[str, Sequence[Value]]
) -> Iterator[dict[str, Value]]:
    """Yield every combination of both, or a fair sample where there are too many."""
    domains = {**fixed, **around}
    if prod(map(len, domains.values())) <= MOST_COMPLETIONS:
        yield from (dict(zip(domains, values, strict=True)) for values in product(*domains.values()))
        return
    rng = random.Random(0)
    for _ in range(MOST_COMPLETIONS):
        yield {knob: rng.choice(domain) for knob, domain in domains.items()}
