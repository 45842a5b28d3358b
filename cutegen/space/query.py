"""What a search is asked about: the configs of a space for one problem, with some knobs restricted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutegen.space.config import Config, Value
from cutegen.space.space import Space

__all__ = ["Query"]


@dataclass(frozen=True)
class Query:
    """The configs that are in question. Hashable, so that what is worked out can be remembered by it.

    Attributes:
        space: Where configs come from.
        problem: What is to be computed.
        sm_count: SMs of the GPU.
        fixed: Knobs restricted to some values.
    """

    space: Space
    problem: Any
    sm_count: int
    fixed: tuple[tuple[str, tuple[Value, ...]], ...] = ()

    @classmethod
    def of(
        cls,
        space: Space,
        problem: Any,
        sm_count: int | None = None,
        fixed: Mapping[str, Sequence[Value]] | None = None,
    ) -> Query:
        """Return the query; by default for the architecture's main product, and with nothing restricted."""
        pairs = tuple((knob, tuple(values)) for knob, values in (fixed or {}).items())
        return cls(space, problem, sm_count or space.arch.nominal_sm_count, pairs)

    def keeps(self, config: Config) -> bool:
        """Return whether ``config`` has no other value of a restricted knob."""
        return all(config.get(knob) in values for knob, values in self.fixed)
