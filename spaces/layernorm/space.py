"""Which LayerNorm configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.shared import row_space

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=0.515,
    cta=0.441,
    exchange=0.442,
    cluster=0.242,
    access=0.0961,
    threads=0.261,
    late=0.0902,
    smem=0.883,
    start=0.0213,
    overlap=1.55,
    registers=17,
    per_value=1.6,
    per_weight=1,
    shared=6,
)


def build_space(arch: Arch) -> Space:
    """Return the space of LayerNorm bound to ``arch``; warps exchange a mean and squares about it."""
    return row_space(
        "layernorm",
        arch,
        sums_of_row=2,
        values_at_a_time=16,
        beside_values=(32, 24),
        values_of_warps=(16, 24),
        terms=TERMS,
        ring="stays",
    )
