"""Which kernel families exist: the space and the template of each, by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cutegen.arch import Arch
from cutegen.errors import ResourceError, SpaceError
from cutegen.resources import load_space_module, resource_root
from cutegen.space import Space

__all__ = ["families", "find_space", "find_template"]


def families() -> tuple[str, ...]:
    """Return the names of the kernel families, such as ``gemm``."""
    root = resource_root("templates")
    return tuple(sorted(path.name for path in root.iterdir() if any(path.glob("*.py.j2"))))


def find_template(family: str, arch: Arch) -> Path:
    """Return the template that renders ``family`` for ``arch``.

    Raises:
        ResourceError: There is none; the message lists the families.
    """
    path = resource_root("templates") / family / f"{arch.family}.py.j2"
    if not path.is_file():
        raise ResourceError(f"no template of {family!r} for {arch}; families: {', '.join(families())}")
    return path


@cache
def find_space(family: str, arch: Arch) -> Space:
    """Return the space of ``family`` bound to ``arch``.

    Raises:
        ResourceError: There is no such family, or not for this architecture.
        SpaceError: The file declares no ``build_space``.
    """
    if family not in families():
        raise ResourceError(f"unknown kernel family {family!r}; known: {', '.join(families())}")
    find_template(family, arch)
    module = load_space_module(family, arch.family)
    build = getattr(module, "build_space", None)
    if build is None:
        raise SpaceError(f"space of {family!r} for {arch.family} declares no build_space(arch)")
    space: Space = build(arch)
    return space
