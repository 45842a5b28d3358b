"""A registry of families that a test may fill, and that is as it was afterwards."""

from __future__ import annotations

from functools import cache

import pytest

from cutegen.families import registry

__all__ = ["without_user_families"]


def without_user_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget kernels of users for the length of a test; spaces that it loads are not those of other tests."""
    others = {name: found for name, found in registry._all().items() if found.declaration is None}
    monkeypatch.setattr(registry, "_registered", others)
    monkeypatch.setattr(registry, "_space", cache(registry._space.__wrapped__))
