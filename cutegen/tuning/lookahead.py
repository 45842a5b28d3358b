"""Ranks the kernels of the problem after the next one in a thread, while the GPU measures the present one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

from cutegen.families.registry import find_space
from cutegen.search.strategies import precompute
from cutegen.tuning.request import Request

__all__ = ["Lookahead"]


class Lookahead:
    """Predicts the candidates of one request at a time before they are needed.

    Predictions take a second or two and only fill a cache. Compiling and reading the database stay with the
    loop, which also meets the error if a prediction fails.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cutegen-rank")
        self._last: Future[None] | None = None

    def begin(self, request: Request) -> None:
        """Start predicting for ``request``, if its run will search."""
        if request.searches:
            self._last = self._thread.submit(_rank, request)

    def wait(self) -> None:
        """Return when the predictions that were begun are done: computing them twice would take longer."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Cancel what is not begun; do not wait for the rest."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _rank(request: Request) -> None:
    space = find_space(request.problem.family, request.arch)
    precompute(space, request.problem, request.sm_count, request.fixed or None)
