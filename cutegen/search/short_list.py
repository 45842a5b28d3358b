"""Short lists: the few configs of a family that were measured to be enough on an architecture.

A list stands beside the family's spaces, in ``short_list.json``. ``python -m cutegen.shrink`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from cutegen.arch import find_arch
from cutegen.errors import ConfigError, ProblemError, ResourceError
from cutegen.families.registry import find_space, parse_problem, short_list_file
from cutegen.family import Problem
from cutegen.space import Config, Space
from cutegen.system.documents import read_json
from cutegen.text import shown

__all__ = ["DEFAULT", "FORMAT", "MOST", "ShortList", "find_short_list", "short_choice"]

FORMAT = 1
#: Configs of a list, at most, the default among them.
MOST = 8
#: Stands in a list for the default config of each problem; it is always the first.
DEFAULT = "default"
#: A measured problem answers for others of its signature whose sizes are within this factor.
_NEAR = 2.0


@dataclass(frozen=True)
class ShortList:
    """The list of one family on one architecture.

    Attributes:
        configs: The configs beside the default of each problem.
        choices: For each measured problem the config that it needs; None for its default.
    """

    configs: tuple[Config, ...]
    choices: Mapping[Problem, Config | None]

    def choice(self, problem: Problem) -> Config | None:
        """Return what the nearest measured problem of the same signature needs; None for the default."""
        alike = [known for known in self.choices if known.signature == problem.signature]
        nearest = min(alike, key=lambda known: _distance(known, problem), default=None)
        if nearest is None or _distance(nearest, problem) > math.log(_NEAR):
            return None
        return self.choices[nearest]


def find_short_list(space: Space) -> ShortList | None:
    """Return the list of the family of ``space`` on its architecture; None if it has none.

    Raises:
        ResourceError: The file is no such list.
    """
    return _read(space.family, space.arch.name)


def short_choice(space: Space, problem: Problem) -> Config | None:
    """Return the config that the list names for ``problem`` or one like it, if it is valid there.

    Raises:
        ResourceError: As :func:`find_short_list`.
    """
    known = find_short_list(space)
    chosen = None if known is None else known.choice(problem)
    return chosen if chosen is not None and not space.explain(problem, chosen) else None


def _distance(one: Problem, other: Problem) -> float:
    pairs = zip(one.sizes.values(), other.sizes.values(), strict=True)
    return max(abs(math.log(a / b)) for a, b in pairs)


@cache
def _read(family: str, arch: str) -> ShortList | None:
    path = short_list_file(family)
    if path is None:
        return None
    document: Any = read_json(path, "short list", malformed=ResourceError, unreadable=ResourceError)
    try:
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {shown(document['format'])}, not {FORMAT}")
        found = document["lists"].get(arch)
        return None if found is None else _parsed(find_space(family, find_arch(arch)), found)
    except (ConfigError, ProblemError) as error:
        reason = str(error)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise ResourceError(f"short list {path} cannot be used for {arch}: {reason}; write it again with shrink")


def _parsed(space: Space, found: Any) -> ShortList:
    first, *others = found["configs"]
    if first != DEFAULT or len(others) >= MOST:
        raise ValueError(f"it must begin with {DEFAULT} and hold {MOST} configs at most")
    configs = [None, *map(Config.parse, others)]
    choices = {}
    for row in found["shapes"]:
        problem, config = parse_problem(row["problem"]), configs[row["choice"]]
        if config is not None:
            space.require(problem, config)
        choices[problem] = config
    return ShortList(tuple(config for config in configs if config is not None), choices)
