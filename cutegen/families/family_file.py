"""A family that is declared by a ``family.py`` outside of the package."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from cutegen.errors import CutegenError, FamilyError
from cutegen.families.resources import load_module
from cutegen.family import Family

__all__ = ["place_of_error", "read_family"]


def read_family(path: Path) -> Family:
    """Return the ``FAMILY`` of a file, whose name is that of its folder.

    Raises:
        FamilyError: The file cannot be read, declares none, or one of another name. The message names it.
    """
    name = path.parent.name
    module_name = f"cutegen_families.{name}"
    try:
        family = getattr(load_module(path, module_name), "FAMILY", None)
    except CutegenError as error:
        raise FamilyError(f"{path}: {error}") from error
    except Exception as error:  # running a user's module may raise anything
        place = place_of_error(path, error)
        raise FamilyError(f"{place} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(family, Family) and family.name == name:
        return family
    del sys.modules[module_name]  # so that it can be mended and read again
    if not isinstance(family, Family):
        raise FamilyError(f"{path} declares no FAMILY, or one that is no cutegen.family.Family")
    raise FamilyError(f"{path}: the family is called {family.name!r} but its folder {name!r}")


def place_of_error(path: Path, error: BaseException, line: int = 1) -> str:
    """Return the file, with the line in it that led to ``error``, else ``line``."""
    if isinstance(error, SyntaxError) and error.lineno and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f"{path}, line {lines[-1] if lines else line}"
