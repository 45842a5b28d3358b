"""Which kernel families there are, where their kernels lie, and problems parsed by the family that they name.

A family is found in the package, through the entry points of group ``cutegen.families``, or in a folder that
:func:`load_families` was told of. In such a folder each family has a folder of its name::

    rmsnorm/family.py        FAMILY = ..., a cutegen.family.Family
    rmsnorm/space.py         build_space(arch), or one file for each target: sm90.py, sm100.py
    rmsnorm/kernel.py.j2     the template, or one for each target: sm90.py.j2, sm100.py.j2

The kernel of a declaration file (:mod:`cutegen.kernel`), of which :func:`load_kernel` was told, is a family
too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from cutegen.arch import Arch
from cutegen.errors import ConfigError, CutegenError, FamilyError, ProblemError, ResourceError, UsageError
from cutegen.families.family_file import place_of_error, read_family
from cutegen.families.resources import load_module, load_space_module, resource_root
from cutegen.families.shipped import shipped_families
from cutegen.families.space_imports import with_imports
from cutegen.family import Family, Problem
from cutegen.space import Config, Space
from cutegen.text import did_you_mean, shown

if TYPE_CHECKING:
    from cutegen.families.user.family import UserFamily

__all__ = [
    "SOURCES",
    "as_problem",
    "families",
    "find_family",
    "find_space",
    "find_spaces",
    "find_template",
    "has_space",
    "is_legal",
    "load_families",
    "load_kernel",
    "loaded_folders",
    "parse_problem",
    "require_legal",
    "require_sources",
    "short_list_file",
    "space_files",
    "space_of",
    "spaces_beside",
]

#: Whose kernels there are: rendered from our templates, or NVIDIA's own from its Operator API.
SOURCES = ("cutegen", "operators")
_ENTRY_POINTS = "cutegen.families"


@dataclass(frozen=True)
class _Registered:
    """A family and where its templates and spaces are.

    Attributes:
        family: The family.
        templates: Folder of its templates.
        spaces: Folder of its space files.
        load_space: Imports one of these by its name without suffix; what it returns has ``build_space``.
        declaration: The file that declares it, if it is the kernel of one.
        template_name: The file of its template, if that is not named after a target.
    """

    family: Family
    templates: Path
    spaces: Path
    load_space: Callable[[str], Any]
    declaration: Path | None = None
    template_name: str = ""

    def template(self, arch: Arch, source: str, algorithm: str) -> Path | None:
        """Return the template of an architecture, None if there is none."""
        folder = self.templates if source == "cutegen" else self.templates / source
        folder = folder / algorithm if algorithm else folder
        names = [f"{arch.family}.py.j2", "kernel.py.j2"]
        names = [self.template_name] if self.template_name else names
        return next((folder / name for name in names if (folder / name).is_file()), None)


#: Families by name. Loading one under a name that is taken is refused, so no entry ever changes its meaning.
_registered: dict[str, _Registered] = {}


def families() -> tuple[str, ...]:
    """Return the names of the kernel families, such as ``gemm``."""
    return tuple(sorted(_all()))


def find_family(name: str) -> Family:
    """Return the family called ``name``.

    Raises:
        ResourceError: There is none; the message lists those there are.
    """
    found = _registered.get(name)
    return _find(name).family if found is None else found.family


def parse_problem(line: str) -> Problem:
    """Return the problem that ``line`` describes: its first word names the family.

    Raises:
        ProblemError: There is no such family, or the line is not one of its problems.
    """
    name = line.split(maxsplit=1)[0] if line.strip() else ""
    if name not in _all():
        raise ProblemError(
            f"{line!r} names no kernel family; known: {', '.join(families())}; a kernel of yours must be "
            "loaded first (cutegen.load, --kernel FILE.py)"
        )
    return find_family(name).parse(line)


def as_problem(given: Problem | str) -> Problem:
    """Return a problem, or that of its line.

    Raises:
        ProblemError: As :func:`parse_problem`.
        UsageError: It is neither.
    """
    if isinstance(given, str):
        return parse_problem(given)
    if not hasattr(given, "signature"):
        raise UsageError(
            f"{shown(given)} is no problem; valid: problems, and lines such as 'gemm 64x64x64 bf16 kk'"
        )
    return given


def load_families(folder: Path) -> tuple[Family, ...]:
    """Make the families in the folders of ``folder`` known, and return them.

    Loading the same folder again does nothing. A file is a declaration, see :func:`load_kernel`.

    Raises:
        FamilyError: A ``family.py`` cannot be read, declares no ``FAMILY``, or one whose name is taken or
            differs from its folder's. The message names the file.
        ResourceError: ``folder`` holds no family.
    """
    if folder.is_file():
        return (load_kernel(folder),)
    paths = sorted(folder.absolute().glob("*/family.py"))
    if not paths:
        raise ResourceError(f"{folder} holds no kernel family; each is a folder with a family.py")
    return tuple(_load_folder(path) for path in paths)


def load_kernel(path: Path) -> UserFamily:
    """Make the kernel of a declaration file known as a family, and return it.

    Loading the same file again does nothing.

    Raises:
        FamilyError: The file cannot be read, declares no kernel or several, or one that contradicts itself or
            whose name is taken. The message names the file.
    """
    from cutegen.families.user.declaration_file import read_declaration  # here, for few programs need them
    from cutegen.families.user.declared_space import build_space

    path = path.absolute()
    for found in _all().values():
        if found.declaration == path:
            return cast("UserFamily", found.family)
    if not path.is_file():
        raise FamilyError(f"{path} is no file; a declaration of a kernel is wanted, see docs/own_kernel.md")
    family = read_declaration(path)
    if family.name in _all():
        raise FamilyError(f"{path}: a family called {family.name!r} exists already; rename the kernel")
    templates = path.parent if family.kernel.template else resource_root("templates") / "user"
    builder = SimpleNamespace(build_space=lambda arch: build_space(family.kernel, arch))
    _registered[family.name] = _Registered(
        family, templates, path.parent, lambda stem: builder, path, family.kernel.template
    )
    return family


def loaded_folders() -> tuple[Path, ...]:
    """Return what :func:`load_families` was told of, for processes that must know it too."""
    root = resource_root("templates")
    outside = (
        found.declaration or found.templates.parent
        for found in _all().values()
        if found.declaration or found.templates.parent != root
    )
    return tuple(dict.fromkeys(outside))


def _load_folder(path: Path) -> Family:
    name, folder = path.parent.name, path.parent
    known = _all().get(name)
    if known is not None and known.templates == folder:
        return known.family
    if known is not None:
        raise FamilyError(
            f"{path}: a family called {name!r} exists already; rename the folder and the family"
        )
    family = read_family(path)

    def load_space(stem: str) -> Any:
        return load_module(folder / f"{stem}.py", f"cutegen_families.{name}.{stem}")

    _registered[name] = _Registered(family, folder, folder, load_space)
    return family


def _all() -> dict[str, _Registered]:
    if not _registered:
        for family in shipped_families():
            _registered[family.name] = _in_package(family)
        _load_entry_points()
    return _registered


def _in_package(family: Family) -> _Registered:
    templates, spaces = (resource_root(kind) / family.name for kind in ("templates", "spaces"))
    return _Registered(family, templates, spaces, lambda stem: load_space_module(family.name, stem))


def _load_entry_points() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=_ENTRY_POINTS):
        try:
            path = Path(point.load().__file__)
        except Exception as error:  # importing another package may raise anything
            raise FamilyError(
                f"entry point {point.name} = {point.value} of {_ENTRY_POINTS} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        _load_folder(path)


def _find(name: str) -> _Registered:
    try:
        return _all()[name]
    except KeyError:
        raise ResourceError(
            f"unknown kernel family {name!r}{did_you_mean(name, families())}; known: {', '.join(families())}"
        ) from None


def require_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Return ``sources`` in the order of :data:`SOURCES`, each once.

    Raises:
        UsageError: There is no such source, or none is given.
    """
    unknown = [source for source in sources if source not in SOURCES]
    if unknown or not sources:
        raise UsageError(f"sources {', '.join(unknown) or 'are none'}; valid: {', '.join(SOURCES)}")
    return tuple(source for source in SOURCES if source in sources)


def find_template(family: str, arch: Arch, source: str = "cutegen", algorithm: str = "") -> Path:
    """Return the template that renders ``family`` for ``arch`` from kernels of ``source``.

    Args:
        family: Its name.
        arch: The target.
        source: Whose kernels.
        algorithm: Which of our own: one of the family's ``algorithms``, or ``""`` for the general one.

    Raises:
        ResourceError: There is none; the message says for which targets there are some.
    """
    registered = _find(family)
    path = registered.template(arch, source, algorithm)
    if path is not None:
        return path
    folder = registered.templates if source == "cutegen" else registered.templates / source
    folder = folder / algorithm if algorithm else folder
    whose = "" if source == "cutegen" else f" from {source}"
    targets = ", ".join(sorted(found.name.removesuffix(".py.j2") for found in folder.glob("sm*.py.j2")))
    own = f"it has some for {targets}, and " if targets else ""
    others = [name for name in families() if _find(name).template(arch, source, algorithm) is not None]
    raise ResourceError(
        f"no template of {family!r}{whose} for {arch}; {own}for {arch} there are those of: "
        f"{', '.join(others) or 'no family'}"
    )


def find_space(family: str, arch: Arch, source: str = "cutegen", algorithm: str = "") -> Space:
    """Return the space of ``family`` bound to ``arch``: our own kernels, or those of another source.

    Args:
        family: Its name.
        arch: The target.
        source: Whose kernels.
        algorithm: Which of our own: one of the family's ``algorithms``, or ``""`` for the general one.

    Raises:
        ConfigError: There is no such source or algorithm.
        ResourceError: There is no such family, or not for this architecture.
        FamilyError: The file declares no ``build_space``.
    """
    return _space(family, arch, source, algorithm)


def has_space(family: str, arch: Arch) -> bool:
    """Return whether there are kernels of ``family`` for ``arch``."""
    try:
        find_space(family, arch)
    except ResourceError:
        return False
    return True


@cache
def find_spaces(family: str, arch: Arch) -> tuple[Space, ...]:
    """Return the spaces of all our own algorithms of ``family`` on ``arch``, the general one's first.

    Raises:
        ResourceError: There is no such family, or not for this architecture.
        FamilyError: As :func:`find_space`.
    """
    algorithms = find_family(family).algorithms
    return tuple(_space(family, arch, "cutegen", algorithm) for algorithm in ("", *algorithms))


@cache
def spaces_beside(space: Space) -> tuple[Space, ...]:
    """Return the spaces of the family's other algorithms, if ``space`` is that of its general one."""
    general, *others = find_spaces(space.family, space.arch)
    return tuple(others) if space is general else ()


@cache
def _space(family: str, arch: Arch, source: str, algorithm: str) -> Space:
    if source not in SOURCES:
        raise ConfigError(f"source={source} is nobody's; valid: {', '.join(SOURCES)}")
    found = _find(family)
    if algorithm and (algorithm not in found.family.algorithms or source != "cutegen"):
        there = ", ".join(found.family.algorithms) or "none"
        raise ConfigError(
            f"algorithm={shown(algorithm)} is not among those of {family} from {source}; valid: {there}"
        )
    find_template(family, arch, source, algorithm)
    names = [arch.family, "space"] if source == "cutegen" and not algorithm else [algorithm or source]
    name = next((name for name in names if (found.spaces / f"{name}.py").is_file()), names[0])
    try:
        space = _built(found, name, arch)
    except FamilyError:
        _forget_module(found.spaces / f"{name}.py")
        raise
    named = {"algorithm"} if algorithm else set()
    single = [knob for knob, domain in space.domains.items() if len(domain) == 1 and knob not in named]
    if single and source == "cutegen":
        raise FamilyError(
            f"{found.spaces / name}.py: knob {single[0]} has one value, so there is nothing to choose; "
            "make it a derived value"
        )
    if space.algorithm != algorithm:
        raise FamilyError(
            f"{found.spaces / name}.py: its configs say algorithm={space.algorithm}, not {algorithm}"
        )
    return space


def _built(registered: _Registered, name: str, arch: Arch) -> Space:
    """Return what ``build_space`` of a file returns for ``arch``.

    Raises:
        FamilyError: There is none, it or the file raises something, or it returns no space of the family.
    """
    file = registered.spaces / f"{name}.py"
    try:
        build = getattr(registered.load_space(name), "build_space", None)
        space = None if build is None else build(arch)
    except CutegenError:
        raise
    except Exception as error:  # the file may be a user's, and raise anything
        place = place_of_error(file, error)
        raise FamilyError(f"{place}: no space for {arch}: {type(error).__name__}: {error}") from error
    if build is None:
        raise FamilyError(f"{file} declares no build_space(arch)")
    if not isinstance(space, Space):
        raise FamilyError(f"{file}: build_space({arch}) returned {space!r:.40}; it returns a Space")
    if space.family != registered.family.name:
        raise FamilyError(
            f"{file}: the space is of family {space.family!r}, but the file one of {registered.family.name!r}"
        )
    return space


def _forget_module(file: Path) -> None:
    """Have a file read again once it is mended."""
    for name, module in [*sys.modules.items()]:
        if getattr(module, "__file__", None) == str(file):
            del sys.modules[name]


def space_files(family: str) -> tuple[Path, ...]:
    """Return the files that declare the spaces of ``family``, with those of other spaces that they import.

    The kernel of a declaration file has none, see :meth:`cutegen.family.Family.declaration`.

    Raises:
        ResourceError: There is no such family.
    """
    found = _find(family)
    return () if found.declaration else with_imports(found.spaces.glob("*.py"))


def short_list_file(family: str) -> Path | None:
    """Return the file with the short lists of ``family``, None if there is none.

    Raises:
        ResourceError: There is no such family.
    """
    path = _find(family).spaces / "short_list.json"
    return path if path.is_file() and _find(family).declaration is None else None


def space_of(config: Config, family: str, arch: Arch) -> Space:
    """Return the space that ``config`` comes from, by source and algorithm; raises as :func:`find_space`."""
    return find_space(family, arch, config.source, config.algorithm)


def is_legal(config: Config, problem: Problem, arch: Arch) -> bool:
    """Return whether ``config`` is complete and valid in its own space: see :func:`require_legal`."""
    try:
        return require_legal(config, problem, arch)
    except ConfigError:
        return False


def require_legal(config: Config, problem: Problem, arch: Arch) -> bool:
    """Return True if ``config`` is complete and valid in its own space.

    For configs that come from a file: another version, or a person, may have written a source, knobs or
    values that do not exist here.

    Raises:
        ConfigError: It is not; the message says why.
    """
    try:
        space_of(config, problem.family, arch).require(problem, config)
    except ResourceError as error:
        raise ConfigError(str(error)) from error
    return True
