"""All candidates of one problem that were tried, by config, and what they say together."""

from __future__ import annotations

import re
from collections import Counter

from cutegen.errors import NoWinnerError
from cutegen.families.registry import space_of
from cutegen.space import Config
from cutegen.tuning.attempt import Attempt
from cutegen.tuning.request import Request

__all__ = ["Attempts"]

#: Where an error is in the text of a kernel, which differs between configs.
_LINE = re.compile(r" at line \d+ of the source(, in \S+)?")


class Attempts(dict[Config, Attempt]):
    """The attempts of ``request`` so far.

    Args:
        request: What they are for.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._request = request

    def working(self) -> list[Attempt]:
        """Return the attempts that ended well."""
        return [attempt for attempt in self.values() if attempt.ok]

    def outcomes(self) -> Counter[str]:
        """Return how many candidates ended in each outcome."""
        return Counter(attempt.outcome for attempt in self.values() if attempt.done)

    @property
    def kernels(self) -> int:
        """Kernels behind the candidates with an outcome: those that differ in run-time knobs share one."""
        return len({attempt.kernel for attempt in self.values() if attempt.done})

    @property
    def untried(self) -> int:
        """Candidates without an outcome."""
        return sum(not attempt.done for attempt in self.values())

    @property
    def failed(self) -> tuple[str, ...]:
        """Sentences on why candidates do not work: each reason once, with the first config that has it."""
        reasons: dict[str, list[Attempt]] = {}
        for attempt in self.values():
            if attempt.done and not attempt.ok and attempt.outcome not in ("invalid", "pruned"):
                reasons.setdefault(_LINE.sub("", attempt.error), []).append(attempt)
        return tuple(
            f"{self._short(first.config)}{f' and {len(others)} more' if others else ''}: {first.error}"
            for first, *others in reasons.values()
        )

    def no_winner(self) -> NoWinnerError:
        """Return the error that says that no attempt works, with the first reason."""
        first = next((attempt.error for attempt in self.values() if attempt.error), "")
        why = first and f"; the first failed with: {first}"
        return NoWinnerError(f"no working kernel for {self._request.problem}{why}", self.outcomes())

    def _short(self, config: Config) -> str:
        space = space_of(config, self._request.problem.family, self._request.arch)
        return space.short(config, names=True)
