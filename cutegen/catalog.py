"""Which kernel families exist, and whose kernels they have: the space and the template of each, by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cutegen.arch import Arch
from cutegen.errors import ConfigError, ResourceError, SpaceError, UsageError
from cutegen.problem import Problem
from cutegen.resources import load_space_module, resource_root
from cutegen.space import Config, Space

__all__ = ["SOURCES", "families", "find_space", "find_template", "is_legal", "require_sources", "space_of"]

#: Whose kernels there are: rendered from our templates, or NVIDIA's own from its Operator API.
SOURCES = ("cutegen", "operators")


def families() -> tuple[str, ...]:
    """Return the names of the kernel families, such as ``gemm``."""
    root = resource_root("templates")
    return tuple(sorted(path.name for path in root.iterdir() if any(path.glob("*.py.j2"))))


def require_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Return ``sources`` in the order of :data:`SOURCES`, each once.

    Raises:
        UsageError: There is no such source, or none is given.
    """
    unknown = [source for source in sources if source not in SOURCES]
    if unknown or not sources:
        raise UsageError(f"sources {', '.join(unknown) or 'are none'}; valid: {', '.join(SOURCES)}")
    return tuple(source for source in SOURCES if source in sources)


def find_template(family: str, arch: Arch, source: str = "cutegen") -> Path:
    """Return the template that renders ``family`` for ``arch`` from kernels of ``source``.

    Raises:
        ResourceError: There is none; the message lists the families.
    """
    folder = resource_root("templates") / family
    path = (folder if source == "cutegen" else folder / source) / f"{arch.family}.py.j2"
    if not path.is_file():
        whose = "" if source == "cutegen" else f" from {source}"
        targets = ", ".join(
            sorted(found.name.removesuffix(".py.j2") for found in path.parent.glob("sm*.py.j2"))
        )
        there = f"; it has some for {targets}" if targets else ""
        raise ResourceError(
            f"no template of {family!r}{whose} for {arch}{there}; families: {', '.join(families())}"
        )
    return path


def find_space(family: str, arch: Arch, source: str = "cutegen") -> Space:
    """Return the space of ``family`` bound to ``arch``: our own kernels, or those of another source.

    Raises:
        ConfigError: There is no such source.
        ResourceError: There is no such family, or not for this architecture.
        SpaceError: The file declares no ``build_space``.
    """
    return _space(family, arch, source)


@cache
def _space(family: str, arch: Arch, source: str) -> Space:
    if source not in SOURCES:
        raise ConfigError(f"source={source} is nobody's; valid: {', '.join(SOURCES)}")
    if family not in families():
        raise ResourceError(f"unknown kernel family {family!r}; known: {', '.join(families())}")
    find_template(family, arch, source)
    module = load_space_module(family, arch.family if source == "cutegen" else source)
    build = getattr(module, "build_space", None)
    if build is None:
        raise SpaceError(f"space of {family!r} for {arch.family} declares no build_space(arch)")
    space: Space = build(arch)
    return space


def space_of(config: Config, family: str, arch: Arch) -> Space:
    """Return the space that ``config`` comes from, by its source; raises as :func:`find_space`."""
    return find_space(family, arch, config.source)


def is_legal(config: Config, problem: Problem, arch: Arch) -> bool:
    """Return whether ``config`` is complete and legal in its own space.

    For configs that come from a file: another version, or a person, may have written a source, knobs or
    values that do not exist here, which counts as no.
    """
    try:
        space_of(config, problem.family, arch).require(problem, config)
    except (ConfigError, ResourceError):
        return False
    return True
