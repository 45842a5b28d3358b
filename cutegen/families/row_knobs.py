"""What the knobs of kernels over rows do, and when each of them pays; ``docs/knobs.md`` quotes it."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PREFETCH_WEIGHT", "RING_KNOBS", "RING_PREFETCH_WEIGHT", "ROW_KNOBS"]

_TURN = (
    "With row_in=smem: 16-byte vectors of a row that a thread reads from shared memory and processes in one "
    "loop iteration. More vectors mean fewer iterations and more registers."
)

#: Those of every such kernel.
ROW_KNOBS: Mapping[str, str] = {
    "threads_per_row": (
        "Threads of a CTA that share a row. With few threads each has more values and more loads in flight; "
        "many shorten a long row."
    ),
    "rows_per_cta": "Rows of a CTA at a time. More than one fills a CTA where rows are short.",
    "rows_per_thread": (
        "Rows that a thread processes at a time. More than one keeps more loads in flight where a thread has "
        "one or two accesses per row. LayerNorm in shared memory reads weight and bias once for two rows."
    ),
    "cluster_n": (
        "CTAs of a cluster that share a row and exchange their sums through distributed shared memory. Pays "
        "for rows too long for the registers of one CTA, and for few rows."
    ),
    "row_in": (
        "Where a row is kept until its sum is known: in registers, or in shared memory, from which it is "
        "read twice. Shared memory pays for rows of more than 64 KiB; registers hold few loads in flight."
    ),
    "turn": f"{_TURN} With row_in=registers always 1.",
    "pdl": (
        "Programmatic dependent launch: start while the previous kernel in the stream ends, and let the next "
        "kernel start as soon as there is room (early) or after the sums (late). Pays for short kernels "
        "between others that do so, as in a model with cutegen's layers; behind others it costs 0.2 to 0.3 "
        "us. off launches without it."
    ),
}
#: The same where rows may come through a ring.
RING_KNOBS: Mapping[str, str] = {
    **ROW_KNOBS,
    "row_in": (
        f"{ROW_KNOBS['row_in']} Or in a ring of rows in shared memory that a CTA processes one after "
        "another, so that data common to all rows is read once for several; pays for many rows of more than "
        "48 KiB."
    ),
    "turn": (
        f"{_TURN} With row_in=ring: rows that each group of threads processes before its CTA ends, 2 or 4; 1 "
        "selects persistent CTAs, which process rows until none is left. With row_in=registers always 1."
    ),
}
#: That of kernels with a weight.
PREFETCH_WEIGHT: Mapping[str, str] = {
    "prefetch_weight": (
        "Load the weight before the row's sum is known. Without it the load comes after, which saves "
        "registers."
    )
}
#: The same where rows may come through a ring.
RING_PREFETCH_WEIGHT: Mapping[str, str] = {
    "prefetch_weight": (
        f"{PREFETCH_WEIGHT['prefetch_weight']} With a ring it stays in registers, or else in shared memory."
    )
}
