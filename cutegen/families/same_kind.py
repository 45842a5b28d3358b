"""Problems that share their kernels, at sizes from small to large."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import TypeVar

from cutegen.errors import ProblemError
from cutegen.family import Problem

__all__ = ["problems_of_kind"]

_P = TypeVar("_P", bound=Problem)
#: Most sizes of a problem are below 2 to this power; larger ones are rounded to that by any threshold.
_LARGEST_POWER = 17
#: Problems that touch more bytes fit no GPU, nor what a kernel counts with.
_MOST_BYTES = 2**40
#: Sizes leave these remainders where they must not be multiples of it: 16 elements are 16 bytes or more.
_STEP = 16


def problems_of_kind(problem: _P, most: int = 6000) -> tuple[_P, ...]:
    """Return problems with the signature of ``problem``, the smallest first; itself is among them.

    Their free sizes are powers of two from 1 to 131072, or that far from them that alignment stays what it is
    in ``problem``.

    Args:
        problem: Whose kind.
        most: About how many to return at most: fewer steps on each axis where there are more axes.
    """
    usable = {name: _values(problem, name) for name in problem.sizes}
    axes = sum(len(values) > 1 for values in usable.values()) or 1
    powers = int(most ** (1 / axes))
    stride = -(-_LARGEST_POWER // powers)
    grids = [
        list(dict.fromkeys((*values[::stride], values[-1], problem.sizes[name])))
        for name, values in usable.items()
    ]
    found = {problem, *_made(problem, tuple(usable), grids)}
    return tuple(sorted(found, key=lambda p: (prod(p.sizes.values()), tuple(p.sizes.values()))))


def _values(problem: _P, name: str) -> list[int]:
    """Return the values of one size that leave the kind as it is when nothing else changes."""
    own = problem.sizes[name]
    powers = [2**power for power in range(_LARGEST_POWER + 1)]
    wanted = [value + (own % _STEP if value >= _STEP else 0) for value in powers]
    return [value for value in dict.fromkeys(wanted) if _with(problem, {name: value})] or [own]


def _made(problem: _P, names: tuple[str, ...], grids: list[list[int]]) -> Iterator[_P]:
    for values in product(*grids):
        made = _with(problem, dict(zip(names, values, strict=True)))
        if made is not None:
            yield made


def _with(problem: _P, sizes: dict[str, int]) -> _P | None:
    """Return ``problem`` at other sizes, None if that is no problem, another kind, or too large."""
    try:
        made = problem.with_sizes(**sizes)
    except ProblemError:
        return None
    return made if made.signature == problem.signature and made.min_bytes <= _MOST_BYTES else None
