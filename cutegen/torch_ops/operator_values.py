"""What a call of an operator of a declared family has in the places of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

__all__ = ["MAKE", "count_modes", "have_own_rules"]


class _Make:
    """Stands for an output that the operator is to allocate."""

    def __repr__(self) -> str:
        return "MAKE"


MAKE = _Make()


@cache
def _plain_kinds() -> frozenset[type]:
    import torch

    return frozenset((type(None), _Make, torch.Tensor, torch.nn.Parameter))


@cache
def count_modes() -> Callable[[], int]:
    """Return what counts the modes of torch that see operators now, as those that trace or count do."""
    import torch

    found: Callable[[], int] = torch._C._len_torch_dispatch_stack
    return found


def have_own_rules(values: Sequence[Any]) -> bool:
    """Return whether the class of a tensor has rules of its own, as that of fake tensors, which have no
    memory: torch must see the call. What is no tensor at all has none."""
    plain = _plain_kinds()
    for value in values:  # no generator: one costs as much as all that it asks
        if type(value) not in plain:
            import torch

            return any(isinstance(v, torch.Tensor) and type(v) not in plain for v in values)
    return False
