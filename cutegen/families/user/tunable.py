"""A decorator that says beside a kernel which values its knobs may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cutegen.errors import FamilyError

__all__ = ["tunable"]

_T = TypeVar("_T")
#: Where the decorator leaves what it was told, for :func:`tunable` itself.
_KNOBS = "__cutegen_knobs__"


def tunable(names: str, values: Sequence[Any]) -> Callable[[_T], _T]:
    """Say which values knobs of a function or class may take; several decorators make a product.

    ::

        @cutegen.tunable("threads, rows", [(128, 1), (256, 2)])
        @cutegen.tunable("stages", [2, 3, 4])
        class Norm: ...

    A declaration without ``knobs`` takes them from here, by reading the file: values are written out. What is
    decorated stays as it is.

    Args:
        names: A knob, or several apart by commas, whose values come together.
        values: What it may be, simplest first; for several knobs, tuples.

    Raises:
        FamilyError: A knob is named twice, or the values do not fit the names.
    """
    found = tuple(name.strip() for name in names.split(","))
    if not all(name.isidentifier() for name in found) or not values:
        raise FamilyError(f"tunable({names!r}, {values!r}): give names, and a list that is not empty")
    odd = [row for row in values if len(found) > 1 and len(tuple(row)) != len(found)]
    if odd:
        raise FamilyError(f"tunable({names!r}): {odd[0]!r} must be {len(found)} values")

    def note(decorated: _T) -> _T:
        known: dict[str, Sequence[Any]] = dict(getattr(decorated, _KNOBS, {}))
        taken = {name.strip() for key in known for name in key.split(",")}
        twice = [name for name in found if name in taken or found.count(name) > 1]
        if twice:
            raise FamilyError(f"tunable({names!r}): knob {twice[0]} is named twice; name it once")
        known[names] = list(values)
        setattr(decorated, _KNOBS, known)
        return decorated

    return note
