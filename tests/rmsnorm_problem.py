"""Problems of RMSNorm, shortly written."""

from __future__ import annotations

from typing import Any

from cutegen.families.declared import DeclaredProblem
from cutegen.families.rmsnorm.family import RMSNORM

__all__ = ["rows"]


def rows(m: int, n: int, **options: Any) -> DeclaredProblem:
    """Return the problem of ``m`` rows of ``n`` elements."""
    return RMSNORM.problem({"m": m, "n": n}, options)
