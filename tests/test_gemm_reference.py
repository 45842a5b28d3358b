"""GEMMs in fp64: their inputs, what they are compared with, and the error that each element is allowed."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="references are torch tensors")

from gemm_problems import PROBLEMS  # noqa: E402
from host_lane import Kernel, call, filled, new_out, poisoned  # noqa: E402

from cutegen.families.gemm.family import GEMM  # noqa: E402
from cutegen.families.gemm.problem import LAYOUTS, Problem  # noqa: E402
from cutegen.families.gemm.reference import GemmReference, accumulation_error, sample_lines  # noqa: E402
from cutegen.measure.check import judge  # noqa: E402


def operands(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = filled(problem).tensors
    return tensors["a"], tensors["b"]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_baseline_computes_the_same_thing(problem: Problem) -> None:
    """What candidates are compared with in time solves the same problem, up to torch's own rounding."""
    inputs, ours, theirs = filled(problem), new_out(problem), new_out(problem)
    call(Kernel(problem, "right"), problem, inputs, ours)
    [(name, baseline)] = GEMM.baselines(problem, inputs, {"out": theirs}).items()
    theirs.fill_(0)
    baseline(inputs, {"out": theirs})
    scale = ours.double().abs().mean()
    assert name.startswith("torch.")
    assert (ours.double() - theirs.double()).abs().max() < 0.05 * scale


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.ab_dtype != "int8"], ids=str)
def test_tail_operands_are_strided_and_surrounded_by_nan(problem: Problem) -> None:
    """Between rows of tail operands lie 16 bytes of NaN; the layout decides which axis is contiguous."""
    strided = filled(problem, awkward=True).tensors
    axes = LAYOUTS[problem.layout]
    for name, names, contiguous in zip("ab", ("mk", "kn"), axes, strict=True):
        matrix = strided[name]
        inner = names.index(contiguous)
        strides, extent = matrix.stride()[-2:], matrix.shape[-2:][inner]
        assert strides[inner] == 1 and (strides[1 - inner] - extent) * matrix.element_size() == 16
        values = torch.as_strided(matrix, (extent + 1,), (1,)).float()
        assert values[:extent].isfinite().all() and values[extent].isnan()
    assert all(x.is_contiguous() or x.transpose(-1, -2).is_contiguous() for x in operands(problem))


def test_tf32_operands_hold_no_more_than_the_mma_reads() -> None:
    """The lower 13 bits of their fractions are zero, or the reference would be of another product; and
    torch may round operands only while it is compared with."""
    problem = Problem(24, 40, 64, ab_dtype="tf32")
    inputs, theirs = filled(problem), new_out(problem)
    for matrix in operands(problem):
        assert matrix.dtype == torch.float32 and matrix.unique().numel() > 100
        assert not (matrix.contiguous().view(torch.int32) & 0x1FFF).any()
    before = torch.get_float32_matmul_precision()
    [(name, baseline)] = GEMM.baselines(problem, inputs, {"out": theirs}).items()
    baseline(inputs, {"out": theirs})
    assert name == "torch.mm in tf32" and torch.get_float32_matmul_precision() == before


def test_sampled_comparison_finds_errors_on_tile_edges() -> None:
    """A large output is compared on some rows and columns; NaN is found anywhere, errors on edges surely."""
    problem = Problem(1000, 1000, 16)
    a, b = operands(problem)
    reference, output = GemmReference(problem, a, b, full_elements=300_000), poisoned(problem)
    assert 0.1 < reference.compared("out") < 1
    want, got, outputs = a.double() @ b.double(), output.tensor, {"out": output}
    got.copy_(want)
    assert judge(outputs, reference).ok
    for where in ((999, 5), (0, 500), (960, 3), (3, 999), (500, 992), (500, 0)):
        got.copy_(want)
        got[where] += 1
        verdict = judge(outputs, reference)
        assert verdict.where == where and not verdict.ok
    got.copy_(want)
    got[501, 501] = math.nan
    assert judge(outputs, reference).where == (501, 501)


def test_sampled_lines_favour_edges() -> None:
    """First, last and last tile's edge are always there; half are edges; the count is the limit."""
    assert sample_lines(100, 64, 100, 0) is None
    lines = sample_lines(10_000, 64, 100, 3)
    assert lines is not None and len(lines) == 100 and list(lines) == sorted(set(lines))
    assert {0, 9999, 9984, 9983} <= set(lines)
    assert sum(line % 64 in (0, 63) for line in lines) >= 45
    assert lines == sample_lines(10_000, 64, 100, 3) != sample_lines(10_000, 64, 100, 4)


@pytest.mark.parametrize("k", [64, 1024, 16384])
def test_tolerance_is_tight_against_one_lost_block(k: int) -> None:
    """For fp32 outputs what is allowed is far below the size of one block of 8 products."""
    problem = Problem(8, 8, k, out_dtype="fp32")
    norms = k / 3  # of uniform data
    block = math.sqrt(8) / 3
    assert accumulation_error(problem) * norms < block / 2


def test_tolerance_holds_for_truncating_fp32_sums() -> None:
    """Sums of 16 products at a time, truncated to 24 bits after each, stay within half of what is allowed."""
    problem = Problem(64, 64, 8192, out_dtype="fp32")
    a, b = (x.double() for x in operands(problem))
    total = torch.zeros(64, 64, dtype=torch.float64)
    for low in range(0, problem.k, 16):
        total += a[:, low : low + 16] @ b[low : low + 16]
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.trunc(mantissa * 2**24) / 2**24, exponent)
    norms = a.norm(dim=1)[:, None] * b.norm(dim=0)[None, :]
    used = ((total - a @ b).abs() / (norms * accumulation_error(problem))).max()
    assert 0.001 < used < 0.5
