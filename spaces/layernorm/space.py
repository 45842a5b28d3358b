"""Which LayerNorm configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers, RowsInSmem

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
#: Source: an H200, 109 and 119 rows of 57480: CTAs of 512 threads with 56 KiB take 16 % less time than those
#: of 256 with 28.
FEW_IN_SMEM = 65_536
#: Source: an H200: with more than 32 values and weights for each lane of a warp, a row of 1208 elements takes
#: 36 % longer than on 64 threads, 568 rows 8 %.
LANE_VALUES = 32


def build_space(arch: Arch) -> Space:
    """Return the space of LayerNorm bound to ``arch``; warps exchange a mean and squares about it."""
    return row_space(
        "layernorm",
        arch,
        sums_of_row=2,
        registers=Registers(values_at_a_time=16, beside_values=(32, 24), values_of_warps=(16, 24)),
        in_smem=RowsInSmem(two_at_a_time=True),
        ring="stays",
        default=DefaultByTerms(TERMS, few_in_smem=FEW_IN_SMEM, lane_values=LANE_VALUES),
    )
