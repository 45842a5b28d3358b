"""RMSNorm on a real GPU: every kind of row and kernel against fp64, broken kernels, the operator."""

from __future__ import annotations

import pytest
from family_kernels import Broken, broken_kernel_is_rejected, cases, config_is_right, mutants
from hopper import NEEDS_HOPPER

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl]
LINES = (
    "1x4096 bf16",
    "64x7168 bf16 residual residual_out",
    "300x1000 bf16 residual residual_out rstd",
    "4096x4096 bf16",
    "2048x8192 fp16 weight=fp32 rstd",
    "1024x16384 bf16 residual residual_out rstd",
    "513x32768 bf16",
    "300x65536 fp32",
    "129x131072 bf16 weight=fp32",
    "70x262144 fp32 weight=none",
    "9x262144 bf16 residual",
    "64x100008 bf16 rstd",
    "70x100008 fp16 weight=fp32 residual residual_out rstd",
    "2000x50000 bf16 weight=none",
    "40000x128 bf16",
    "3000x64 fp16 weight=none rstd",
    "777x1 bf16",
    "777x17 fp32",
    "301x4097 bf16 residual residual_out rstd",
    "300x2880 bf16 unaligned",
    "11x99991 bf16",
)
#: Rows of a warp each, four in a CTA.
BROKEN_LINE = "300x1000 bf16 residual residual_out rstd"
LAST = "store_vectors(y_out, row_of(y, row, first), lane, end, policy=policy)\n"
ANY_VALUE = r"(out|rstd)\[\d+.* should be"
BROKEN = {
    "rows unwritten": Broken(
        "blocks = (rows - 1) // 4 + 1",
        "blocks = (rows - 1) // 4",
        r"(out|residual_out|rstd): \d+ of \d+ elements .*never written, first at \(296",
    ),
    "stale output": Broken(
        LAST,
        LAST.replace("end,", "end if row != 5 else 0,"),
        r"out: 1000 of 300000 elements .*never written, first at \(5, 0\)",
    ),
    "one element past the end": Broken(
        LAST,
        LAST + "    if lane == 0 and row == rows - 1:\n        y[row, N] = X(0.0)\n",
        r"out: 1 elements outside of the output were written",
    ),
    "input modified": Broken(
        LAST,
        LAST + "    if lane == 0 and row == 17:\n        x[row, 3] = X(77.0)\n",
        r"wrote its input x, first at \(17, 3\)",
    ),
    "eps compiled in": Broken("+ eps, fastmath", "+ 1e-6, fastmath", ANY_VALUE),
    "tail column skipped": Broken(
        "    end = PART\n",
        "    end = PART - 1\n",
        r"(out|residual_out): 2400 of 300000 elements .*never written, first at \(0, 992\)",
    ),
    "rstd wrong beside a right y": Broken(
        "rstd[row] = rms\n",
        "rstd[row] = rms * 1.001\n",
        r"rstd\[\d+\] is .* should be",
    ),
}
#: The same for rows in shared memory: 7 CTAs of a cluster have 1563 vectors, the last 1560, in 2 turns each.
STAGED_LINE = "64x100008 bf16 rstd"
STAGED = {"threads_per_row": 256, "cluster_n": 8, "row_in": "smem", "turn": 4}
TURN = "thread + turn * (TURN * THREADS_PER_ROW), end, 0)\n"
NORMALISE = f"normalise(x_part, weight_row, y_row, rms, {TURN}"
SIZE = "cutlass.min(TURN * THREADS_PER_ROW, end - at)"
END = "    end = cutlass.min(PART, VECTORS - first)\n"
STAGED_BROKEN = {
    # What was in shared memory may be anything, NaN included.
    "a turn is not fetched": Broken(
        SIZE,
        f"({SIZE} if row + turn != 10 else cutlass.Int32(0))",
        rf"{ANY_VALUE}|never written",
    ),
    "the last turn is fetched too short": Broken(SIZE, f"({SIZE} - turn)", rf"{ANY_VALUE}|never written"),
    "the last CTA of a ragged cluster reads on": Broken(
        END,
        "    end = PART\n",
        r"outside of the output|should be|never written",
    ),
    "tail column skipped": Broken(
        END,
        END.replace("- first", "- first - 1"),
        r"out: 512 of 6400512 elements .*never written, first at \(0, 100000\)",
    ),
    "rows unwritten": Broken(
        "blocks = (rows - 1) // 1 + 1",
        "blocks = (rows - 1) // 1",
        r"(out|rstd): \d+ of \d+ elements .*never written, first at \(63",
    ),
    "stale output": Broken(
        NORMALISE,
        NORMALISE.replace("end, 0)", "end if row != 5 else 0, 0)"),
        r"out: \d+ of 6400512 elements .*never written, first at \(5, 8192\)",
    ),
    "one element past the end": Broken(
        NORMALISE,
        NORMALISE + "    if thread == 0 and rank == 0 and row == 63:\n        y[row, N] = X(0.0)\n",
        r"out: 1 elements outside of the output were written",
    ),
    "input modified": Broken(
        NORMALISE,
        NORMALISE + "    if thread == 0 and rank == 0 and row == 17:\n        x[row, 3] = X(77.0)\n",
        r"wrote its input x, first at \(17, 3\)",
    ),
    "eps compiled in": Broken("+ eps, fastmath", "+ 1e-6, fastmath", ANY_VALUE),
    "rstd wrong beside a right y": Broken(
        "rstd[row] = rms\n",
        "rstd[row] = rms * 1.001\n",
        r"rstd\[\d+\] is .* should be",
    ),
}
MUTANTS = mutants(
    (f"rmsnorm {BROKEN_LINE}", {"threads_per_row": 32, "rows_per_cta": 4}, BROKEN),
    (f"rmsnorm {STAGED_LINE}", STAGED, STAGED_BROKEN),
)
CASES = cases((f"rmsnorm {line}" for line in LINES), 5)
test_a_config_computes_the_norm = config_is_right
test_a_broken_kernel_is_rejected = broken_kernel_is_rejected


@pytest.mark.usefixtures("own_kernels")
def test_the_operator_agrees_with_torch() -> None:
    """Shapes, in place, options, and the errors of operands."""
    import torch

    import cutegen
    from cutegen.errors import OperandError

    x = torch.randn(3, 5, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    want = torch.nn.functional.rms_norm(x.double(), (4096,), w.double(), 1e-5)
    got = cutegen.rms_norm(x, w, 1e-5)
    assert isinstance(got, torch.Tensor) and got.shape == x.shape
    assert torch.allclose(got.double(), want, rtol=2**-8, atol=1e-6)
    residual = torch.randn_like(x)
    total = x.double() + residual.double()
    y, h, rstd = cutegen.rms_norm(x, w, 1e-5, residual=residual, residual_out=residual, return_rstd=True)
    assert h is residual and torch.equal(h, total.bfloat16())
    assert torch.allclose(rstd.double(), (total.square().mean(-1) + 1e-5).rsqrt(), rtol=1e-5)
    want = torch.nn.functional.rms_norm(total, (4096,), w.double(), 1e-5)
    assert torch.allclose(y.double(), want, rtol=2**-8, atol=1e-6)
    with pytest.raises(OperandError, match="weight has shape"):
        cutegen.rms_norm(x, w[:100])
    with pytest.raises(OperandError, match="out shares memory with residual"):
        cutegen.rms_norm(x, w, residual=h, out=h)


@pytest.mark.filterwarnings("ignore")  # torch makes an empty graph first, and warns of it
@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_compiles(mode: str) -> None:
    """torch.compile traces it without a break, and a step reuses its memory."""
    import torch

    import cutegen

    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2048, device="cuda", dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = cutegen.rms_norm(x * 2, w)
        assert isinstance(y, torch.Tensor)
        return y + 1

    run = torch.compile(step, mode=mode, fullgraph=True)
    want = torch.nn.functional.rms_norm(2 * x.double(), (2048,), w.double(), 1e-6) + 1
    for _ in range(5):
        assert torch.allclose(run(x).double(), want, rtol=2**-7, atol=2**-7)
