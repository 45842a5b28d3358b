"""A family that is declared by a ``family.py`` outside of the package."""

from __future__ import annotations

import sys
from pathlib import Path

from cutegen.errors import CutegenError, FamilyError
from cutegen.families.resources import load_module
from cutegen.family import Family

__all__ = ["read_family"]


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
        raise FamilyError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(family, Family) and family.name == name:
        return family
    del sys.modules[module_name]  # so that it can be mended and read again
    if not isinstance(family, Family):
        raise FamilyError(f"{path} declares no FAMILY, or one that is no cutegen.family.Family")
    raise FamilyError(f"{path}: the family is called {family.name!r} but its folder {name!r}")
