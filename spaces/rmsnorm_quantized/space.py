"""Which configs of RMSNorm to 8 bits exist, which are legal, and what follows from each, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.shared import Preference, row_space


def build_space(arch: Arch) -> Space:
    """Return the space bound to ``arch``; warps exchange a sum and a maximum, for which the weight is needed
    before the exchange in any case."""
    return row_space(
        "rmsnorm_quantized",
        arch,
        weight=False,
        sums_of_row=2,
        values_at_a_time=8,
        preference=Preference(values=32, smem_above=131_072),
    )
