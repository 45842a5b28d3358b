"""Code that waits for a module of somebody else's, whose import takes too long to make it for that alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call ``call`` as soon as the module ``name`` is imported, now if it is.

    Args:
        name: Qualified name of a module of a package that is imported already.
        call: Is called once, in the thread that imports the module.
    """
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder):
    """Finds one module as all others do, and lets its loader call something behind the module's code."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self.name, self.call = name, call
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._is_asking:  # by itself: the lock of the module keeps others out
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self)
        return spec


class _Calling(Loader):
    """A loader that ends the wait once the module is there; of one that fails, it goes on."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self._loader, self._waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
        self._waiting.call()
