"""Which configs of RMSNorm to 8 bits exist, which are legal, and what follows from each, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.registers import RegistersTaken
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=1.75,
    cta=0.00256,
    exchange=1.53e-08,
    cluster=0.0729,
    messages=0.21,
    access=0.0111,
    threads=0.283,
    late=0.453,
    smem=1.38,
    volume=0.28,
    start=0.0341,
    overlap=1.84,
)
#: tools/fit_row_registers.py prints them.
REGISTERS = RegistersTaken(
    working=13.3, per_value=1.42, per_weight=0.5, reading=11.6, per_sum=0.675, shared=8
)


def build_space(arch: Arch) -> Space:
    """Return the space bound to ``arch``; warps exchange a sum and a maximum, for which the weight is needed
    before the exchange in any case."""
    return row_space(
        "rmsnorm_quantized",
        arch,
        weight=False,
        sums_of_row=2,
        registers=Registers(values_at_a_time=8),
        ring="leaves",
        default=DefaultByTerms(TERMS, REGISTERS),
    )
