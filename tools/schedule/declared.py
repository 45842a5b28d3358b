"""The numbers of a kernel's barriers, read from its rendered text: what is compiled, not what was meant."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cutegen.errors import RenderError

__all__ = ["Pipeline", "pipelines"]

_BITS = {"BFloat16": 16, "Float16": 16, "Float8E4M3FN": 8, "Float8E5M2": 8, "Int8": 8}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Pipeline:
    """One pipeline as the text creates it.

    Attributes:
        kind: The class, such as ``PipelineTmaAsync``.
        stages: Its stages.
        arrivals: Arrivals that free a stage; 0 where nothing frees any.
        size: Bytes that fill a stage; 0 where none are counted.
        fillers: Arrivals that a filled stage takes beside those bytes, of a Hopper load pipeline.
    """

    kind: str
    stages: int
    arrivals: int
    size: int
    fillers: int = 1


def pipelines(text: str) -> tuple[Pipeline, ...]:
    """Return the pipelines that a rendered kernel creates, in order of the text.

    Raises:
        RenderError: A number is not made of constants of the kernel.
    """
    tree = ast.parse(text)
    known: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            _learn(node, known)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_pipeline(node)]
    return tuple(_pipeline(call, known) for call in sorted(calls, key=lambda call: call.lineno))


def _learn(node: ast.Assign, known: dict[str, int]) -> None:
    """Remember assignments of constants, and of types by their width."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=True):
            _remember(name, part, known)
    else:
        _remember(target, value, known)


def _remember(target: ast.expr, value: ast.expr, known: dict[str, int]) -> None:
    if not isinstance(target, ast.Name):
        return
    if isinstance(value, ast.Attribute) and value.attr in _BITS:
        known[f"{target.id}.width"] = _BITS[value.attr]
        return
    try:
        known[target.id] = _number(value, known)
    except RenderError:
        known.pop(target.id, None)  # made at run time


def _is_pipeline(call: ast.Call) -> bool:
    return ast.unparse(call.func).startswith("pipeline.Pipeline") and ast.unparse(call.func).endswith(
        ".create"
    )


def _pipeline(call: ast.Call, known: Mapping[str, int]) -> Pipeline:
    words = {word.arg: word.value for word in call.keywords}
    arrivals, size = words.get("consumer_group"), words.get("tx_count")
    filling = words.get("producer_group")
    kind = ast.unparse(call.func).split(".")[1]
    return Pipeline(
        kind=kind,
        stages=_number(words["num_stages"], known),
        arrivals=_group(arrivals, known) if arrivals is not None else 0,
        size=_number(size, known) if size is not None else 0,
        fillers=_group(filling, known) if kind == "PipelineTmaAsync" and filling is not None else 1,
    )


def _group(node: ast.expr, known: Mapping[str, int]) -> int:
    """Return the size of a ``CooperativeGroup(agent, size)``; 1 if it names none."""
    if not isinstance(node, ast.Call):
        raise RenderError(f"line {node.lineno}: {ast.unparse(node)} is no group written out")
    return _number(node.args[1], known) if len(node.args) > 1 else 1


def _number(node: ast.expr, known: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left, known), _number(node.right, known))
    name = ast.unparse(node)
    if name not in known:
        raise RenderError(f"line {node.lineno}: {name} is no constant of the kernel")
    return known[name]
