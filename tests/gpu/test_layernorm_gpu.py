"""LayerNorm on a real GPU: every kind of row and kernel against fp64, broken kernels, the operator."""

from __future__ import annotations

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "1x4096 bf16",
    "64x7168 bf16 stats",
    "300x1000 bf16 weight=none bias=none",
    "4096x5120 bf16 stats",
    "2048x8192 fp16 weight=fp32 bias=fp32",
    "1024x16384 bf16 stats",
    "513x32768 bf16 bias=none",
    "300x65536 fp32",
    "129x131072 bf16 weight=fp32 stats",
    "70x262144 fp32 weight=none",
    "64x100008 bf16 stats",
    "70x100008 fp16 weight=fp32 bias=fp32",
    "40000x128 bf16",
    "3000x64 fp16 weight=none bias=none stats",
    "777x1 bf16",
    "777x17 fp32 stats",
    "301x4097 bf16 stats",
    "300x2880 bf16 unaligned",
    "11x99991 bf16",
)
#: Numbers of rows that are no multiple of a CTA's.
MANY_ROWS = (
    "17001x1000 bf16 stats",
    "9001x2880 bf16",
    "5001x5120 bf16 weight=none",
    "2201x20000 bf16 weight=fp32 bias=fp32 stats",
    "801x65536 fp16 bias=none",
    "401x131072 bf16 stats",
    "1101x32768 fp32 weight=none bias=none",
    "1101x100008 bf16",
)
#: An odd number of rows, of which two come at a time.
TWO_AT_A_TIME = (
    "401x32768 bf16 stats",
    "201x65536 fp16 bias=none",
    "67x131072 bf16",
    "331x28672 fp16 weight=none",
)
RING = {"row_in": ["ring"]}
PAIRS = {"row_in": ["smem"], "rows_per_thread": [2]}
LAST = "store_vectors(y_out, row_of(y, row, first), lane, end, policy=policy)\n"
LAST_OF_RING = LAST.replace(", policy=policy", "")
TURN = "thread + turn * (TURN * THREADS_PER_ROW), end, 0)\n"
NORMALISE = f"normalise(x_part, weight_row, bias_row, y_row, shift, rms, {TURN}"
END = "    end = cutlass.min(PART, VECTORS - first)\n"
WRONG = r"(out|mean|rstd)(\[\d+.* should be|: \d+ of \d+ elements .*not finite or were never written)"
#: Rows of a warp each, four in a CTA.
SHORT = {
    "rows unwritten": Broken(
        "blocks = (x.shape[0] - 1) // 4 + 1", "blocks = (x.shape[0] - 1) // 4", r"first at \(296"
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
    "tail column skipped": Broken("    end = PART\n", "    end = PART - 1\n", WRONG),
    "eps compiled in": Broken("+ eps, fastmath", "+ 1e-5, fastmath", WRONG),
    "what lies beyond the end counts": Broken(
        "mean if first + step * THREADS_PER_ROW < last else cutlass.Float32(0.0)", "mean", WRONG
    ),
    "squares about zero": Broken("[value - centre for", "[value for", WRONG),
    "mean wrong beside a right y": Broken(
        "row_mean[row] = mean", "row_mean[row] = mean + 0.01", r"mean\[\d+"
    ),
    "no bias": Broken(" * w + b for", " * w for", WRONG),
}
#: Rows of several warps that hold different numbers of elements: 640 vectors of 192 threads.
WIDE = {
    "distances between warps do not count": Broken("p + a * a * h for", "p for", WRONG),
    "every warp holds as much": Broken("[m * h for m, h in", "[m * (N / SUMS) for m, h in", WRONG),
}
#: Rows in shared memory: 7 CTAs of a cluster have 1563 vectors, the last 1560, in 2 turns each.
STAGED = {
    "the last CTA of a ragged cluster reads on": Broken(
        END, "    end = PART\n", r"outside of the output|should be|never written"
    ),
    "tail column skipped": Broken(END, END.replace("- first", "- first - 1"), WRONG),
    "stale output": Broken(
        NORMALISE,
        NORMALISE.replace("end, 0)", "end if row != 5 else 0, 0)"),
        r"out: \d+ of .*first at \(5, 8192\)",
    ),
    "the mean of a warp for the row's": Broken(
        "    mean, squares = over_row(", "    _, squares = over_row(", WRONG
    ),
}
#: Rows that come through a ring, to two groups in each CTA of a cluster of two.
THROUGH_A_RING = {
    "distances between lanes do not count": Broken(
        "squares + (other - mean) * (other - mean) * (held * 0.5)", "squares", WRONG
    ),
    "a row comes twice": Broken(
        "row_of(x, row, first), x_stage", "row_of(x, row - row % 2, first), x_stage", WRONG
    ),
    "the copy lacks a vector": Broken(
        "size = end * (ELEMENTS * X", "size = (end - 1) * (ELEMENTS * X", WRONG
    ),
    "stale output": Broken(
        LAST_OF_RING, f"if row != 5:\n        {LAST_OF_RING}", r"out: \d+ of .*first at \(5, 0\)"
    ),
    "the weight of another part": Broken(
        "weight_row = vectors_of(weight.iterator + first * ELEMENTS,",
        "weight_row = vectors_of(weight.iterator,",
        WRONG,
    ),
    "the mean of a warp for the row's": Broken(
        "    mean, squares = over_row(", "    _, squares = over_row(", WRONG
    ),
}
MUTANTS = mutants(
    ("layernorm 300x1000 bf16 stats", {"threads_per_row": 32, "rows_per_cta": 4}, SHORT),
    ("layernorm 64x5120 bf16 stats", {"threads_per_row": 192}, WIDE),
    (
        "layernorm 64x100008 bf16 stats",
        {"threads_per_row": 256, "cluster_n": 8, "row_in": "smem", "turn": 4},
        STAGED,
    ),
    (
        "layernorm 2201x16384 bf16 stats",
        {
            "threads_per_row": 256,
            "rows_per_cta": 2,
            "cluster_n": 2,
            "prefetch_weight": False,
            "row_in": "ring",
            "turn": 1,
            "pdl": "early",
        },
        THROUGH_A_RING,
    ),
)
CASES = {
    **cases((f"layernorm {line}" for line in LINES), 2),
    **cases((f"layernorm {line}" for line in MANY_ROWS), 3, RING),
    **cases((f"layernorm {line}" for line in TWO_AT_A_TIME), 2, PAIRS),
}
test_a_config_computes_the_norm = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
def test_the_operator_agrees_with_torch() -> None:
    """Values, statistics, and the gradients of x, weight and bias, eager and compiled."""
    import torch

    import cutegen

    x, g = (torch.randn(3, 50, 1000, device="cuda", dtype=torch.bfloat16) for _ in "xg")
    leaves = [x.requires_grad_(), *(torch.randn(1000, device="cuda").requires_grad_() for _ in "wb")]
    for run in (cutegen.layer_norm, torch.compile(cutegen.layer_norm, fullgraph=True)):
        for leaf in leaves:
            leaf.grad = None
        got = run(*leaves)
        (got.float() * g.float()).sum().backward()
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        want = torch.nn.functional.layer_norm(wide[0], (1000,), wide[1], wide[2])
        (want * g.double()).sum().backward()
        assert torch.allclose(got.double(), want, rtol=2**-8, atol=2**-9)
        for leaf, exact in zip(leaves, wide, strict=True):
            assert torch.allclose(leaf.grad.double(), exact.grad, rtol=2**-6, atol=0.1)
