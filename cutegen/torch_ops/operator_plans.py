"""What an operator of a declared family remembers of calls with the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutegen.runtime.workspace import GetWorkspace
from cutegen.space import Config
from cutegen.torch_ops.operator_values import MAKE

__all__ = ["MAX_PLANS", "Plan", "Plans", "key_of", "unbound"]

#: Plans are kept for so many kinds of call; a program with more starts over.
MAX_PLANS = 16384


@dataclass(eq=False)
class Plan:
    """How to answer every call with the same shapes, strides, dtypes, device and outputs.

    Attributes:
        launch: Takes the tensors that there are, in the declared order, then the scalars. Replaced once,
            where a kernel is being compiled.
        made: Position, shape and dtype of each output to allocate.
        present: Positions of the tensors that there are.
        scalars: Positions of the scalars that there are.
        first: Position of a tensor that tells the device.
        written: Positions of the tensors of the caller's that the kernel writes: outputs, and what it updates
            in place.
        apart: How far the addresses of the given tensors were from the first where no two shared memory that
            must not be shared: with the same distances they do not either.
    """

    launch: Callable[..., Any]
    made: tuple[tuple[int, tuple[int, ...], Any], ...]
    present: tuple[int, ...]
    scalars: tuple[int, ...]
    first: int
    written: tuple[int, ...] = ()
    apart: set[tuple[int, ...]] = field(default_factory=set)

    def keep(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def is_apart(self, values: Sequence[Any]) -> bool:
        """Return whether tensors with these distances are known to share no memory that they must not."""
        return _distances(values) in self.apart

    def note_apart(self, values: Sequence[Any]) -> None:
        """Remember that tensors with these distances share no memory that they must not."""
        if len(self.apart) >= MAX_PLANS:
            self.apart.clear()
        self.apart.add(_distances(values))


@dataclass(frozen=True)
class Plans:
    """Plans by kind of call, of calls that get their workspaces in one way."""

    workspace: Callable[[], GetWorkspace]
    known: dict[Any, Plan]


def key_of(values: Sequence[Any], config: Config | None, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what calls with the same plan have in common."""
    return (
        config,
        options,
        *[
            v if v is None or v is MAKE else (v.shape, v.stride(), v.dtype, v.device, v.data_ptr() & 15)
            for v in values
        ],
    )


def _distances(values: Sequence[Any]) -> tuple[int, ...]:
    """Return how far the addresses of the given tensors are from the first."""
    places = [v.data_ptr() for v in values if v is not None and v is not MAKE]
    return tuple([place - places[0] for place in places])


def unbound(*arguments: Any) -> None:
    """Stands in a plan until it knows how to launch."""
    raise AssertionError("the plan is not complete")
