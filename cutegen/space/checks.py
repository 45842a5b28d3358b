"""Rules asked about configs for many problems of one signature: those that sizes do not decide, once.

A rule is a function of what it looks at. One that looked at nothing of a problem but what the signature
holds says the same of every problem of that signature.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from cutegen.family import Problem
from cutegen.space.config import Config, Value
from cutegen.space.space import Rule, Space

__all__ = ["Checks", "Left", "all_hold"]

#: What a rule looked at that looked at a problem as a whole; no name of a field.
_WHOLE = ""
#: A rule with all of its arguments given but the problem.
_Holds: TypeAlias = "Callable[..., bool]"
#: What is left to be asked of every problem.
Left: TypeAlias = "tuple[_Holds, ...]"


class Checks:
    """Says which configs are valid for problems of one signature, as :meth:`Space.explain` does.

    Args:
        space: Where the configs come from.
        problem: Any of that signature.
    """

    def __init__(self, space: Space, problem: Problem) -> None:
        self._space = space
        self._problem = problem
        signature = problem.signature
        held = getattr(signature, "__dict__", {})
        #: What all problems of the signature have in common.
        self._common = {name for name, value in held.items() if getattr(problem, name, None) == value}
        self._common.update(getattr(signature, "renamed", ()))
        self._verdicts: dict[tuple[str, tuple[Value, ...]], bool | _Holds] = {}

    def left(self, config: Config) -> Left | None:
        """Return what is to be asked of every problem, by :func:`all_hold`.

        None if a rule is broken whatever the sizes. ``config`` is complete, and of the space.
        """
        found = []
        for rule in self._space.rules:
            values = tuple([config[knob] for knob in rule.knobs])
            verdict = self._verdicts.get((rule.name, values))
            if verdict is None:
                verdict = self._verdicts[rule.name, values] = self._verdict(rule, values)
            if verdict is False:
                return None
            if verdict is not True:
                found.append(verdict)
        return tuple(found)

    def _verdict(self, rule: Rule, values: tuple[Value, ...]) -> bool | _Holds:
        """Return what a rule says of all problems, or what is left to be asked of each."""
        given: dict[str, Any] = dict(zip(rule.knobs, values, strict=True))
        if "arch" in rule.context:
            given["arch"] = self._space.arch
        if "problem" not in rule.context:
            return bool(rule.holds(**given))
        watched = _Watched(self._problem)  # a new one: what a function remembers of another, it does not ask
        found = bool(rule.holds(**given, problem=watched))
        return found if watched.names <= self._common else partial(rule.holds, **given)


def all_hold(left: Left, problem: Problem) -> bool:
    """Return whether a problem answers yes to all that is left to be asked of it."""
    # A list, since rules are few, and a generator takes as long again.
    return not [holds for holds in left if not holds(problem=problem)]


class _Watched:
    """A problem that remembers what it was asked for.

    Its hash is its own, so that what a function remembers by problem is worked out anew.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.names: set[str] = set()

    @property  # type: ignore[misc, unused-ignore]
    def __class__(self) -> Any:
        """The problem's, by which rules may tell families apart."""
        return type(self._problem)

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._problem, name)

    def __eq__(self, other: object) -> bool:
        self.names.add(_WHOLE)
        return bool(self._problem == other)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        self.names.add(_WHOLE)
        return str(self._problem)

    def __repr__(self) -> str:
        self.names.add(_WHOLE)
        return repr(self._problem)
