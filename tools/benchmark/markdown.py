"""Pieces of rendered results: numbers rounded to one side, rows of tables, where something was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from statistics import median
from typing import Any

from tools.benchmark.results import Results

__all__ = ["down", "launches", "line", "short_commit", "tuning_words", "up", "where"]


#: What runs before each launch, in the sentence that says how something was measured; launches back to back,
#: as everything was measured at first, are not spoken of.
_LAUNCHES = {
    "alone": ", each launch behind a kernel that touches no operand, whose own time is taken off",
    "behind": ", each launch behind an element-wise kernel that writes the first input, whose own time is "
    "taken off",
}


def launches(policy: Mapping[str, Any]) -> str:
    """Return what runs before each launch under a policy, to end a clause with; empty for back to back."""
    return _LAUNCHES.get(policy.get("context", ""), "")


def up(value: float, digits: int) -> str:
    """Return ``value`` with ``digits`` decimals, never smaller than it is."""
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int) -> str:
    """Return ``value`` with ``digits`` decimals, never larger than it is."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=rounding):f}"


def tuning_words(seconds: Iterable[float | None]) -> str:
    """Return how long cutegen's tuning took, where more than one shape says so; else nothing."""
    known = [value for value in seconds if value is not None]
    if len(known) < 2:
        return ""
    return f"{up(median(known), 2)} s a shape in the median of {len(known)}, {up(max(known), 1)} s at most"


def line(cells: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def short_commit(commit: object) -> str:
    """Return a commit's first 12 digits; that a checkout differed from it is kept."""
    digits, dash, mark = str(commit).partition("-")
    return f"{digits[:12]}{dash}{mark}"


def where(results: Results) -> str:
    """Return the sentence that says on which GPU, with which software and from which commit."""
    conditions: Any = results.conditions
    gpu, software = conditions["gpu"], conditions["software"]
    first: Any = results.sessions[0] if results.sessions else {}
    dates = sorted({row.finished_at[:10] for row in results.shapes})
    commits = sorted({short_commit(session.get("commit", "")) for session in results.sessions})
    wanted = ("torch", "nvidia-cutlass-dsl", "quack-kernels", "nvidia-cutlass-operators")
    packages = [f"{name} {software['packages'][name]}" for name in wanted if name in software["packages"]]
    watts = [w for row in results.shapes if (w := row.reference.rounds_power_w)]
    power = f", up to {max(watts):.0f} W" if watts else ""
    return (
        f"{gpu['name']} ({gpu['sm_count']} SMs{power}), driver {first.get('driver', 'unknown')}, "
        f"CUDA {gpu['cuda_driver']}; {', '.join(packages)}; cutegen {software['cutegen']}, commit "
        f"{', '.join(commits)}; {' to '.join(dates[:1] + dates[-1:] if len(dates) > 1 else dates)}."
    )
