"""Softmax on a real GPU: every kind of row and kernel against fp64, broken kernels, the operator."""

from __future__ import annotations

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "1x4096 bf16",
    "64x7168 bf16",
    "300x1000 bf16",
    "4096x4096 bf16",
    "2048x8192 fp16",
    "1024x16384 bf16",
    "513x32768 bf16",
    "300x65536 fp32",
    "129x131072 bf16",
    "70x262144 fp32",
    "9x262144 bf16",
    "64x100008 bf16",
    "70x100008 fp16",
    "40000x128 bf16",
    "3000x64 fp16",
    "777x1 bf16",
    "777x17 fp32",
    "301x4097 bf16",
    "300x1027 fp16",
    "300x2880 bf16 unaligned",
    "11x99991 bf16",
)
LAST = "store_vectors(y_out, row_of(y, row, first), lane, end, policy=policy)\n"
SCALE = "scale_powers(x_part, y_row, highest, factor, thread + turn * (TURN * THREADS_PER_ROW), end, 0)\n"
SIZE = "cutlass.min(TURN * THREADS_PER_ROW, end - at)"
END = "    end = cutlass.min(PART, VECTORS - first)\n"
RECIPROCAL = "cute.arch.rcp_approx(total)"
CLAMPED = "cute.arch.fmax(max_over_warp(peak_of(h)), LOWEST)"
WRONG = r"out(\[\d+.* should be|: \d+ of \d+ elements .*not finite or were never written)"
#: Rows of a warp each, four in a CTA.
SHORT = {
    "rows unwritten": Broken(
        "blocks = (rows - 1) // 4 + 1", "blocks = (rows - 1) // 4", r"out: .*first at \(296"
    ),
    "stale output": Broken(
        LAST, LAST.replace("end,", "end if row != 5 else 0,"), r"out: 1000 of .*first at \(5, 0\)"
    ),
    "one element past the end": Broken(
        LAST,
        LAST + "    if lane == 0 and row == rows - 1:\n        y[row, N] = X(0.0)\n",
        "out: 1 elements outside of the output were written",
    ),
    "input modified": Broken(
        LAST,
        LAST + "    if lane == 0 and row == 17:\n        x[row, 3] = X(77.0)\n",
        r"wrote its input x, first at \(17, 3\)",
    ),
    "tail column skipped": Broken(
        "    end = PART\n", "    end = PART - 1\n", r"out: 2400 of .*first at \(0, 992\)"
    ),
    "nothing subtracted": Broken(CLAMPED, "cutlass.Float32(0.0)", WRONG),
    "what lies beyond the end counts": Broken("here.fill(-cutlass.Float32.inf)", "here.fill(0)", WRONG),
    "a sum that is 1 % off": Broken(RECIPROCAL, f"1.01 * {RECIPROCAL}", WRONG),
}
#: Rows of four warps: parts of a row may be all -inf.
WIDE = {
    "-inf less -inf": Broken(CLAMPED, "max_over_warp(peak_of(h))", WRONG),
    "a warp's largest value for the row's": Broken(f"power(peak, highest) * {RECIPROCAL}", RECIPROCAL, WRONG),
    "sums of warps are not scaled": Broken("t * power(p, highest)", "t", WRONG),
}
#: Rows in shared memory: 7 CTAs of a cluster have 1563 vectors, the last 1560, in 2 turns each.
STAGED = {
    "a turn is not fetched": Broken(SIZE, f"({SIZE} if row + turn != 10 else cutlass.Int32(0))", WRONG),
    "the last turn is fetched too short": Broken(SIZE, f"({SIZE} - turn)", WRONG),
    "the last CTA of a ragged cluster reads on": Broken(
        END, "    end = PART\n", r"outside of the output|should be|never written"
    ),
    "tail column skipped": Broken(
        END, END.replace("- first", "- first - 1"), r"out: 512 of .*first at \(0, 100000\)"
    ),
    "stale output": Broken(
        SCALE, SCALE.replace("end, 0)", "end if row != 5 else 0, 0)"), r"out: \d+ of .*first at \(5, 8192\)"
    ),
    "earlier powers are not scaled": Broken("sums[i] = sums[i] * before", "sums[i] = sums[i] * 1.0", WRONG),
    "the largest of a thread for the row's": Broken(SCALE, SCALE.replace("highest", "mine[ELEMENTS]"), WRONG),
}
MUTANTS = mutants(
    ("softmax 300x1000 bf16", {"threads_per_row": 32, "rows_per_cta": 4}, SHORT),
    ("softmax 64x4096 bf16", {"threads_per_row": 128}, WIDE),
    (
        "softmax 64x100008 bf16",
        {"threads_per_row": 256, "cluster_n": 8, "row_in": "smem", "turn": 4},
        STAGED,
    ),
)
CASES = cases((f"softmax {line}" for line in LINES), 2)
test_a_config_computes_the_softmax = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
def test_the_operator_agrees_with_torch() -> None:
    """Shapes, in place, rows of nothing but -inf and rows with NaN, and the gradient, eager and compiled."""
    import torch

    import cutegen

    x = torch.randn(3, 5, 4096, device="cuda", dtype=torch.bfloat16)
    x[0, 0], x[1, 1, 7] = -torch.inf, torch.nan
    want = x.double().softmax(-1)
    got = cutegen.softmax(x)
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-7, equal_nan=True)
    assert got[0, 0].isnan().all() and got[1, 1].isnan().all() and got.isnan().sum() == 2 * 4096
    x = torch.randn(64, 1000, device="cuda", requires_grad=True)
    g = torch.randn(64, 1000, device="cuda")
    for run in (cutegen.softmax, torch.compile(cutegen.softmax, fullgraph=True)):
        x.grad = None
        (run(x) * g).sum().backward()
        wide = x.detach().double().requires_grad_()
        (wide.softmax(-1) * g).sum().backward()
        assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-8)
