"""Which softmax configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=1.18,
    cta=0.0515,
    exchange=0.0697,
    cluster=0.112,
    access=0.0162,
    threads=0.0592,
    late=0.0175,
    smem=0.952,
    volume=0.35,
    start=0.0112,
    overlap=1.3,
    registers=13.0,
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
