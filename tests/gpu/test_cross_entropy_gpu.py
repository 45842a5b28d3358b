"""Cross-entropy on a real GPU: every kind of row and kernel against fp64, broken kernels, the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "1x32000 bf16 lse",
    "64x7168 bf16 gradient lse smoothing",
    "300x1000 bf16 gradient lse",
    "4096x4096 bf16 gradient",
    "2048x8192 fp16 smoothing",
    "513x32768 bf16 gradient",
    "300x65536 fp32 gradient lse",
    "256x128256 bf16 gradient lse",
    "129x151936 bf16 smoothing lse",
    "70x262144 fp32 gradient smoothing",
    "64x100008 bf16 gradient",
    "64x201088 bf16 lse",
    "40000x128 bf16 gradient",
    "3000x64 fp16 lse",
    "777x1 bf16 gradient",
    "777x17 fp32 gradient smoothing",
    "301x50257 bf16 gradient",
    "300x2880 bf16 unaligned",
)
LAST = "store_vectors(dx, row_of(grad, row, first), lane, end, policy=policy)\n"
LAST_TURN = """            column - first * ELEMENTS,
            thread + turn * (TURN * THREADS_PER_ROW),
            end,
            0,
"""
END = "    end = cutlass.min(PART, VECTORS - first)\n"
WRONG = r"(loss|lse|grad)(\[\d+.* should be|: \d+ of \d+ elements .*not finite or were never written)"
#: Rows of a warp each, four in a CTA.
SHORT = {
    "rows unwritten": Broken("blocks = (rows - 1) // 4 + 1", "blocks = (rows - 1) // 4", r"first at \(296"),
    "stale gradient": Broken(
        LAST, LAST.replace("end,", "end if row != 5 else 0,"), r"grad: 1000 of .*first at \(5, 0\)"
    ),
    "one element past the end": Broken(
        LAST,
        LAST + "    if lane == 0 and row == rows - 1:\n        grad[row, N] = X(0.0)\n",
        "grad: 1 elements outside of the output were written",
    ),
    "input modified": Broken(
        LAST,
        LAST + "    if lane == 0 and row == 17:\n        x[row, 3] = X(77.0)\n",
        r"wrote its input x, first at \(17, 3\)",
    ),
    "tail column skipped": Broken("    end = PART\n", "    end = PART - 1\n", WRONG),
    "the target has no gradient": Broken("place == i", "place == -1", r"grad\[\d+"),
    "the target next to it": Broken("place == i", "place == i + 1", r"grad\[\d+"),
    "ignored rows count": Broken(
        "label != cutlass.Int64(ignore_index)", "label != cutlass.Int64(-99)", WRONG
    ),
    "ignore_index compiled in": Broken(
        "label != cutlass.Int64(ignore_index)", "label != cutlass.Int64(-100)", WRONG
    ),
    "no z_loss": Broken("+ 2.0 * z_loss * natural", "", WRONG),
    "every row weighs as much": Broken(
        "weight = row_scale[row]", "weight = cutlass.Float32(1.0)", r"grad\[\d+"
    ),
    "lse wrong beside a right loss": Broken(
        "log_sum[row] = natural", "log_sum[row] = natural + 0.001", r"lse\[\d+"
    ),
}
#: Rows of four warps: parts of a row may be all -inf.
WIDE = {
    "-inf less -inf": Broken(
        "cute.arch.fmax(max_over_warp(peak_of(h)), LOWEST)", "max_over_warp(peak_of(h))", WRONG
    ),
    "the logit counts once for each warp": Broken("lane < 32)", "lane >= 0)", r"loss\[\d+"),
}
#: The same with smoothing, for which no logit is -inf.
SMOOTHED = {
    "what lies beyond the end counts for the mean": Broken(
        "cutlass.select_(here, value, cutlass.Float32(0.0))", "value", WRONG
    ),
}
#: Rows in shared memory: 7 CTAs of a cluster have 1563 vectors, the last 1560, in 2 turns each.
STAGED = {
    "the last CTA of a ragged cluster reads on": Broken(
        END, "    end = PART\n", r"outside of the output|should be|never written"
    ),
    "tail column skipped": Broken(END, END.replace("- first", "- first - 1"), WRONG),
    "the target of the first CTA in all": Broken(
        LAST_TURN, LAST_TURN.replace(" - first * ELEMENTS", ""), r"grad\[\d+"
    ),
    "earlier powers are not scaled": Broken("sums[i] = sums[i] * before", "sums[i] = sums[i] * 1.0", WRONG),
    "the logit counts in every CTA": Broken("thread < 32 and rank == 0)", "thread < 32)", r"loss\[\d+"),
}
MUTANTS = mutants(
    ("cross_entropy 300x1000 bf16 gradient lse", {"threads_per_row": 32, "rows_per_cta": 4}, SHORT),
    ("cross_entropy 64x4096 bf16", {"threads_per_row": 128, "cluster_n": 1}, WIDE),
    ("cross_entropy 64x4104 bf16 smoothing", {"threads_per_row": 128, "cluster_n": 1}, SMOOTHED),
    (
        "cross_entropy 64x100008 bf16 gradient",
        {"threads_per_row": 256, "cluster_n": 8, "row_in": "smem", "turn": 4},
        STAGED,
    ),
)
CASES = cases((f"cross_entropy {line}" for line in LINES), 2)
test_a_config_computes_the_loss = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
def test_the_operator_agrees_with_torch() -> None:
    """Loss and gradient, eager, compiled and in place; a label that is none makes NaN and reads nothing."""
    import torch

    import cutegen

    torch.manual_seed(0)
    x = torch.randn(50, 32000, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 32000, (50,), device="cuda")
    target[::4] = -100
    wide = x.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(wide, target, label_smoothing=0.1)
    want.backward()

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = cutegen.cross_entropy(x, target, label_smoothing=0.1)
        assert isinstance(loss, torch.Tensor)
        return loss

    def gradient(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        got = call(leaf)
        got.backward()
        assert torch.allclose(got.double(), want, rtol=1e-5)
        assert torch.allclose(leaf.grad.double(), wide.grad, rtol=2**-7, atol=1e-9)
        assert leaf.grad is not None
        return leaf.grad

    eager = gradient(run)
    gradient(torch.compile(run, fullgraph=True))  # divides by the count by itself: equal to some last bits
    inner = x.clone().requires_grad_() * 1.0
    address = inner.data_ptr()
    loss = cutegen.cross_entropy(inner, target, label_smoothing=0.1, inplace_backward=True)
    (found,) = torch.autograd.grad(loss, inner)
    assert found.data_ptr() == address and torch.equal(found, eager)
    target[1], target[2] = 32000, -5
    losses = cutegen.cross_entropy(x, target, reduction="none")
    assert losses[1].isnan() and losses[2].isnan() and losses[3:].isfinite().all()


def test_labels_that_are_no_columns_end_nothing_while_a_kernel_compiles() -> None:
    """What computes then has no index out of range, by which torch would end the use of the GPU."""
    import torch

    from cutegen.families.cross_entropy.family import CROSS_ENTROPY
    from cutegen.family import Inputs

    x = torch.randn(6, 1000, device="cuda", dtype=torch.bfloat16)
    target = torch.tensor([5, 1000, -3, 2**40, -100, 7], device="cuda")
    inputs = Inputs(
        {"x": x, "target": target, "row_scale": torch.ones(6, device="cuda")},
        {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0},
    )
    loss, grad = torch.empty(6, device="cuda"), torch.empty_like(x)
    problem = CROSS_ENTROPY.parse("cross_entropy 6x1000 bf16 gradient")
    CROSS_ENTROPY.stand_in(problem)(inputs, {"loss": loss, "grad": grad})
    torch.cuda.synchronize()
    assert loss.isnan().tolist() == [False, True, True, True, False, False]
    assert bool(grad.isfinite().all()) and not grad[4].any()
