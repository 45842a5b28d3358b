"""Which LayerNorm configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.registers import RegistersTaken
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers, RowsInSmem

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=0.962,
    cta=0.456,
    exchange=0.08,
    cluster=0.0803,
    messages=0.137,
    access=0.0325,
    threads=0.00779,
    late=0.0591,
    smem=1.42,
    volume=0.458,
    start=0.0434,
    overlap=1.32,
)
#: tools/fit_row_registers.py prints them.
REGISTERS = RegistersTaken(
    working=13.6, per_value=1.54, per_weight=1.06, reading=15.5, per_sum=7.73, shared=0.596
)
#: Source: an H200: with 40 values and weights for each lane of a warp, a row of 1208 elements takes 36 %
#: longer than on 64 threads, 568 rows 8 %; with 32 values, 12 rows of 816 elements 9 %, 203 rows 3 %.
LANE_VALUES = 24
#: Source: an H200 (docs/results/untuned_rows_61.json, untuned_rows_53.json): 1 and 3 rows of 144 elements
#: take 20 % less two at a time for each warp, 7 rows 10 %, 2 rows of 512 6 %, 4 rows 1 %; from 38 rows on
#: 3 % more.
PAIRS = 8
#: Source: an H200 (docs/results/untuned_rows_61.json, untuned_rows_191.json): 9536 to 13043 rows of 144 to
#: 184 elements take 3 to 15 % less so, 23000 and more 1 % less to 3 % more.
HALF_WARPS = (64, 128)


def build_space(arch: Arch) -> Space:
    """Return the space of LayerNorm bound to ``arch``; warps exchange a mean and squares about it."""
    return row_space(
        "layernorm",
        arch,
        sums_of_row=2,
        registers=Registers(values_at_a_time=16, beside_values=(32, 24), values_of_warps=(16, 24)),
        in_smem=RowsInSmem(two_at_a_time=True),
        ring="stays",
        default=DefaultByTerms(
            TERMS,
            REGISTERS,
            lane_values=LANE_VALUES,
            pairs=PAIRS,
            half_warps=HALF_WARPS,
        ),
    )
