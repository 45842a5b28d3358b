"""What ``torch.utils.flop_counter`` counts for operators that multiply matrices: 2 * m * n * k.

Element-wise kernels count nothing, as those of torch do. The module of the counter imports Triton, which
takes 0.2 s, more than a first call may cost; so it gets the formulas when a program imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from cutegen.system.imports import when_imported

__all__ = ["give_formulas"]

_COUNTER = "torch.utils.flop_counter"
_Shape = Sequence[int]


def _gemm(a: _Shape, b: _Shape, *others: Any, **named: Any) -> int:
    return 2 * prod(a) * b[-1]


def _gemm_into(out: _Shape, a: _Shape, b: _Shape, *others: Any, **named: Any) -> int:
    return _gemm(a, b)


def _gated_gemm(x: _Shape, w: _Shape | None, gate: _Shape | None, *others: Any, **named: Any) -> int:
    rows = w[0] if w is not None else 2 * gate[0] if gate is not None else 0
    return 2 * prod(x) * rows


def _grouped(a: _Shape, b: _Shape, *others: Any, **named: Any) -> int:
    """Of all rows of ``a``: how many belong to a group, only the device knows."""
    return 2 * prod(a) * b[1]


#: By the name of the operator; of shapes in the order of its schema.
_FORMULAS: dict[str, Callable[..., int]] = {
    "gemm": _gemm,
    "gemm_into": _gemm_into,
    "gated_gemm": _gated_gemm,
    "grouped_gemm": _grouped,
    "grouped_gemm_masked": _grouped,
    "grouped_gated_gemm": _grouped,
    "grouped_gated_gemm_masked": _grouped,
    "grouped_gemm_blocks": _grouped,
}


def give_formulas(name: str) -> None:
    """Give the counter the formula of an operator that was just registered with all overloads, if it has one.

    Args:
        name: ``cutegen::`` and this is the operator's.
    """
    if name in _FORMULAS:
        when_imported(_COUNTER, lambda: _give(name))


def _give(name: str) -> None:
    """Register a formula, with counters that count already too: each has a copy of the formulas."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    counter: Any = sys.modules[_COUNTER]
    packet, formulas = getattr(torch.ops.cutegen, name), counter.flop_registry
    if packet not in formulas:
        counter.register_flop_formula(packet)(_FORMULAS[name])
    for mode in _get_current_dispatch_mode_stack():
        copied = getattr(getattr(mode, "counter", mode), "flop_registry", {})
        copied.setdefault(packet, formulas[packet])
