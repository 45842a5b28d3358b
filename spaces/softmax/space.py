"""Which softmax configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.shared import Preference, row_space


def build_space(arch: Arch) -> Space:
    """Return the space of softmax bound to ``arch``; warps exchange a maximum and a sum."""
    return row_space(
        "softmax",
        arch,
        weight=False,
        sums_of_row=2,
        values_at_a_time=16,
        preference=Preference(smem_above=126_976),
    )
