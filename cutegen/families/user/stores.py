"""Which tensors the text of an entry reads and writes, as far as assignments and calls of its file show it.

A draft that is finished by a person may be wrong: what is passed to other files is not followed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Uses", "find_uses"]

_Function = ast.FunctionDef
#: What a name stands for: the parameters of the entry whose memory it shows.
_Origins = frozenset[str]
_NOTHING: _Origins = frozenset()
#: Functions whose result shows the memory of an argument, and which argument that is; others give copies,
#: numbers, or tensors in registers of the same shape.
_VIEWS = {
    **dict.fromkeys(("local_tile", "zipped_divide", "logical_divide", "tiled_divide", "flat_divide"), 0),
    **dict.fromkeys(("make_tensor", "domain_offset", "composition", "coalesce", "group_modes", "slice_"), 0),
    **dict.fromkeys(("local_partition", "recast_tensor", "recast_ptr", "append_ones", "prepend_ones"), 0),
    **dict.fromkeys(("partition_S", "partition_D", "partition_A", "partition_B", "partition_C", "retile"), 0),
    **dict.fromkeys(("filter", "filter_zeros", "select", "align"), 0),
    **dict.fromkeys(("make_tiled_tma_atom", "make_tiled_tma_atom_A", "make_tiled_tma_atom_B"), 1),
    "tma_partition": -1,
}
_COPIES = re.compile(r"(\w+_)?copy(_\w+)?")
_STORES = re.compile(r"store\w*|st_\w+")
_ATOMICS = re.compile(r"(\w+_)?(atomic|red)(_\w+)?")


@dataclass
class Uses:
    """Parameters of an entry whose memory it reads, whose it writes, and which it compares with None."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


def find_uses(tree: ast.Module, entry: _Function | ast.ClassDef) -> Uses:
    """Return what becomes of the parameters of ``entry``: a function, or a class that is called."""
    uses = Uses()
    functions = {node.name: node for node in tree.body if isinstance(node, _Function)}
    methods: dict[str, _Function] = {}
    start = entry if isinstance(entry, _Function) else None
    if isinstance(entry, ast.ClassDef):
        methods = {node.name: node for node in entry.body if isinstance(node, _Function)}
        start = methods.get("__call__")
    if start is not None:
        names = {name: frozenset({name}) for name in _parameters(start)}
        _Reader(functions, methods, uses, set()).read(start, names)
    return uses


@dataclass
class _Reader:
    """Follows tensors through the functions of a file; each is read once for each way it is called."""

    functions: Mapping[str, _Function]
    methods: Mapping[str, _Function]
    uses: Uses
    seen: set[tuple[str, frozenset[tuple[str, _Origins]]]]

    def read(self, function: _Function, given: Mapping[str, _Origins]) -> None:
        """Add to ``uses`` what a function does with what it is given."""
        key = function.name, frozenset(given.items())
        if key in self.seen:
            return
        self.seen.add(key)
        scope = _Scope(dict(given))
        scope.learn(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                self._call(node, scope)
            elif isinstance(node, ast.Subscript):
                self._subscript(node, scope)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                self.uses.read |= scope.origins(node.target.value)
            elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "None":
                self.uses.optional |= scope.origins(node.left)

    def _subscript(self, node: ast.Subscript, scope: _Scope) -> None:
        if isinstance(node.ctx, ast.Store):
            self.uses.written |= scope.origins(node.value)
        elif not scope.is_slice(node.slice):
            self.uses.read |= scope.origins(node.value)

    def _call(self, call: ast.Call, scope: _Scope) -> None:
        name = _name_of(call)
        callee = self._callee(call)
        if callee is not None:
            self.read(callee, _bound(callee, call, scope))
        elif isinstance(call.func, ast.Attribute) and scope.origins(call.func.value):
            touched = scope.origins(call.func.value)
            if name in ("store", "fill"):
                self.uses.written |= touched
            elif name == "load":
                self.uses.read |= touched
        elif _COPIES.fullmatch(name) and len(call.args) >= 2:
            self.uses.read |= scope.origins(call.args[-2])
            self.uses.written |= scope.origins(call.args[-1])
        elif call.args and (_STORES.fullmatch(name) or _ATOMICS.fullmatch(name)):
            self.uses.written |= scope.origins(call.args[0])
            if _ATOMICS.fullmatch(name):
                self.uses.read |= scope.origins(call.args[0])

    def _callee(self, call: ast.Call) -> _Function | None:
        """Return the function of this file that is called."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id)
        if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "self":
            return self.methods.get(call.func.attr)
        return None


@dataclass
class _Scope:
    """What the names of a function stand for, and those of coordinates that leave a dimension open."""

    names: dict[str, _Origins]
    slices: set[str] = field(default_factory=set)

    def learn(self, function: _Function) -> None:
        """Take in assignments until nothing is new: later ones may come first in a loop."""
        pairs = list(_assignments(function))
        while True:
            before = dict(self.names), set(self.slices)
            for target, value in pairs:
                self._assign(target, value)
            if before == (self.names, self.slices):
                return

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = self.names.get(target.id, _NOTHING) | self.origins(value)
            if self.is_slice(value) and isinstance(value, ast.Tuple):
                self.slices.add(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            each = self._elements(value, len(target.elts))
            for part, origins in zip(target.elts, each, strict=True):
                if isinstance(part, ast.Name):
                    self.names[part.id] = self.names.get(part.id, _NOTHING) | origins

    def _elements(self, value: ast.expr, count: int) -> list[_Origins]:
        """Return what each of so many parts of a value stands for."""
        if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == count:
            return [self.origins(part) for part in value.elts]
        if isinstance(value, (ast.ListComp, ast.GeneratorExp)) and len(value.generators) == 1:
            loop = value.generators[0]
            if isinstance(loop.iter, (ast.Tuple, ast.List)) and isinstance(loop.target, ast.Name):
                inner = [_Scope({**self.names, loop.target.id: self.origins(e)}) for e in loop.iter.elts]
                if len(inner) == count:
                    return [scope.origins(value.elt) for scope in inner]
        # An atom and its tensor, or parts of shared and of global memory: the last one shows the argument's.
        return [*[_NOTHING] * (count - 1), self.origins(value)]

    def origins(self, node: ast.expr) -> _Origins:
        """Return the parameters whose memory an expression shows."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, _NOTHING)
        if isinstance(node, ast.Subscript):
            return self.origins(node.value)
        if isinstance(node, ast.Attribute):
            return self.origins(node.value) if node.attr in ("iterator", "ptr") else _NOTHING
        if isinstance(node, ast.BinOp):  # an address and an offset
            return self.origins(node.left)
        if isinstance(node, ast.IfExp):
            return self.origins(node.body) | self.origins(node.orelse)
        if isinstance(node, ast.Call):
            at = _VIEWS.get(_name_of(node))
            if at is not None and len(node.args) > at:
                return self.origins(node.args[at])
        return _NOTHING

    def is_slice(self, index: ast.expr) -> bool:
        """Return whether a coordinate leaves a dimension open, so that a tensor at it is a tensor."""
        parts = list(ast.walk(index))
        return any(isinstance(part, ast.Constant) and part.value is None for part in parts) or any(
            isinstance(part, ast.Name) and part.id in self.slices for part in parts
        )


def _assignments(function: _Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.target, node.value


def _bound(function: _Function, call: ast.Call, scope: _Scope) -> dict[str, _Origins]:
    """Return what the parameters of a function stand for in a call."""
    names = _parameters(function)
    found = {name: scope.origins(value) for name, value in zip(names, call.args, strict=False)}
    found |= {word.arg: scope.origins(word.value) for word in call.keywords if word.arg in names}
    return {name: origins for name, origins in found.items() if origins}


def _parameters(function: _Function) -> list[str]:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return names[1:] if names[:1] == ["self"] else names


def _name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
