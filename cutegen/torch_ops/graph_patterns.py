"""Activations in graphs of Inductor, which sees gelu and silu as the arithmetic that they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from cutegen.families.gemm.stand_in import activation as activation_of

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, Node

__all__ = ["activation_behind", "patterns"]

_NAMES = ("relu", "gelu", "gelu_tanh", "silu")


def activation_behind(node: Node) -> tuple[str, Node] | None:
    """Return the activation of a node's value, and the node of its result; None if something else reads it.

    Nothing may read what lies between either: backward passes do, for which the activation stays a call.
    """
    for name, pattern in patterns(node.meta["val"].dtype).items():
        if (last := _match(pattern, node)) is not None:
            return name, last
    return None


@cache
def patterns(dtype: torch.dtype) -> Mapping[str, Graph]:
    """Return the graph of each activation of tensors in ``dtype``, decomposed as Inductor does it."""
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    return {name: _traced(name, dtype, table) for name in _NAMES}


def _traced(name: str, dtype: torch.dtype, table: Any) -> Graph:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    function = activation_of(name)
    trace: Any = make_fx(lambda x: function(x), decomposition_table=table)
    found: Graph = trace(torch.empty(2, 8, dtype=dtype)).graph
    return found


def _match(pattern: Graph, source: Node) -> Node | None:
    """Return the node that computes of ``source`` what a pattern does of its input, and nobody looks in."""
    found: dict[Any, Node] = {}
    last = source
    for node in pattern.nodes:
        if node.op == "placeholder":
            found[node] = source
        elif node.op == "call_function":
            like = _same_call(node, found)
            if like is None:
                return None
            found[node] = last = like
    inside = set(found.values())
    inner = inside - {last}
    return last if all(user in inside for each in inner for user in each.users) else None


def _same_call(node: Node, found: Mapping[Any, Node]) -> Node | None:
    arguments: tuple[Any, ...] = tuple(found.get(argument, argument) for argument in node.args)
    origin = next(argument for argument in node.args if argument in found)
    for user in found[origin].users:
        if user.target == node.target and user.args == arguments and user.kwargs == node.kwargs:
            return user
    return None
