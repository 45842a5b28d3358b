"""Configs around a base, one knob changed at a time, and what the rules of the space make follow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

from cutegen.errors import UsageError
from cutegen.family import Problem
from cutegen.space import Config, Space, Value, as_pair, format_value

__all__ = ["coarse_values", "complete_base", "difference", "variations"]

#: Knobs that may follow another one: how the warpgroups share a tile depends on its shape.
FOLLOWERS = ("mma_warpgroups", "pingpong")
#: If that does not help, the tile follows too, but to no less than this share of its area.
TILES, LEAST_AREA = ("tile_shape_mn", "mma_tiler_mn"), 0.5
#: Domains of pairs that are longer than this are thinned out to multiples of ``COARSE``.
LONG, COARSE = 16, 64


def complete_base(space: Space, problem: Problem, start: Config, changes: Mapping[str, Value]) -> Config:
    """Return ``start`` with ``changes``.

    Raises:
        UsageError: A knob does not exist.
        ConfigError: The result breaks rules of the space.
    """
    unknown = sorted(set(changes) - set(space.domains))
    if unknown:
        raise UsageError(f"unknown knob {', '.join(unknown)}; valid: {', '.join(space.domains)}")
    config = start.replace(**changes)
    space.require(problem, config)
    return config


def coarse_values(space: Space, knob: str) -> tuple[Value, ...]:
    """Return the values of a knob that are worth a look: all, or of many tile shapes the round ones."""
    domain = space.domains[knob]
    pairs = [value for value in domain if isinstance(value, tuple)]
    if len(pairs) <= LONG:
        return domain
    return tuple(value for value in pairs if not any(size % COARSE for size in value))


def difference(config: Config, base: Config, first: str) -> str:
    """Return the knobs in which ``config`` is not ``base``, as users write them, beginning with ``first``."""
    changed = [first, *(knob for knob in config if knob != first and config[knob] != base[knob])]
    return " ".join(f"{knob}={format_value(config[knob])}" for knob in changed)


def variations(
    space: Space, problem: Problem, base: Config, wanted: Mapping[str, Sequence[Value]]
) -> dict[str, Config]:
    """Return valid configs by what is different in them, in the order of ``wanted``, each config once.

    Where a value alone breaks a rule, the smallest change of ``FOLLOWERS`` that mends it goes with it, and if
    there is none the smallest change of the tile as well; a value that they cannot mend is left out.
    """
    found: dict[str, Config] = {}
    for knob, values in wanted.items():
        for value in values:
            if value == base[knob]:
                continue
            config = _mended(space, problem, base.replace(**{knob: value}), keep=knob)
            if config is not None and config not in found.values():
                found[difference(config, base, knob)] = config
    return found


def _mended(space: Space, problem: Problem, config: Config, keep: str) -> Config | None:
    """Return the valid config nearest to ``config`` that has its value of ``keep``."""
    free = [knob for knob in FOLLOWERS if knob in space.domains and knob != keep]
    tiles = [knob for knob in TILES if knob in space.domains and knob != keep]
    changed = [config.replace(**{knob: value}) for knob in tiles for value in _near(space, knob, config)]
    for start in (config, *changed):
        options = [start.replace(**dict(zip(free, v, strict=True))) for v in _choices(space, free)]
        options.sort(key=lambda option: sum(option[knob] != config[knob] for knob in free))
        for option in options:
            if not space.explain(problem, option):
                return option
    return None


def _near(space: Space, knob: str, config: Config) -> list[Value]:
    """Return other tiles with at least half the area of the config's, those of the nearest area first."""
    own = _area(config[knob])
    areas = {value: _area(value) for value in coarse_values(space, knob) if value != config[knob]}
    near = [value for value, area in areas.items() if LEAST_AREA * own <= area]
    return sorted(near, key=lambda value: abs(areas[value] - own))


def _area(tile: Value) -> int:
    return prod(as_pair(tile))


def _choices(space: Space, knobs: Iterable[str]) -> Iterable[tuple[Value, ...]]:
    return product(*(space.domains[knob] for knob in knobs))
