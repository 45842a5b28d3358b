"""Which cross-entropy configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.shared import Preference, row_space


def build_space(arch: Arch) -> Space:
    """Return the space of cross-entropy bound to ``arch``; warps exchange a maximum, a sum of powers, the
    target's logit and the sum of all logits."""
    return row_space(
        "cross_entropy", arch, weight=False, sums_of_row=4, values_at_a_time=8, preference=Preference(turn=2)
    )
