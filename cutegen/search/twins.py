"""Kernels that are tried with and without an overlap whose worth depends on what runs before a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from cutegen.family import Problem
from cutegen.space import Config, Space, Value

__all__ = [
    "WITH",
    "WITHOUT",
    "all_overlapped",
    "alone",
    "aside_from_overlap",
    "overlapped",
    "overlapping_like",
    "overlaps_unlike",
    "with_twins",
]

#: Knobs that let a launch overlap with its neighbours, without that and with as much as there is.
WITHOUT: Mapping[str, Value] = {"use_pdl": False, "pdl": "off"}
WITH: Mapping[str, Value] = {"use_pdl": True, "pdl": "early"}


def with_twins(
    space: Space,
    problem: Problem,
    configs: Sequence[Config],
    count: int,
    fixed: Mapping[str, Sequence[Value]] | None = None,
    *,
    others: Callable[..., Config] | None = None,
) -> list[Config]:
    """Return ``configs``, the first ``count`` kernels each followed by its valid twins.

    A twin differs in one knob that overlaps launches; a space without such a knob has none.

    Args:
        space: Where the configs come from.
        problem: What is to be computed.
        configs: Some configs, the most promising first.
        count: Kernels that get twins.
        fixed: Knobs restricted to some values.
        others: What the other kernels are made by: :func:`alone` or :func:`overlapped`. None leaves them.
    """
    kernels: set[Config] = set()
    found: list[Config] = []
    for config in configs:
        view = space.compile_view(config)
        first = view not in kernels and len(kernels) < count
        other = others if count > 0 and not first and view not in kernels else None
        found.append(config if other is None else other(space, problem, config, fixed or {}))
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
    return _changed(space, problem, config, fixed, WITHOUT)


def overlapped(
    space: Space, problem: Problem, config: Config, fixed: Mapping[str, Sequence[Value]]
) -> Config:
    """Return the kernel with as much overlap as there is, if it is valid so: between kernels that let the
    next one start early it pays for nearly all."""
    return _changed(space, problem, config, fixed, WITH)


def all_overlapped(
    space: Space, problem: Problem, configs: Sequence[Config], fixed: Mapping[str, Sequence[Value]]
) -> list[Config]:
    """Return the kernels of ``configs``, each as :func:`overlapped` has it.

    A time tells what a kernel gains by starting early, and not what the next one gains. Source: a Llama-8B
    on an H200 (docs/results/model_overlapping.json): decoding 64 texts takes 0.9 % less time where norms that
    won with ``pdl=late`` overlap as much as they can.
    """
    return list(dict.fromkeys(overlapped(space, problem, config, fixed) for config in configs))


def _changed(
    space: Space,
    problem: Problem,
    config: Config,
    fixed: Mapping[str, Sequence[Value]],
    wanted: Mapping[str, Value],
) -> Config:
    twins = _twins(space, problem, config, fixed)
    return next((t for t in twins if all(t.get(k, value) == value for k, value in wanted.items())), config)


def overlapping_like(config: Config, other: Config) -> Config:
    """Return ``config`` with its launches overlapping as those of ``other`` do."""
    return config.replace(**{knob: other[knob] for knob in WITHOUT if knob in config and knob in other})


def overlaps_unlike(config: Config, other: Config) -> bool:
    """Return whether launches of ``config`` overlap with their neighbours where those of ``other`` do not."""
    return any(knob in config and config[knob] != off == other.get(knob) for knob, off in WITHOUT.items())


def aside_from_overlap(view: Config) -> Config:
    """Return what a config says of its kernel apart from overlap: twins are equal in it."""
    return Config({knob: value for knob, value in view.items() if knob not in WITHOUT})


def _twins(
    space: Space, problem: Problem, config: Config, fixed: Mapping[str, Sequence[Value]]
) -> Iterator[Config]:
    for knob in WITHOUT:
        for value in space.domains.get(knob, ()):
            twin = config.replace(**{knob: value}) if value != config[knob] else None
            if twin and value in fixed.get(knob, (value,)) and not space.explain(problem, twin):
                yield twin
