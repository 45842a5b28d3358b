"""Baselines that torch compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["compile_for_one_problem"]


def compile_for_one_problem(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled by torch for the shapes of one problem."""
    import torch

    # Shapes that another problem compiled must not make this one's symbolic.
    torch._dynamo.reset()
    found: Callable[..., Any] = torch.compile(function, dynamic=False)
    return found
