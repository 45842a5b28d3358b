"""Which cross-entropy configs exist, which are legal, and what follows from each of them, on every target."""

from __future__ import annotations

from cutegen.arch import Arch
from cutegen.space import Space

from ..row.expected import Terms
from ..row.registers import RegistersTaken
from ..row.shared import row_space
from ..row.traits import DefaultByTerms, Registers, RowsInSmem

#: Of Hopper; tools/fit_rows.py prints them.
TERMS = Terms(
    kernel=0.993,
    cta=0.414,
    exchange=0.0778,
    cluster=0.225,
    messages=0.00295,
    access=0.0608,
    threads=0.197,
    late=0.049,
    smem=0.38,
    volume=0.308,
    start=2.92e-09,
    overlap=1.3,
)
#: tools/fit_row_registers.py prints them.
REGISTERS = RegistersTaken(
    working=8.47, per_value=1.86, per_weight=0.5, reading=13.9, per_sum=3.61, shared=7.17
)
#: It needs more registers than others. Source: an H200, where rows of 62 KiB take 30 % less time in shared
#: memory, and those of 16 KiB 8 % less in that of one CTA; those above 16 KiB were not timed there.
IN_SMEM = RowsInSmem(longer_than=32_768, of_one_cta=(16_384, 24_576))


def build_space(arch: Arch) -> Space:
    """Return the space of cross-entropy bound to ``arch``; warps exchange a maximum, a sum of powers, the
    target's logit and the sum of all logits."""
    return row_space(
        "cross_entropy",
        arch,
        weight=False,
        sums_of_row=4,
        registers=Registers(values_at_a_time=8, values_of_warps=(24, 32)),
        in_smem=IN_SMEM,
        default=DefaultByTerms(TERMS, REGISTERS),
    )
