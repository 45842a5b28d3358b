"""Kernels that are tried with and without an overlap whose worth depends on what runs before a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from cutegen.family import Problem
from cutegen.space import Config, Space, Value

__all__ = ["alone", "aside_from_overlap", "with_twins"]

#: Knobs that let a launch overlap with the one before.
OVERLAP = ("use_pdl",)


def with_twins(
    space: Space,
    problem: Problem,
    configs: Sequence[Config],
    count: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    *,
    others_alone: bool = False,
) -> list[Config]:
    """Return ``configs``, the first ``count`` kernels each followed by its valid twins.

    A twin differs in one knob that overlaps launches; a space without such a knob has none.

    Args:
        space: Where the configs come from.
        problem: What is to be computed.
        configs: Some configs, the most promising first.
        count: Kernels that get twins.
        fixed: Knobs restricted to some values.
        others_alone: Whether the other kernels are as :func:`alone` says.
    """
    kernels: set[Config] = set()
    found: list[Config] = []
    for config in configs:
        view = space.compile_view(config)
        first = view not in kernels and len(kernels) < count
        lone = others_alone and count > 0 and not first and view not in kernels
        found.append(alone(space, problem, config, fixed or {}) if lone else config)
        if first:
            kernels.add(view)
            found += _twins(space, problem, config, fixed or {})
    return list(dict.fromkeys(found))


def alone(space: Space, problem: Problem, config: Config, fixed: Mapping[str, Sequence[Value]]) -> Config:
    """Return the kernel without an overlap if it is valid so, unless it splits k.

    Of a launch that splits k the second kernel overlaps with the first. Source: behind an element-wise kernel
    on an H200, 22 of 30 winners of twins did without; at 40 sizes of 1..8192x5632x3072 overlap cost 0.2 to
    0.3 us, which long kernels hardly show, while those that split k were 2.5 to 6.8 % faster with it.
    """
    if config.get("split_k", 1) != 1:
        return config
    twins = _twins(space, problem, config, fixed)
    return next((twin for twin in twins if all(twin.get(knob) is False for knob in OVERLAP)), config)


def aside_from_overlap(view: Config) -> Config:
    """Return what a config says of its kernel apart from overlap: twins are equal in it."""
    return Config({knob: value for knob, value in view.items() if knob not in OVERLAP})


def _twins(
    space: Space, problem: Problem, config: Config, fixed: Mapping[str, Sequence[Value]]
) -> Iterator[Config]:
    for knob in OVERLAP:
        for value in space.domains.get(knob, ()):
            twin = config.replace(**{knob: value}) if value != config[knob] else None
            if twin and value in fixed.get(knob, (value,)) and not space.explain(problem, twin):
                yield twin
