"""Which modules a kernel is made of, found by reading their imports; nothing is executed.

A module is named by the digest of its syntax tree, so a comment changes nothing and any code does. Python's
own modules and the compiler's packages are left out: the toolchain names those. What a module loads in a way
that cannot be read here is found by the child that compiles it, which refuses to go on without knowing it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from cutegen.digest import digest
from cutegen.errors import FamilyError
from cutegen.system.interpreter import import_path

__all__ = [
    "TOOLCHAIN_PACKAGES",
    "Closure",
    "Opening",
    "file_identity",
    "find_closure",
    "find_source",
]

#: Packages that the toolchain names, and cutegen, whose decorators change no kernel.
TOOLCHAIN_PACKAGES = frozenset({"cutlass", "cuda", "nvidia_cutlass_dsl", "tvm_ffi", "cutegen"})
#: Packages that are named by their version: what reads them all is slow, and they are not edited in place.
_BY_VERSION = frozenset(
    {"torch", "triton", "numpy", "jax", "jaxlib", "tensorflow", "cupy", "scipy", "pandas"}
)
#: Modules of one package beyond which it is named by its version too.
_MOST_MODULES = 400


@dataclass(frozen=True)
class Opening:
    """What the child that compiles a kernel must know to open its modules, and to see that they are the same.

    Attributes:
        folders: Where modules are looked for before anywhere else.
        torch: Whether a module imports torch while it is loaded, so that the real one must be there.
        files: Digest of each file that was read, by its path.
        packages: Packages that are named by their version, or not at all.
        environment: Variables that are part of the kernel's name.
        sm_count: What is answered to questions about the number of multiprocessors.
    """

    folders: tuple[str, ...]
    torch: bool
    files: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    environment: tuple[str, ...]
    sm_count: int = 0


@dataclass(frozen=True)
class Closure:
    """The modules that an entry needs, directly or not.

    Attributes:
        modules: Name and digest of each; of packages that are named by their version, that.
        environment: Variables that they read, by names that are written out.
        files: Path and digest of each file.
        packages: Packages that are named by their version.
        wants_torch: The modules that import torch while they are loaded.
    """

    modules: tuple[tuple[str, str], ...]
    environment: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    wants_torch: tuple[str, ...]

    def variables(self) -> tuple[tuple[str, str], ...]:
        """Return the variables that are set, each with a digest of its value, which may be a secret."""
        found = ((name, os.environ.get(name)) for name in self.environment)
        return tuple((name, digest(value, length=12)) for name, value in found if value is not None)


@dataclass(frozen=True)
class _Read:
    """What reading one file tells.

    Attributes:
        digest: Of its syntax tree.
        imports: Modules that it may load: ``("a.b", "")``, or ``("a.b", "c")`` where ``c`` may be one too.
        at_once: Those of them that are loaded with the file.
        environment: Variables that it reads.
    """

    digest: str
    imports: tuple[tuple[str, str], ...]
    at_once: frozenset[str]
    environment: tuple[str, ...]


@dataclass
class _Search:
    """Finds modules by name.

    Args:
        folders: Where to look first.
    """

    folders: Sequence[str]
    specs: dict[str, ModuleSpec | None] = field(default_factory=dict)

    def find(self, name: str) -> ModuleSpec | None:
        """Return where a module is, None if it is nowhere; its parents are not imported."""
        if name not in self.specs:
            self.specs[name] = self._find(name)
        return self.specs[name]

    def _find(self, name: str) -> ModuleSpec | None:
        parent, _, _ = name.rpartition(".")
        if not parent:
            spec = PathFinder.find_spec(name, [*self.folders, *import_path()])
            return spec or _by_other_finders(name)
        above = self.find(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        folders = list(above.submodule_search_locations)
        try:
            return PathFinder.find_spec(name, folders)
        except KeyError:  # a folder without __init__.py: Python looks for its parent among imported modules
            return _folder_spec(name, folders)


def _folder_spec(name: str, parents: Sequence[str]) -> ModuleSpec:
    """Return the spec of a package that is nothing but folders."""
    found = ModuleSpec(name, None, is_package=True)
    folders = (Path(parent) / name.rpartition(".")[2] for parent in parents)
    found.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return found


def _by_other_finders(name: str) -> ModuleSpec | None:
    """Return where a package is that was installed for editing; it is not imported."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def find_source(module: str, folder: Path) -> Path:
    """Return the file of the module of an entry.

    Raises:
        FamilyError: There is none; the message says where it was looked for.
    """
    spec = _Search([str(folder)]).find(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        what = "is no Python file" if spec else "is not there"
        here = "" if folder == Path.cwd() else ", but not in the working directory"
        raise FamilyError(
            f"module {module} {what}; it is looked for in {folder}, then where Python looks (PYTHONPATH, "
            f"installed packages){here}"
        )
    return Path(spec.origin)


def find_closure(
    module: str, folder: Path, more: Sequence[str] = (), environment: Sequence[str] = ()
) -> Closure:
    """Return the modules that ``module`` needs.

    Args:
        module: The entry's.
        folder: Where modules are looked for first.
        more: Modules that are needed besides, though no import names them.
        environment: Variables that are read besides.

    Raises:
        FamilyError: The module, or one of ``more``, is not there, or a file is no Python.
    """
    further = [name for name in more if name != "torch"]
    for name in (module, *further):
        find_source(name, folder)
    walk = _Walk(_Search([str(folder)]))
    for name in (module, *further):
        walk.visit(name, at_once=True)
    if len(further) < len(more):
        walk.want_torch("the declaration")
    return walk.closure(environment)


class _Walk:
    def __init__(self, search: _Search) -> None:
        self._search = search
        self._files: dict[str, tuple[str, str]] = {}
        self._packages: dict[str, str] = {}
        self._environment: set[str] = set()
        self._torch: dict[str, None] = {}
        self._at_once: set[str] = set()
        self._seen: set[tuple[str, bool]] = set()
        self._counts: dict[str, int] = {}

    def closure(self, environment: Sequence[str]) -> Closure:
        modules = {**{name: digested for name, (_, digested) in self._files.items()}, **self._packages}
        return Closure(
            tuple(sorted(modules.items())),
            tuple(sorted({*self._environment, *environment})),
            tuple(sorted(self._files.values())),
            tuple(sorted(self._packages)),
            tuple(self._torch),
        )

    def want_torch(self, who: str) -> None:
        """Note that somebody needs torch."""
        self._torch[who] = None
        self._read("torch")

    def visit(self, name: str, *, at_once: bool) -> None:
        """Take in a module, its parents, and what they import.

        Args:
            name: Its full name.
            at_once: Whether it is loaded as soon as the entry is.
        """
        waiting = [(name, at_once)]
        while waiting:
            current, now = waiting.pop()
            if (current, now) in self._seen or (current, True) in self._seen:
                continue
            self._seen.add((current, now))
            parent, _, _ = current.rpartition(".")
            waiting += [(parent, now)] if parent else []
            read = self._read(current)
            if read is None:
                continue
            for wanted, part in read.imports:
                soon = now and wanted in read.at_once
                if soon and wanted.partition(".")[0] == "torch":
                    self._torch[current] = None
                waiting.append((wanted, soon))
                if part and self._is_module(f"{wanted}.{part}"):
                    waiting.append((f"{wanted}.{part}", soon))

    def _is_module(self, name: str) -> bool:
        return not self._is_left_out(name) and self._search.find(name) is not None

    def _is_left_out(self, name: str) -> bool:
        top = name.partition(".")[0]
        return top in TOOLCHAIN_PACKAGES or top in sys.stdlib_module_names or top in self._packages

    def _read(self, name: str) -> _Read | None:
        """Return what the file of a module tells; None if there is nothing to read."""
        top = name.partition(".")[0]
        if self._is_left_out(name):
            return None
        if top in _BY_VERSION:
            self._packages[top] = _version(top, self._search.find(top))
            return None
        spec = self._search.find(name)
        if spec is None or spec.origin is None or not spec.has_location:
            return None
        self._counts[top] = self._counts.get(top, 0) + 1
        if self._counts[top] > _MOST_MODULES:
            self._packages[top] = _version(top, self._search.find(top))
            self._files = {n: f for n, f in self._files.items() if n.partition(".")[0] != top}
            return None
        path = Path(spec.origin)
        read = _read_file(path, name, spec.submodule_search_locations is not None)
        self._files[name] = (spec.origin, read.digest)
        self._environment.update(read.environment)
        return read


def _version(top: str, spec: ModuleSpec | None) -> str:
    """Return ``==1.2.3`` from the package's metadata, without importing it; empty if it is not installed."""
    if spec is None or not spec.submodule_search_locations:
        return "absent"
    beside = Path(next(iter(spec.submodule_search_locations))).parent
    for path in sorted(beside.glob(f"{top}-*.dist-info")):
        return f"=={path.name.removeprefix(f'{top}-').removesuffix('.dist-info')}"
    return "==unknown"


def file_identity(path: Path) -> str:
    """Return the digest by which a file is named: of a module's syntax tree, of any other file's bytes.

    Raises:
        FamilyError: It cannot be read, or is no Python though it is named so.
    """
    return _read_file(path, "", False).digest


def _read_file(path: Path, module: str, is_package: bool) -> _Read:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FamilyError(f"{path} cannot be read: {error.strerror}") from error
    return _understand(path, module, is_package, data)


@cache  # by its bytes: times of files are as coarse as two seconds
def _understand(path: Path, module: str, is_package: bool, data: bytes) -> _Read:
    if path.suffix != ".py":
        return _Read(digest(data), (), frozenset(), ())
    try:
        tree = ast.parse(data, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise FamilyError(f"{path}{f', line {line}' if line else ''}: this is no Python: {error}") from error
    package = module if is_package else module.rpartition(".")[0]
    visitor = _Imports(package)
    visitor.visit(tree)
    imports = tuple(dict.fromkeys(visitor.found))
    environment = tuple(dict.fromkeys(_variables(tree)))
    return _Read(digest(ast.dump(tree)), imports, frozenset(visitor.at_once), environment)


class _Imports(ast.NodeVisitor):
    """Collects imports, and whether they are executed when the file is."""

    def __init__(self, package: str) -> None:
        self.found: list[tuple[str, str]] = []
        self.at_once: set[str] = set()
        self._package = package
        self._depth = 0

    def _add(self, module: str, part: str = "") -> None:
        self.found.append((module, part))
        if not self._depth:
            self.at_once.add(module)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        words = self._package.split(".") if node.level else []
        kept = words[: len(words) - node.level + 1] if node.level else []
        module = ".".join([*kept, *([node.module] if node.module else [])])
        for alias in node.names if module else ():
            self._add(module, alias.name)

    def _later(self, node: ast.AST) -> None:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._later(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._later(node)

    def visit_Try(self, node: ast.Try) -> None:
        """A module that may be missing is not needed: whoever imports it so has something instead."""
        handled = {
            name.id for h in node.handlers for name in ast.walk(h.type or h) if isinstance(name, ast.Name)
        }
        if handled & {"ImportError", "ModuleNotFoundError", "Exception"}:
            self._depth += 1
            for statement in node.body:
                self.visit(statement)
            self._depth -= 1
            rest: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
            for part in rest:
                self.visit(part)
        else:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Of a test for type checkers, or for being run as a program, only the other branch is executed."""
        words = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        words |= {name.attr for name in ast.walk(node.test) if isinstance(name, ast.Attribute)}
        if words & {"TYPE_CHECKING", "__name__"}:
            self._depth += 1
            for statement in node.body:
                self.visit(statement)
            self._depth -= 1
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)


def _variables(tree: ast.AST) -> Iterator[str]:
    """Yield the environment variables that code reads by names that are written out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            words = ast.unparse(node.func)
            if re.search(r"(environ\.\w+|getenv)$", words):
                yield from _text(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            yield from _text(node.slice)
        elif isinstance(node, ast.Compare) and any(
            ast.unparse(c).endswith("environ") for c in node.comparators
        ):
            yield from _text(node.left)


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
