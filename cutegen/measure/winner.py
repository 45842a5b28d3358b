"""Which entry wins where time is the objective: in the rounds that decide, in bursts and back to back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cutegen.measure.statistics import choose_in_all
from cutegen.measure.timing import Timing

__all__ = ["choose_fastest"]


def choose_fastest(
    timings: Mapping[str, Timing], preference: Sequence[str], apart: Collection[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return the winner, and all that are statistically tied with the fastest in the rounds that decide.

    See :func:`~cutegen.measure.statistics.choose_in_all`, which has the errors.

    Args:
        timings: Measured together.
        preference: All names, the one that wins ties first.
        apart: Those whose times back to back do not count.
    """
    return choose_in_all(
        {name: timing.paired for name, timing in timings.items()},
        {name: timing.bursts for name, timing in timings.items() if timing.bursts is not None},
        {
            name: t.back_to_back
            for name, t in timings.items()
            if t.back_to_back is not None and name not in apart
        },
        preference,
        [name for name, timing in timings.items() if timing.keeps_up],
    )
