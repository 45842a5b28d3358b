"""Laws of block-scaled operands: where they lie, what they mean, that the check finds mistakes with them.

Kernels are played by torch on the CPU with a decoder of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="operands are torch tensors")

from blockscaled_numbers import (  # noqa: E402
    BLOCKS,
    E2M1,
    TABLES,
    decoded,
    element,
    factor,
    filled,
    place,
    problem_of,
    product,
)
from host_lane import HostLane, candidate, new_engine  # noqa: E402

from cutegen.errors import ProblemError  # noqa: E402
from cutegen.families.gemm import block_scaled as blockscaled  # noqa: E402
from cutegen.families.gemm.inputs import ALPHA  # noqa: E402
from cutegen.families.gemm.problem import BLOCK_SCALED, Problem  # noqa: E402
from cutegen.families.gemm.reference import GemmReference, accumulation_error  # noqa: E402
from cutegen.families.gemm.tail_shapes import tail_problems  # noqa: E402
from cutegen.measure.policy import Policy  # noqa: E402
from cutegen.measure.timed_rounds import time_in_rounds  # noqa: E402
from cutegen.measure.torch_engine import TorchEngine  # noqa: E402

DTYPES = tuple(BLOCK_SCALED)


#: Odd sizes: neither whole tiles of scale factors nor, for the second, of 16 columns.
PROBLEMS = [
    problem_of(line.format(dtype))
    for dtype in DTYPES
    for line in ("150x144x224 {} kk", "150x137x224 {} kk out=fp32 alpha", "2x40x48x96 {} kk out=fp16 alpha")
]


# --- where things lie, and which numbers they are ---


def test_codes_and_factors_are_the_numbers_of_the_formats() -> None:
    """All 16 values of e2m1, all of e8m0 and e4m3, against tables and against torch's own conversions."""
    codes = torch.arange(16, dtype=torch.uint8)
    assert blockscaled.e2m1_values(codes).tolist() == list(E2M1)
    assert str(blockscaled.e2m1_values(codes).tolist()) == str(list(E2M1)), "the zeros have their signs"
    every = torch.arange(256, dtype=torch.uint8)
    for scale, dtype in (("e8m0", torch.float8_e8m0fnu), ("e4m3", torch.float8_e4m3fn)):
        found = blockscaled.scale_values(every, scale)
        finite = ~found.isnan()
        name = "e8m0" if scale == "e8m0" else "ue4m3"
        assert (~finite).nonzero().flatten().tolist() == ([255] if scale == "e8m0" else [127, 255])
        assert torch.equal(found[finite].double(), torch.tensor(TABLES[name], dtype=torch.float64)[finite])
        low = every[:127]
        assert torch.equal(found[:127], low.view(dtype).float())


def test_two_elements_share_a_byte_the_first_in_its_low_bits() -> None:
    codes = torch.tensor([[1, 2, 15, 0], [0, 8, 7, 9]], dtype=torch.uint8)
    packed = blockscaled.pack(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x80, 0x97]]
    assert torch.equal(blockscaled.unpack(packed), codes)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (129, 5), (300, 14), (31, 8)])
def test_scale_factors_lie_where_the_space_says(rows: int, blocks: int) -> None:
    """Every byte by the formula; what no row or block owns is padding; reading back inverts it."""
    scales = torch.randint(0, 200, (2, rows, blocks), dtype=torch.uint8)
    memory = blockscaled.lay_out(scales, 251)
    each = -(-rows // 128) * -(-blocks // 4) * 512
    assert memory.shape == (2 * each,)
    owned = set()
    for batch in range(2):
        for row in range(rows):
            for block in range(blocks):
                at = batch * each + place(row, block, blocks)
                assert memory[at] == scales[batch, row, block]
                owned.add(at)
    assert {at for at in range(2 * each) if memory[at] == 251} == set(range(2 * each)) - owned
    assert torch.equal(blockscaled.read_back(memory, 2, rows, blocks), scales)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_operands_are_what_a_kernel_is_given(problem: Problem) -> None:
    """Bytes along k, scale factors of the right type and number, which vary."""
    load = filled(problem)
    batch = () if problem.batch == 1 else (problem.batch,)
    width = problem.k // 2 if problem.ab_dtype == "nvfp4" else problem.k
    assert load.a.shape == (*batch, problem.m, width) and load.b.shape == (*batch, width, problem.n)
    assert load.a.stride(-1) == 1 == load.b.stride(-2)
    kinds = {
        "nvfp4": (torch.uint8, torch.float8_e4m3fn),
        "mxfp8_e4m3": (torch.float8_e4m3fn, torch.float8_e8m0fnu),
        "mxfp8_e5m2": (torch.float8_e5m2, torch.float8_e8m0fnu),
    }
    assert load.scales is not None
    assert (load.a.dtype, load.scales[0].dtype) == kinds[problem.ab_dtype]
    assert (load.b.dtype, load.scales[1].dtype) == kinds[problem.ab_dtype]
    sizes = [scale.numel() for scale in load.scales]
    assert sizes == [problem.batch * count for count in problem.scale_factors]
    for scale in load.scales:
        values = set(scale.view(torch.uint8).tolist()) - {0}
        assert len(values) == (24 if problem.ab_dtype == "nvfp4" else 5)
    if problem.ab_dtype == "nvfp4":
        assert set(blockscaled.unpack(load.a).unique().tolist()) == set(range(16))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_padding_is_zero_for_cublas_and_large_on_tails(problem: Problem) -> None:
    """Large but finite, also multiplied: zero times it is zero, anything else a wrong result."""
    pads = {False: 0.0, True: 448.0 if problem.ab_dtype == "nvfp4" else 2.0**60}
    for padded, pad in pads.items():
        load = filled(problem, padded=padded)
        assert load.scales is not None
        for scale, rows in zip(load.scales, (problem.m, problem.n), strict=True):
            blocks = problem.k // BLOCKS[problem.ab_dtype][0]
            values = scale.view(torch.uint8).view(problem.batch, -1)
            owned = {place(row, block, blocks) for row in range(rows) for block in range(blocks)}
            rest = [at for at in range(values.shape[1]) if at not in owned]
            assert rest
            numbers = torch.tensor(TABLES[BLOCKS[problem.ab_dtype][2]])[values[:, rest].long()]
            # A byte of zero is the smallest power of two.
            assert ((numbers == pad) | ((pad == 0) & (numbers == 2.0**-127))).all()
    assert math.isfinite(float(torch.tensor(pads[True]) ** 2 * 6 * 6))


def test_scale_factors_of_both_kinds_are_refused() -> None:
    with pytest.raises(ProblemError, match="has scale factors along k already; one for each operand goes"):
        filled(problem_of("150x144x224 nvfp4 kk scale"))


# --- the reference ---


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_decoding_is_exact(problem: Problem, padded: bool) -> None:
    """Every number equals the one of the other decoder, and bf16 holds it."""
    load = filled(problem, padded=padded)
    assert load.scales is not None
    a, b = load.numbers()
    assert a.shape[-2:] == (problem.m, problem.k) and b.shape[-2:] == (problem.k, problem.n)
    assert torch.equal(a.double(), decoded(load.a, load.scales[0], problem.ab_dtype))
    theirs = decoded(load.b.transpose(-1, -2), load.scales[1], problem.ab_dtype)
    assert torch.equal(b.double().transpose(-1, -2), theirs)
    assert torch.equal(a.bfloat16().float(), a) and torch.equal(b.bfloat16().float(), b)
    assert len(a.unique()) > 40


def test_decoding_by_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    load = filled(PROBLEMS[-1])
    whole = load.numbers()
    monkeypatch.setattr(blockscaled, "_CHUNK", 3 * 96)
    assert all(torch.equal(x, y) for x, y in zip(whole, load.numbers(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_plain_triple_loop(dtype: str) -> None:
    """Element by element, term by term: what the reference gives, to the last bits of fp64."""
    problem = problem_of(f"3x5x96 {dtype} kk out=fp32 alpha")
    load = filled(problem, padded=True)
    assert load.scales is not None
    stored_b = load.b.T
    reference = GemmReference(problem, *load.numbers(), alpha=ALPHA)
    [chunk] = reference.chunks("out", torch.zeros(3, 5))
    for row in range(3):
        for column in range(5):
            total = 0.0
            for at in range(96):
                left = element(load.a, row, at, dtype) * factor(load.scales[0], row, at, 96, dtype)
                right = element(stored_b, column, at, dtype) * factor(load.scales[1], column, at, 96, dtype)
                total += left * right
            assert float(chunk.want[0, row, column]) == pytest.approx(ALPHA * total, rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [224, 1024])
def test_tolerance_holds_for_sums_of_14_bits_and_not_for_one_wrong_block(dtype: str, k: int) -> None:
    """Sums that keep 14 bits stay within half of it; one factor of one row, off by two, does not."""
    problem = problem_of(f"64x192x{k} {dtype} kk out=fp32")
    load = filled(problem)
    a, b = (x.double() for x in load.numbers())
    norms = a.norm(dim=1)[:, None] * b.norm(dim=0)[None, :] * accumulation_error(problem)
    total = torch.zeros(64, 192, dtype=torch.float64)
    step = 64 if dtype == "nvfp4" else 32
    for low in range(0, k, step):
        total += a[:, low : low + step] @ b[low : low + step]
        mantissa, exponent = torch.frexp(total)
        total = torch.ldexp(torch.trunc(mantissa * 2**14) / 2**14, exponent)
    assert 0.001 < ((total - a @ b).abs() / norms).max() < 0.5
    block = BLOCKS[dtype][0]
    for at in (0, k - block):
        off = a[:, at : at + block] @ b[at : at + block]
        assert ((off.abs() / norms).amax(dim=1) > 1).all(), "each row would be found, whichever is off"


# --- the check ---


class Kernel:
    """A product with the calling convention of compiled kernels, a decoder of its own, and one mistake."""

    def __init__(self, problem: Problem, mistake: str) -> None:
        self.problem = problem
        self.mistake = mistake

    def __call__(self, a: Any, b: Any, d: Any, *rest: Any) -> None:
        scales, (clusters, swizzle, along_m, *factors) = list(rest[:2]), rest[2:]
        assert all(type(x) is int for x in (clusters, swizzle, along_m))
        a, scales = self.spoil(a, scales)
        value = product(a, b, scales, self.problem.ab_dtype)
        if self.problem.epilogue.alpha and self.mistake != "forgets alpha":
            value = value * factors[0]
        assert len(factors) == self.problem.epilogue.alpha
        d.copy_(value)

    def spoil(self, a: Any, scales: list[Any]) -> tuple[Any, list[Any]]:
        first = scales[0].clone()
        raw = first.view(torch.uint8)
        blocks = self.problem.k // BLOCKS[self.problem.ab_dtype][0]
        if self.mistake == "swaps two factors":
            row = next(r for r in range(32) if raw[place(r, 0, blocks)] != raw[place(r, 1, blocks)])
            one, other = place(row, 0, blocks), place(row, 1, blocks)
            raw[[one, other]] = raw[[other, one]]
        if self.mistake == "doubles a factor":
            raw[place(5, 2, blocks)] += 8 if self.problem.ab_dtype == "nvfp4" else 1
        if self.mistake == "halves a factor":
            raw[place(5, 2, blocks)] -= 8 if self.problem.ab_dtype == "nvfp4" else 1
        if self.mistake == "swaps A's factors with B's":
            count = min(len(scale) for scale in scales)
            raw[:count] = scales[1].view(torch.uint8)[:count]
        if self.mistake == "takes the next quarter":
            raw.copy_(raw.view(-1, 32, 4, 4).roll(1, 2).flatten())
        if self.mistake == "takes padding":
            raw[place(0, blocks - 1, blocks)] = raw.view(-1)[place(0, blocks, blocks)]
        if self.mistake == "swaps nibbles":
            a = a >> 4 | a << 4
        return a, [first, scales[1]]


class Untimed(HostLane):
    """Runs no graphs: nobody here looks at how long the baselines take."""

    def replay_us(self, graph: Any, replays: int) -> float:
        return 1.0


def engine(lane: HostLane) -> TorchEngine:
    def load(library: Path, symbol: str) -> Callable[..., None]:
        return Kernel(Problem.parse(str(library)), symbol)

    return new_engine(lane, load)


@cache
def opened_with(problem: Problem) -> TorchEngine:
    """An engine that checks many kernels for a problem, as it does in a search."""
    opened = engine(Untimed())
    opened.open(problem, 0)
    return opened


def judged(problem: Problem, mistake: str, which: str) -> Any:
    tail = tail_problems(problem)[0]
    subject = candidate(problem, mistake, tail=tail, scalars=(3, 1, 0))
    if which == "tail":  # the kernel works on what it is given
        subject = replace(subject, shared_object=Path(str(tail)))
    return opened_with(problem).check(subject, tail if which == "tail" else problem)


@pytest.mark.parametrize("which", ["problem", "tail"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_right_kernel_passes(problem: Problem, which: str) -> None:
    """On operands side by side and on odd ones in poisoned surroundings."""
    verdict = judged(problem, "right", which)
    assert verdict.ok and verdict.deterministic and verdict.compared == 1, verdict
    assert verdict.max_error <= verdict.tolerance


MISTAKES = (
    "swaps two factors",
    "doubles a factor",
    "halves a factor",
    "swaps A's factors with B's",
    "takes the next quarter",
)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.batch == 1], ids=str)
def test_a_misplaced_factor_is_found(problem: Problem, mistake: str) -> None:
    """One of one row is enough, by whichever output it shows."""
    verdict = judged(problem, mistake, "problem")
    assert not verdict.ok and "should be" in verdict.reason, verdict
    if mistake.endswith(" a factor"):
        assert verdict.where[0] == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_misplaced_factor_is_found_on_a_tail(dtype: str) -> None:
    """Though that is larger, and its operands are a different draw."""
    verdict = judged(problem_of(f"150x144x224 {dtype} kk"), "swaps two factors", "tail")
    assert not verdict.ok and "should be" in verdict.reason, verdict


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.epilogue.alpha], ids=str)
def test_a_forgotten_alpha_is_found(problem: Problem) -> None:
    assert "should be" in judged(problem, "forgets alpha", "problem").reason


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.ab_dtype == "nvfp4"], ids=str)
def test_swapped_nibbles_are_found(problem: Problem) -> None:
    assert "should be" in judged(problem, "swaps nibbles", "problem").reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_that_gets_into_a_result_is_found(dtype: str) -> None:
    """The tail has blocks that are padding; reading one of them in place of the last ruins a row."""
    verdict = judged(problem_of(f"150x144x224 {dtype} kk"), "takes padding", "tail")
    assert not verdict.ok and verdict.where[0] == 0


def test_rounds_time_kernels_against_the_vendor() -> None:
    """Operands rotate, graphs are captured, the reference has its name."""
    problem = PROBLEMS[0]
    opened = engine(HostLane())
    facts = opened.open(problem, 0)
    assert facts["sets"] > 1 and facts["reference"] == "torch.mm of decoded bf16 + copy"
    policy = Policy(clock="burst", rounds=2, min_rounds=2, round_us=100)
    subject = candidate(problem, "right", scalars=(3, 1, 0))
    result = time_in_rounds(opened, [subject], policy, facts["reference"], lambda name: None)
    assert set(result.timings) == {"right"} and not result.failures
    assert result.reference.reference == facts["reference"]
