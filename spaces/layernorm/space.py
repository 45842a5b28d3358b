"""Which LayerNorm configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.shared import Preference, row_space


def build_space(arch: Arch) -> Space:
    """Return the space of LayerNorm bound to ``arch``; warps exchange a mean and squares about it."""
    return row_space(
        "layernorm",
        arch,
        sums_of_row=2,
        values_at_a_time=16,
        beside_values=(32, 24),
        preference=Preference(late_weight=True, values=32, even=True, turn=2),
    )
