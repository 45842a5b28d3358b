"""The seconds that a caller gives to compiling and measuring."""

from __future__ import annotations

from cutegen.errors import UsageError
from cutegen.text import shown

__all__ = ["require_budget"]


def require_budget(budget_s: float | None) -> float | None:
    """Return ``budget_s``, None for no limit.

    Raises:
        UsageError: It is no number above 0: nothing would be done, in silence.
    """
    if budget_s is None:
        return None
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise UsageError(f"budget_s is {shown(budget_s)}; valid: seconds, more than 0, or None for no limit")
    return budget_s
