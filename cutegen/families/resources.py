"""Where templates and spaces lie: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from cutegen.errors import ResourceError

__all__ = ["load_module", "load_space_module", "resource_root"]

_PACKAGE = Path(__file__).resolve().parent.parent
#: The name under which ``spaces/`` is imported, so that the spaces of a family can share rules by relative
#: imports wherever the folder lies.
_SPACES = "cutegen_spaces"


@cache
def resource_root(kind: str) -> Path:
    """Return the folder of ``templates`` or ``spaces``.

    Raises:
        ResourceError: Neither the installed package nor a checkout holds it.
    """
    for candidate in (_PACKAGE / kind, _PACKAGE.parent / kind):
        if candidate.is_dir():
            return candidate
    raise ResourceError(f"{kind} not found in {_PACKAGE} or {_PACKAGE.parent}; reinstall cutegen")


def load_space_module(family: str, name: str) -> ModuleType:
    """Import ``spaces/<family>/<name>.py`` and return it.

    Raises:
        ResourceError: There is no such file.
    """
    if not (resource_root("spaces") / family / f"{name}.py").is_file():
        raise ResourceError(f"kernel family {family!r} has no space for {name}")
    if _SPACES not in sys.modules:
        package = ModuleType(_SPACES)
        package.__path__ = [str(resource_root("spaces"))]
        sys.modules[_SPACES] = package
    return importlib.import_module(f"{_SPACES}.{family}.{name}")


class _TextLoader(SourceFileLoader):
    """Compiles what a file holds now: bytecode is taken for current if size and second of the text agree."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_module(path: Path, name: str) -> ModuleType:
    """Import the file ``path`` under ``name`` and return it; what it raises while it is read passes through.

    Raises:
        ResourceError: There is no such file.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_TextLoader(name, str(path)))
    if not path.is_file() or spec is None or spec.loader is None:
        raise ResourceError(f"{path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
