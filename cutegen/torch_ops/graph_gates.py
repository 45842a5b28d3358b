"""Gated GEMMs in graphs of Inductor: a GEMM, or two, whose results are gated by an activation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutegen.torch_ops.graph_patterns import activation_behind

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = ["GatedProduct", "gated_product", "insert"]

#: Whether a fact about sizes holds without a new guard.
Known = Callable[[Any], bool]


@dataclass(frozen=True)
class GatedProduct:
    """What one kernel computes.

    Attributes:
        activation: Of the gate.
        x: What both weights are multiplied with.
        product: The GEMM that holds the gate, and what it gates if both are one GEMM.
        up: The GEMM that is gated, if it is another one.
        last: The result.
    """

    activation: str
    x: Any
    product: Any
    up: Any
    last: Any


def gated_product(node: Any, known: Known) -> GatedProduct | None:
    """Return the gated GEMM of which a node is the GEMM that holds the gate; None if there is none."""
    if not _is_product(node):
        return None
    for source in (node, *_views(node)):
        found = _packed(node, source, known) or _apart(node, source, known)
        if found is not None:
            return found
    return None


def _is_product(node: Any) -> bool:
    """Return whether a node is a GEMM with the rows of a weight, as kernels of gated GEMMs read it."""
    import torch

    if getattr(node, "target", None) is not torch.ops.aten.mm.default:
        return False
    x, w = (argument.meta["val"] for argument in node.args)
    return bool(x.stride(-1) == 1 and w.stride(0) == 1 and x.dtype == node.meta["val"].dtype)


def _views(node: Any) -> Iterator[Any]:
    """Yield the views of a GEMM's rows in more dimensions."""
    import torch

    aten = torch.ops.aten
    for user in node.users:
        if user.target in (aten.view.default, aten.reshape.default):
            yield user


def _packed(node: Any, source: Any, known: Known) -> GatedProduct | None:
    """Return the gated GEMM of two halves of a GEMM's columns."""
    import torch

    for split in source.users:
        if split.target is not torch.ops.aten.split.Tensor or len(split.args) != 3 or split.kwargs:
            continue
        value, (_, size, dim) = source.meta["val"], split.args
        if dim not in (-1, value.dim() - 1) or not known(value.shape[-1] == 2 * size):
            continue
        halves = {user.args[1]: user for user in split.users if user.target is operator.getitem}
        if len(split.users) != 2 or set(halves) != {0, 1}:
            continue
        found = _gated(halves[0])
        if found is not None and found[2] is halves[1] and len(halves[1].users) == 1:
            return GatedProduct(found[0], node.args[0], node, None, found[1])
    return None


def _apart(node: Any, source: Any, known: Known) -> GatedProduct | None:
    """Return the gated GEMM of two GEMMs with the same rows, which nothing else reads."""
    found = _gated(source)
    if found is None or any(len(each.users) > 1 for each in (node, found[2])):
        return None
    name, last, other = found
    up = other if _is_product(other) else other.args[0] if other in _rows_of(other) else None
    if up is None or not _is_product(up) or up is node or len(up.users) > 1:
        return None
    if not _are_same(node.args[0], up.args[0]):
        return None
    one, another = node.args[1].meta["val"], up.args[1].meta["val"]
    if not known(one.shape[1] == another.shape[1]) or not known(one.stride(1) == another.stride(1)):
        return None
    return GatedProduct(name, node.args[0], node, up, last)


def _rows_of(node: Any) -> tuple[Any, ...]:
    """Return a node if it is a view of a GEMM's rows; else nothing."""
    first = node.args[0] if node.args else None
    return tuple(_views(first)) if hasattr(first, "users") else ()


def _gated(gate: Any) -> tuple[str, Any, Any] | None:
    """Return the activation of a value, its product with another, and the other, if nobody looks in."""
    import torch

    found = activation_behind(gate)
    if found is None or len(found[1].users) != 1:
        return None
    name, activated = found
    last = next(iter(activated.users))
    if last.target is not torch.ops.aten.mul.Tensor or last.args[0] is last.args[1]:
        return None
    other: Any = last.args[1] if last.args[0] is activated else last.args[0]
    if not hasattr(other, "meta") or other.meta["val"].shape != gate.meta["val"].shape:
        return None
    return (name, last, other) if last.meta["val"].dtype == gate.meta["val"].dtype else None


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two nodes are one, or the same view of one."""
    if one is other:
        return True
    import torch

    aten = torch.ops.aten
    views = one.target is other.target and one.target in (aten.view.default, aten.reshape.default)
    return views and one.args == other.args


def insert(found: GatedProduct, strides_matter: bool) -> None:
    """Put the operator in the place of what it computes; a GEMM that something else reads is written too.

    Args:
        found: What is computed.
        strides_matter: Whether the compiler must keep the strides of the operands.
    """
    import torch

    graph, product, last = found.product.graph, found.product, found.last
    rows = product.meta["val"].shape[0]
    with graph.inserting_before(product if found.up is None else last):
        weights = [_weight(graph, each) for each in (product, found.up) if each is not None]
        given = [*weights, None, None] if found.up is None else [None, *weights]
        layout = "halves" if found.up is None else "split"
        made = graph.call_function(torch.ops.cutegen.gated_gemm.default)
        result = graph.call_function(operator.getitem, (made, 0))
        value = product.meta["val"].new_empty((rows, last.meta["val"].shape[-1]))
        result.meta = {**product.meta, "val": value}
        seen = graph.call_function(torch.ops.aten.view.default, (result, list(last.meta["val"].shape)))
        seen.meta = dict(last.meta)
    _complete(made, (found.x, *given, found.activation, layout, ["out"], None), [result], strides_matter)
    last.replace_all_uses_with(seen)
    graph.eliminate_dead_code()
    if found.up is None and product.users:
        with graph.inserting_after(made):
            pre = graph.call_function(operator.getitem, (made, 1))
        pre.meta = dict(product.meta)
        product.replace_all_uses_with(pre)
        _complete(made, (*made.args[:-2], ["out", "pre"], None), [result, pre], strides_matter)
        graph.eliminate_dead_code()


def _complete(made: Any, arguments: tuple[Any, ...], results: list[Any], strides_matter: bool) -> None:
    """Give the operator's node its arguments, and what the compiler knows of them and of the results."""
    made.args = arguments
    made.meta = {**results[0].meta, "val": [result.meta["val"] for result in results]}
    if strides_matter:
        made.meta["eager_input_vals"] = (tuple(getattr(x, "meta", {"val": x})["val"] for x in arguments), {})


def _weight(graph: Graph, product: Any) -> Any:
    """Return the rows of the weight of a GEMM."""
    import torch

    permute, columns = torch.ops.aten.permute.default, product.args[1]
    if columns.target is permute and list(columns.args[1]) == [1, 0]:
        return columns.args[0]
    made = graph.call_function(permute, (columns, [1, 0]))
    made.meta = {**product.meta, "val": columns.meta["val"].t()}
    return made
