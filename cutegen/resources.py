"""Where templates and spaces live: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from cutegen.errors import ResourceError

__all__ = ["load_space_module", "resource_root"]

_PACKAGE = Path(__file__).resolve().parent


def resource_root(kind: str) -> Path:
    """Return the folder of ``templates`` or ``spaces``.

    Raises:
        ResourceError: Neither the installed package nor a checkout holds it.
    """
    for candidate in (_PACKAGE / kind, _PACKAGE.parent / kind):
        if candidate.is_dir():
            return candidate
    raise ResourceError(f"{kind} not found in {_PACKAGE} or {_PACKAGE.parent}; reinstall cutegen")


@cache
def load_space_module(family: str, arch_family: str) -> ModuleType:
    """Import ``spaces/<family>/<arch_family>.py`` and return it.

    Raises:
        ResourceError: There is no such file.
    """
    path = resource_root("spaces") / family / f"{arch_family}.py"
    name = f"cutegen_spaces.{family}.{arch_family}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ResourceError(f"kernel family {family!r} has no space for {arch_family}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
