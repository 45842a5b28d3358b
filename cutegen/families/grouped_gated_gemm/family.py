"""Grouped gated GEMMs: ``out[r] = act(a[r] @ gate[i].T) * (a[r] @ up[i].T)`` of rows ``r`` of group ``i``.

The rows of both weights of a group are in one matrix of ``b``, as in ``gated_gemm``; where the rows of groups
are is said as in ``grouped_gemm``.
"""

from __future__ import annotations

from cutegen.families.gated.family import ACTIVATIONS
from cutegen.families.gated_gemm.family import WEIGHT_LAYOUTS
from cutegen.families.grouped_gemm.family import first_rows, ranges_of_rows
from cutegen.family import Option

__all__ = ["GROUPED_GATED_GEMM", "GROUPED_GATED_GEMM_MASKED"]

_OPTIONS = (
    Option("activation", "of the gate", ACTIVATIONS, "silu"),
    Option("layout", "the gate's rows of b above the others, or by turns", WEIGHT_LAYOUTS, "halves"),
)

GROUPED_GATED_GEMM = ranges_of_rows(
    "grouped_gated_gemm",
    "one gated GEMM for each group, rows sorted by group",
    (
        "32768x3072x7168x4 bf16",
        "32768x2048x4096x8 bf16 tokens=zipf layout=interleaved",
        "65536x768x2048x128 bf16",
        "4096x768x2048x128 fp16 activation=gelu_tanh",
        "512x384x2048x128 bf16 tokens=zipf",
        "64x4096x4096x8 bf16 activation=relu",
        "300x1001x264x5 bf16",
    ),
    *_OPTIONS,
)

GROUPED_GATED_GEMM_MASKED = first_rows(
    "grouped_gated_gemm_masked",
    "one gated GEMM for each group, of the first rows of its own matrix",
    (
        "4096x3072x7168x6 bf16 mean=1024",
        "4096x2048x4096x32 bf16 mean=192 layout=interleaved",
        "4096x3584x3072x32 fp16 mean=20 tokens=zipf",
        "4096x3072x7168x6 bf16 mean=20 activation=gelu",
        "1024x1024x512x4 bf16",
        "64x999x512x4 bf16 mean=5",
    ),
    *_OPTIONS,
)
