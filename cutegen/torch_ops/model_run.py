"""One run of a model, recorded: as it is, or with its linear layers swapped for as long as it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cutegen.torch_ops.modules import optimize, restore_one
from cutegen.torch_ops.recording import Recording, record

if TYPE_CHECKING:
    import torch

__all__ = ["record_run"]


def record_run(model: torch.nn.Module, inputs: Sequence[Any], *, training: bool) -> Recording:
    """Return what one call of ``model`` records; with ``training`` the gradients of its sum as well.

    Layers are swapped as :func:`cutegen.optimize` does and swapped back, but for those that were
    swapped before, and compiled models, whose layers are compiled in. Buffers and gradients are afterwards
    what they were. Memory that PyTorch keeps for later is given back: who measures next needs some.
    """
    import torch

    compiled = hasattr(model, "_orig_mod")
    found = None if compiled else optimize(model)
    swapped = () if found is None else (*found.layers, *found.norms, *found.gates, *found.ropes)
    try:
        with record() as recording, _unchanged(model, inputs), torch.set_grad_enabled(training):
            result = model(*inputs)
            if training:
                _sum(result).backward()
            del result
    finally:
        for name in swapped:
            restore_one(model.get_submodule(name))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return recording


def _sum(outputs: Any) -> Any:
    """Return the sum of all elements of all outputs that have gradients."""
    from torch.utils import _pytree

    return sum(
        leaf.float().sum() for leaf in _pytree.tree_leaves(outputs) if getattr(leaf, "requires_grad", False)
    )


@contextmanager
def _unchanged(model: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """Give gradients and buffers back what they were, at the end."""
    import torch

    leaves = [*model.parameters(), *(i for i in inputs if getattr(i, "is_leaf", False))]
    grads = [(leaf, leaf.grad) for leaf in leaves]
    sums = [leaf.main_grad for leaf in leaves if getattr(leaf, "main_grad", None) is not None]
    before = [(tensor, tensor.clone()) for tensor in (*model.buffers(), *sums)]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in grads:
            leaf.grad = grad
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
