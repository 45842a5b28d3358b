"""RMSNorm to e4m3 on a real GPU: every kind of row and kernel against fp64, broken kernels, the operator."""

from __future__ import annotations

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "1x4096 bf16",
    "64x7168 bf16 residual residual_out",
    "300x1008 bf16 residual residual_out",
    "4096x4096 bf16",
    "2048x8192 fp16 weight=fp32",
    "1024x16384 bf16 residual residual_out",
    "513x32768 bf16",
    "300x65536 fp32 weight=none",
    "129x131072 bf16 weight=fp32",
    "70x262144 fp32",
    "64x100000 bf16",
    "70x100000 fp16 weight=fp32 residual residual_out",
    "40000x128 bf16",
    "3000x64 fp16 weight=none",
    "777x1 bf16",
    "777x17 fp32",
    "301x4097 bf16 residual residual_out",
    "300x2880 bf16 unaligned",
    "300x1000 bf16 residual residual_out",
    "777x2024 fp16 weight=fp32",
    "300x1000 fp32",
    "129x40008 bf16",
    "300x1000 bf16 unaligned",
)
#: Numbers of rows that are no multiple of a CTA's.
MANY_ROWS = (
    "17001x1008 fp16 weight=none",
    "5001x7168 bf16",
    "5001x2824 bf16",
    "2201x16384 bf16 weight=fp32",
    "801x40000 bf16 residual residual_out",
    "801x65536 fp32",
    "401x131072 bf16",
)
RING = {"row_in": ["ring"]}
LAST = "store_vectors(y_out, row_of(y, row, first), lane, end, policy=policy)\n"
TURN = "thread + turn * (TURN * THREADS_PER_ROW), end, 0)\n"
QUANTISE = f"quantise(x_part, weight_row, y_row, factor, {TURN}"
END = "    end = cutlass.min(PART, VECTORS - first)\n"
WRONG = (
    r"(out|scale|residual_out)(\[\d+.* should be|: \d+ of \d+ elements .*not finite or were never written)"
)
#: Rows of a warp each, four in a CTA.
SHORT = {
    "rows unwritten": Broken("blocks = (rows - 1) // 4 + 1", "blocks = (rows - 1) // 4", r"first at \(296"),
    "stale output": Broken(
        LAST, LAST.replace("end,", "end if row != 5 else 0,"), r"out: 1008 of .*first at \(5, 0\)"
    ),
    "one element past the end": Broken(
        LAST,
        LAST + "    if lane == 0 and row == rows - 1:\n        y[row, N] = y.element_type(0.0)\n",
        "out: 1 elements outside of the output were written",
    ),
    "tail column skipped": Broken("    end = PART\n", "    end = PART - 1\n", WRONG),
    "eps compiled in": Broken("+ eps, fastmath", "+ 1e-6, fastmath", WRONG),
    "scale wrong beside right codes": Broken(
        "scale[row] = scale_of_row", "scale[row] = scale_of_row * 1.0001", r"scale\[\d+"
    ),
    "negative values do not count": Broken("cute.arch.fmax(value, -value)", "value", WRONG),
    "a row of zeros divides by zero": Broken(", LEAST)", ", 0.0)", WRONG),
}
#: Rows of several warps.
WIDE = {
    "the largest of a warp for the row's": Broken("max_of_row(magnitudes)", "largest", WRONG),
    "the sum of a warp for the row's": Broken("sum_of_row(totals)", "total", WRONG),
}
#: Rows in shared memory: CTAs of a cluster have 1563 vectors, the last 1559, in 2 turns each.
STAGED = {
    "the last CTA of a ragged cluster reads on": Broken(
        END, "    end = PART\n", r"outside of the output|should be|never written"
    ),
    "tail column skipped": Broken(END, END.replace("- first", "- first - 1"), WRONG),
    "stale output": Broken(
        QUANTISE,
        QUANTISE.replace("end, 0)", "end if row != 5 else 0, 0)"),
        r"out: \d+ of .*first at \(5, 8192\)",
    ),
    "the weight does not count for the scale": Broken(
        "    h = weighted(h, load_vectors(weight, at, end, TURN, whole))\n    sums[ELEMENTS]",
        "    sums[ELEMENTS]",
        WRONG,
    ),
}
MUTANTS = mutants(
    ("rmsnorm_quantized 300x1008 bf16", {"threads_per_row": 32, "rows_per_cta": 4}, SHORT),
    ("rmsnorm_quantized 64x4096 bf16", {"threads_per_row": 128}, WIDE),
    (
        "rmsnorm_quantized 64x100000 bf16",
        {"threads_per_row": 256, "cluster_n": 8, "row_in": "smem", "turn": 4},
        STAGED,
    ),
)
CASES = {
    **cases((f"rmsnorm_quantized {line}" for line in LINES), 2),
    **cases((f"rmsnorm_quantized {line}" for line in MANY_ROWS), 3, RING),
}
test_a_config_computes_the_norm = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
def test_the_operator_feeds_a_product() -> None:
    """Codes times scales are the norm, eager and compiled, and torch multiplies them."""
    import torch

    import cutegen

    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    want = torch.nn.functional.rms_norm(x.double(), (4096,), w.double(), 1e-6)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = cutegen.rms_norm(x, w, quantize="e4m3")
        assert isinstance(found, tuple)
        return found

    for call in (run, torch.compile(run, fullgraph=True)):
        q, scale = call(x)
        error = (q.double() * scale[:, None].double() - want).abs()
        assert (error <= 2.0**-4 * want.abs() + 2.0**-9 * scale[:, None]).all()
