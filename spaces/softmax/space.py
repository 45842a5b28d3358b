"""Which softmax configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.registers import RegistersTaken
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=0.971,
    cta=0.451,
    exchange=0.122,
    cluster=0.0968,
    messages=0.125,
    access=0.0797,
    threads=0.146,
    late=0.14,
    smem=1.85,
    volume=0.357,
    start=0.0806,
    overlap=1.76,
)
#: tools/fit_row_registers.py prints them.
REGISTERS = RegistersTaken(
    working=3.99, per_value=1.5, per_weight=0.584, reading=14.8, per_sum=1.19, shared=2.04
)


def build_space(arch: Arch) -> Space:
    """Return the space of softmax bound to ``arch``; warps exchange a maximum and a sum."""
    return row_space(
        "softmax",
        arch,
        weight=False,
        sums_of_row=2,
        registers=Registers(values_at_a_time=16),
        default=DefaultByTerms(TERMS, REGISTERS),
    )
