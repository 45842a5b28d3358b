"""The values of a declaration's knobs: those of each alone, and those that come together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cutegen.errors import FamilyError
from cutegen.space import Value

__all__ = ["Domains", "Together", "knob_value", "read_configs", "read_knobs"]

#: Values of each knob.
Domains = dict[str, tuple[Value, ...]]
#: Of each tuple of knobs that go together, the tuples of values.
Together = tuple[tuple[tuple[str, ...], tuple[tuple[Value, ...], ...]], ...]


def knob_value(knob: str, value: Any) -> Value:
    """Return a value of a knob; lists count as tuples."""
    value = tuple(value) if isinstance(value, list) else value
    plain = isinstance(value, (bool, int, str))
    if not plain and not (isinstance(value, tuple) and value and all(type(x) is int for x in value)):
        raise FamilyError(
            f"knob {knob} may not be {value!r}, of type {type(value).__name__}; valid: integers, True and "
            "False, texts, and tuples of integers, from which construct and call can make other objects"
        )
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", value):
        raise FamilyError(f"knob {knob} may not be {value!r}; a text is a word, such as evict_first")
    found: Value = value
    return found


def read_knobs(knobs: Mapping[str, Sequence[Any]]) -> tuple[Domains, Together]:
    """Return domains, and which values come together, of knobs as they are declared."""
    domains: Domains = {}
    together = []
    for key, values in knobs.items():
        names = tuple(name.strip() for name in key.split(","))
        if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or not list(values):
            raise FamilyError(f"knob {key} has the values {values!r}; it must be a list that is not empty")
        for name in names:
            if name in domains:
                raise FamilyError(f"knob {name} is named twice; name it once")
            domains[name] = ()
        rows = [(value,) for value in values] if len(names) == 1 else [tuple(value) for value in values]
        for row in rows:
            if len(row) != len(names):
                raise FamilyError(f"knobs {key} have the values {row!r}; each must be {len(names)} values")
        typed = tuple(tuple(knob_value(n, v) for n, v in zip(names, row, strict=True)) for row in rows)
        for at, name in enumerate(names):
            domains[name] = _distinct(row[at] for row in typed)
        if len(names) > 1:
            together.append((names, typed))
    return domains, tuple(together)


def read_configs(configs: Sequence[Mapping[str, Value]]) -> tuple[Domains, Together]:
    """Return domains, and the configs as values that come together."""
    names = tuple(configs[0])
    for at, config in enumerate(configs, 1):
        if set(config) != set(names):
            odd = sorted(set(config) ^ set(names))
            raise FamilyError(
                f"config {at} of {len(configs)} and the first differ in knob {odd[0]}; each needs all"
            )
    typed = tuple(tuple(knob_value(n, config[n]) for n in names) for config in configs)
    return {n: _distinct(row[at] for row in typed) for at, n in enumerate(names)}, ((names, typed),)


def _distinct(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return values without repeats; 1 and True are two."""
    return tuple({(type(value), value): value for value in values}.values())
