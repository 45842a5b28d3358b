"""Names of a declaration and what they stand for, for one config and problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cutegen.arch import Arch
from cutegen.families.user.declaration import Kernel
from cutegen.space import Value

__all__ = ["Scope", "knobs_behind"]


@dataclass
class Scope:
    """Values by name; what is derived is worked out when it is asked for, once.

    Args:
        kernel: Whose names.
        config: Values of knobs.
        problem: Sizes and options.
        arch: The target; None where nobody asks for it.
        sm_count: Multiprocessors; None likewise.
    """

    kernel: Kernel
    config: Mapping[str, Value]
    problem: Any
    arch: Arch | None = None
    sm_count: int | None = None
    _found: dict[str, Any] = field(default_factory=dict)

    def __call__(self, name: str) -> Any:
        """Return what ``name`` stands for."""
        if name not in self._found:
            self._found[name] = self._look_up(name)
        return self._found[name]

    def _look_up(self, name: str) -> Any:
        if name in self.config:
            return self.config[name]
        functions = self.kernel.functions
        worked_out = functions.derived.get(name) or functions.integers.get(name)
        if worked_out is not None:
            return worked_out.value(self)
        own: dict[str, Any] = {"problem": self.problem, "arch": self.arch, "sm_count": self.sm_count}
        if name in own:
            return own[name]
        constants = self.kernel.constants
        return constants[name] if name in constants else getattr(self.problem, name)


def knobs_behind(kernel: Kernel, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the knobs that decide what ``names`` stand for, in the order of the declaration."""
    found: set[str] = set()
    waiting = list(names)
    known = {**kernel.functions.derived, **kernel.functions.integers}
    while waiting:
        name = waiting.pop()
        if name in known:
            waiting += known[name].names
        found.add(name)
    return tuple(knob for knob in kernel.domains if knob in found and knob not in kernel.constants)
