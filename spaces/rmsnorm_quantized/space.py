"""Which configs of RMSNorm to 8 bits exist, which are legal, and what follows from each, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=1.05,
    cta=0.372,
    exchange=0.0,
    cluster=0.0812,
    messages=0.288,
    access=0.0429,
    threads=0.0148,
    late=0.042,
    smem=1.54,
    volume=0.303,
    start=0.0234,
    overlap=1.3,
    registers=17.2,
    per_value=1.18,
    per_weight=0.5,
    shared=2.8,
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
        default=DefaultByTerms(TERMS),
    )
