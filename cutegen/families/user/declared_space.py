"""The space of a declared kernel: its knobs, and rules from what its author said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutegen.arch import Arch
from cutegen.errors import ProblemError, SpaceError
from cutegen.families.declared.arguments import row_starts
from cutegen.families.user.call_text import compiled_names
from cutegen.families.user.declaration import Kernel, Named
from cutegen.families.user.scope import Scope, knobs_behind
from cutegen.space import Config, Launch, Rule, Space, Value, format_value

__all__ = ["build_space"]

#: So many combinations are written out in a reason.
_SHOWN = 6


def build_space(kernel: Kernel, arch: Arch) -> Space:
    """Return the configs of ``kernel`` on ``arch``."""
    domains = {knob: values for knob, values in kernel.domains.items() if knob not in kernel.constants}
    compiled = set(knobs_behind(kernel, compiled_names(kernel)))

    def derive(config: Config, problem: Any, arch: Arch) -> dict[str, Value]:
        scope = Scope(kernel, config, problem, arch)
        return {name: _typed(name, scope(name)) for name in kernel.functions.derived}

    def launch(config: Config, problem: Any, sm_count: int) -> Launch:
        scope = Scope(kernel, config, problem, arch, sm_count)
        integers = tuple(_integer(name, scope(name)) for name in kernel.functions.integers)
        scratch = kernel.functions.single.get("scratch")
        # A launch without scratch would have an argument less than the kernel.
        size = 0 if scratch is None else max(4, _integer(kernel.scratch, scratch.value(scope)))
        return Launch(integers, size, kernel.scratch_zeroed)

    return Space(
        family=kernel.name,
        arch=arch,
        domains=domains,
        rules=_rules(kernel, arch),
        derive=derive,
        choose_default=lambda space, problem: _default(kernel, space, problem),
        launch=launch,
        run_time_knobs=frozenset(knob for knob in domains if knob not in compiled),
        compile_view=lambda config: Config({k: v for k, v in config.items() if k in compiled}),
    )


def _typed(name: str, value: Any) -> Value:
    if isinstance(value, (bool, int, str)) or (
        isinstance(value, tuple) and all(type(x) is int for x in value)
    ):
        return value
    raise SpaceError(
        f"derived value {name} is {value!r}, of type {type(value).__name__}; valid: integers, True and "
        "False, texts, and tuples of integers"
    )


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise SpaceError(f"{name}() returned {value!r}; it must be an integer from 0 to 2147483647")
    return value


def _default(kernel: Kernel, space: Space, problem: Any) -> Config:
    """Return what the kernel's author runs; the first valid config if nobody said."""
    if kernel.default is None:
        first = next(space.configs(problem), None)
        if first is None:
            raise ProblemError(f"{problem} cannot be computed on {space.arch}: no config is valid")
        return first
    given = kernel.default
    if isinstance(given, Named):
        given = given.value(Scope(kernel, {}, problem, space.arch, space.arch.nominal_sm_count))
    return Config({knob: value for knob, value in given.items() if knob not in kernel.constants})


def _rules(kernel: Kernel, arch: Arch) -> tuple[Rule, ...]:
    found = [_declared_rule(kernel, named) for named in kernel.functions.rules]
    for names, rows in kernel.together:
        found += _together(kernel, names, rows)
    if kernel.aligned:
        found.append(
            Rule(
                "rows_are_aligned", _aligned(kernel), (), ("problem",), lambda problem: not problem.unaligned
            )
        )
    return tuple(found)


def _aligned(kernel: Kernel) -> str:
    rows = [a.name for a in kernel.arguments if len(a.dims) > 1 and not (a.aligned or a.anywhere)]
    where = f"Rows of {', '.join(rows)}" if rows else "Tensors"
    return (
        f"{where} must start at {row_starts(kernel.arguments)}, unless the declaration says anywhere=True of "
        "a tensor or aligned=False of the kernel."
    )


def _declared_rule(kernel: Kernel, named: Named) -> Rule:
    def holds(problem: Any, arch: Arch, **knobs: Value) -> bool:
        found = named.value(Scope(kernel, knobs, problem, arch))
        if found is None:
            raise named.refused("returned None; a rule returns whether a config is fine")
        return bool(found)

    reason = " ".join((named.function.__doc__ or "").split())
    knobs = knobs_behind(kernel, named.names)
    return Rule(named.function.__name__, reason, knobs, ("problem", "arch"), holds)


def _together(kernel: Kernel, names: tuple[str, ...], rows: tuple[tuple[Value, ...], ...]) -> list[Rule]:
    """Return the rule that some knobs have values that were declared together.

    It is several rules of one name, one for each knob: each is broken only if those before it hold, so that
    partial configs are dropped early and a broken config has one reason.
    """
    places = [place for place, name in enumerate(names) if name not in kernel.constants]
    names = tuple(names[place] for place in places)
    kept = [tuple(row[place] for place in places) for row in rows]
    shown = [" ".join(f"{n}={format_value(v)}" for n, v in zip(names, row, strict=True)) for row in kept]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    reason = f"Declared together are {'; '.join(shown[:_SHOWN])}{more}."
    return [
        Rule(
            f"{'_'.join(names[:2])}_go_together", reason, names[: count + 1], (), _prefix(names, kept, count)
        )
        for count in range(1, len(names))
    ]


def _prefix(names: tuple[str, ...], rows: list[tuple[Value, ...]], count: int) -> Callable[..., bool]:
    shorter = {row[:count] for row in rows}
    known = {row[: count + 1] for row in rows}

    def holds(**values: Value) -> bool:
        row = tuple(values[name] for name in names[: count + 1])
        return row in known or row[:count] not in shorter

    return holds
