"""What the text of an entry tells without being executed: what it is, its parameters, its decorators."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutegen.errors import FamilyError
from cutegen.families.user.closure import find_source
from cutegen.families.user.stores import Uses, find_uses
from cutegen.text import did_you_mean

__all__ = ["EntrySource", "Parameter", "read_entry"]


@dataclass(frozen=True)
class Parameter:
    """A parameter of an entry.

    Attributes:
        name: Its name.
        annotation: The text of its annotation; empty without one.
        default: The text of its default; empty without one.
    """

    name: str
    annotation: str = ""
    default: str = ""

    @property
    def optional(self) -> bool:
        """Whether it has a default."""
        return bool(self.default)


@dataclass(frozen=True)
class EntrySource:
    """A function or class as its file has it.

    Attributes:
        kind: ``class``, ``jit`` (a function that launches), ``kernel`` (one that is launched), ``function``.
        path: The file.
        line: Where it begins.
        constructor: Parameters of a class's constructor, None if another file has it; empty for a function.
        call: Parameters of the function, or of ``__call__``.
        knobs: What its decorators ``tunable`` say, as ``Kernel`` takes it.
        doc: Its docstring.
        uses: Parameters of ``call`` whose memory is read or written, as far as the file shows it.
        open_call: Whether ``call`` may lack some: it takes any, or a decorator or a parent decides.
    """

    kind: str
    path: Path
    line: int
    constructor: tuple[Parameter, ...] | None
    call: tuple[Parameter, ...]
    knobs: dict[str, Any]
    doc: str = ""
    open_call: bool = False
    uses: Uses = field(default_factory=Uses)


def read_entry(entry: str, folder: Path) -> EntrySource | None:
    """Return what the text of ``module:name`` tells; None if no file defines it at its top level.

    Raises:
        FamilyError: The file is no Python or has no such name, or a decorator ``tunable`` has values that are
            not written out.
    """
    module, _, name = entry.partition(":")
    try:
        path = find_source(module, folder)
    except FamilyError:  # whoever compiles it will miss it; listing a space does not
        return None
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise FamilyError(f"{path}{f', line {line}' if line else ''}: {error}") from error
    kinds = (ast.FunctionDef, ast.ClassDef)
    node = next((n for n in tree.body if isinstance(n, kinds) and n.name == name), None)
    if node is None:
        _require_bound(name, tree, module, path)
        return None
    knobs = _knobs(node, path)
    doc, uses = ast.get_docstring(node) or "", find_uses(tree, node)
    if isinstance(node, ast.FunctionDef):
        open_call = _is_open(node)
        return EntrySource(_kind(node), path, node.lineno, (), _parameters(node), knobs, doc, open_call, uses)
    methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    others = [decorator for decorator in node.decorator_list if not _is_tunable(decorator)]
    elsewhere = None if node.bases or others else ()
    constructor = _parameters(methods["__init__"])[1:] if "__init__" in methods else elsewhere
    own = methods.get("__call__")
    call, open_call = (_parameters(own)[1:], _is_open(own)) if own else ((), True)
    return EntrySource("class", path, node.lineno, constructor, call, knobs, doc, open_call, uses)


def _require_bound(name: str, tree: ast.Module, module: str, path: Path) -> None:
    """Refuse a name that nothing in the file can define; one that is imported, say, is found by the child."""
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
    if name not in bound and not bound & {"*", "__getattr__", "globals", "exec", "setattr"}:
        defined = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        raise FamilyError(f"module {module} ({path}) has no {name}{did_you_mean(name, defined)}")


def _is_open(node: ast.FunctionDef) -> bool:
    """Whether more than the text of its parameters decides what a function takes."""
    words = {
        ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in node.decorator_list
    }
    return bool(node.args.vararg or node.args.kwarg or words - {"jit", "kernel", "tunable"})


def _kind(node: ast.FunctionDef) -> str:
    words = {
        ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in node.decorator_list
    }
    return "jit" if "jit" in words else "kernel" if "kernel" in words else "function"


def _parameters(node: ast.FunctionDef) -> tuple[Parameter, ...]:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return tuple(Parameter(a.arg, _text(a.annotation), _text(default)) for a, default in pairs)


def _text(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def _is_tunable(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == "tunable"


def _knobs(node: ast.FunctionDef | ast.ClassDef, path: Path) -> dict[str, Any]:
    """Return what decorators say, the topmost first."""
    found: dict[str, Any] = {}
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call) or not _is_tunable(decorator):
            continue
        try:
            names, values = (ast.literal_eval(argument) for argument in decorator.args)
        except (ValueError, TypeError) as error:
            raise FamilyError(
                f"{path}, line {decorator.lineno}: the values of tunable are not written out; write "
                'tunable("a, b", [(1, 2), (3, 4)]), or give knobs to Kernel'
            ) from error
        taken = {name.strip() for key in found for name in key.split(",")}
        twice = [name.strip() for name in names.split(",") if name.strip() in taken]
        if twice:
            raise FamilyError(
                f"{path}, line {decorator.lineno}: knob {twice[0]} is named twice; name it once"
            )
        found[names] = values
    return found
