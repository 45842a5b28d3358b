"""Which softmax configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=0.544,
    cta=0.881,
    exchange=0.147,
    cluster=0.0989,
    messages=0.0513,
    access=0.0625,
    threads=0.122,
    late=0.302,
    smem=1.64,
    volume=0.198,
    start=0.0349,
    overlap=2.02,
    registers=13,
    per_value=1.14,
    per_weight=0.5,
    shared=3,
)


def build_space(arch: Arch) -> Space:
    """Return the space of softmax bound to ``arch``; warps exchange a maximum and a sum."""
    return row_space(
        "softmax",
        arch,
        weight=False,
        sums_of_row=2,
        registers=Registers(values_at_a_time=16),
        default=DefaultByTerms(TERMS, turn=4),
    )
