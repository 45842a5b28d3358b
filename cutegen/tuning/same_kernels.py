"""Configs of a user's kernel that compile to one kernel: it is measured once, and unused knobs are named."""

from __future__ import annotations

from itertools import combinations

from cutegen.build import Artifact
from cutegen.space import Config, Space, format_value
from cutegen.tuning.attempt import Attempt

__all__ = ["SameKernels", "unfit"]


def unfit(artifact: Artifact, sm_count: int) -> str:
    """Return why a GPU of ``sm_count`` multiprocessors must not run a kernel; empty if it may."""
    if artifact.sm_count in (0, sm_count):
        return ""
    return (
        f"its code asked for the number of multiprocessors, and was told {artifact.sm_count}; this GPU has "
        f"{sm_count}; declare sm_count={sm_count}"
    )


class SameKernels:
    """Remembers which configs compile to the same kernel."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, tuple[int, ...]], Attempt] = {}
        self._traces: dict[Config, str] = {}

    def note(self, attempt: Attempt) -> str:
        """Note a compiled attempt; return why it need not be measured, empty if it must."""
        trace = attempt.artifact.trace if attempt.artifact else ""
        if not trace:
            return ""
        self._traces[attempt.config] = trace
        first = self._first.setdefault((trace, attempt.launch.scalars), attempt)
        if first.config == attempt.config:
            return ""
        other = {k: v for k, v in first.config.items() if attempt.config[k] != v}
        words = " ".join(f"{knob}={format_value(value)}" for knob, value in other.items())
        return f"the same kernel as with {words}, which is measured in its place"

    def dead_knobs(self, space: Space) -> tuple[str, ...]:
        """Return a sentence for each knob that changed no kernel although several values were compiled."""
        found = []
        for knob in space.domains:
            if knob in space.run_time_knobs:
                continue
            pairs = [
                (a, b)
                for a, b in combinations(self._traces, 2)
                if a[knob] != b[knob] and all(a[k] == b[k] for k in space.domains if k != knob)
            ]
            if pairs and all(self._traces[a] == self._traces[b] for a, b in pairs):
                kernels = len(set(self._traces.values()))
                are = "are one kernel" if kernels == 1 else f"are {kernels} kernels"
                found.append(f"knob {knob} changes no kernel: {len(self._traces)} configs {are}")
        return tuple(found)
