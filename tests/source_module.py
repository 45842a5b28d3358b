"""A module made of a text, as the code of models that other people wrote."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest


def module_of(monkeypatch: pytest.MonkeyPatch, text: str) -> ModuleType:
    """Return a module that runs ``text``; during the test it can be imported, as pickle does."""
    spec = importlib.util.spec_from_loader("model_of_somebody", loader=None)
    assert spec is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(text, "model_of_somebody.py", "exec"), vars(made))
    return made
