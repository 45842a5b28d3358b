"""Ranks the kernels of the problem after the next one in a thread, while the GPU measures the present one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from cutegen.families.registry import find_space
from cutegen.search.strategies import precompute
from cutegen.tuning.request import Request

__all__ = ["Lookahead"]


class Lookahead:
    """Thinks about one request at a time before it is needed.

    Only predictions are worked out, which takes a second or two and touches nothing but a memory of them:
    asking the compiler and reading the database stay with the loop. A failure is left to the loop to find.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cutegen-rank")
        self._last: Future[None] | None = None

    def begin(self, request: Request) -> None:
        """Start on ``request`` if predictions will be asked for."""
        if request.searches:
            self._last = self._thread.submit(_rank, request)

    def wait(self) -> None:
        """Return when what was begun is known: to work it out twice at a time would take longer."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Give up what is not begun; does not wait for the rest."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _rank(request: Request) -> None:
    space = find_space(request.problem.family, request.arch)
    precompute(space, request.problem, request.sm_count, request.fixed or None)
