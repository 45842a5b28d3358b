"""The interface of a performance model: which configs of a space are promising, and what they should take.

A family may have one for each of its algorithms. Without one the space chooses the default by a rule of its
own, and a search tries configs at even distances in the order of the space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from ctypes import PyDLL
    from pathlib import Path

    from cutegen.family import OwnProblem
    from cutegen.space import Config, Query, Space

__all__ = ["Default", "OpenLibrary", "Predictor", "Strategy"]

#: Predicted microseconds of a config; None for a config that the model does not know.
Predictor = Callable[["Config"], "float | None"]
#: A C file of the package to its library; None if it was not compiled.
OpenLibrary: TypeAlias = "Callable[[Path], PyDLL | None]"


class Default(NamedTuple):
    """The config that answers a problem without measurements.

    Attributes:
        config: The config.
        time_us: Its predicted microseconds, if it was chosen by prediction; else None.
    """

    config: Config
    time_us: float | None = None


class Strategy(Protocol):
    """A performance model of one algorithm of a family on an architecture: which configs are promising."""

    def rank(self, query: Query, limit: int, *, default: Config | None = None) -> list[Config]:
        """Return the configs to try first, of at most ``limit`` kernels: the default, then the best."""
        ...

    def likely(self, query: Query, limit: int, *, everywhere: bool = False) -> list[Config]:
        """Return configs of different kernels that :meth:`rank` of the same arguments will return as well.

        They are known at once, so they can be compiled while the ranking is computed. The default is not
        among them. With ``everywhere`` there may be others, which :meth:`rank` does not return.
        """
        ...

    def refine(
        self, query: Query, results: Mapping[Config, float | None], limit: int, *, new_kernels: bool = True
    ) -> list[Config]:
        """Return untried configs that measured microseconds suggest; a result of None is a failure."""
        ...

    def precompute(self, query: Query) -> None:
        """Compute in advance what the other methods look up; called from any thread."""
        ...

    def prepare(self, space: Space, problem: OwnProblem, sm_count: int, library: OpenLibrary) -> None:
        """Prepare :meth:`default` for problems of the signature of ``problem``, which makes it faster.

        ``library`` opens the library of a C file of the package, if that was compiled.
        """
        ...

    def default(self, space: Space, problem: OwnProblem, sm_count: int) -> Default | None:
        """Return the best of the default candidates, for use without measurements; None if none is valid.

        Algorithms beside the general one are compared with it by the time that it has.
        """
        ...

    def default_set(
        self, space: Space, problem: OwnProblem, sm_count: int
    ) -> Sequence[tuple[OwnProblem, Config]]:
        """Return every kernel that :meth:`default` may answer to problems of the signature of ``problem``.

        Each kernel comes once: as a problem of that signature, and a config of it that is valid there. Once
        these are compiled, no problem of that signature needs a compiler.
        """
        ...

    def predictor(
        self, space: Space, problem: OwnProblem, sm_count: int, configs: Sequence[Config] = ()
    ) -> Predictor:
        """Return a predictor of configs of ``space`` for ``problem``.

        Predicting many configs together takes less time; name them in ``configs``.
        """
        ...

    def tile(self, config: Config, size: str) -> int:
        """Return how many values of the size of that name share a tile of ``config``; 1 without tiles."""
        ...
