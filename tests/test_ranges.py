"""Ranges of sizes: lines that parse back, members that the layout allows, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutegen.errors import ProblemError
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.ranges import Range, is_range, overlapping, parse_range

LINE = "gemm 1..8192x7168x2048 bf16 kk"


@pytest.mark.parametrize(
    ("line", "size", "ends"),
    [
        (LINE, "m", (1, 8192)),
        ("gemm 4x1..512x512x64 bf16 kn out=fp32 bias=n act=gelu", "m", (1, 512)),
        ("gemm 2..64x512x512x64 bf16 kk", "batch", (2, 64)),
        ("gemm 512x8..4096x64 fp16 kn", "n", (8, 4096)),
        ("gemm 512x512x64..8192 e4m3 kk promote", "k", (64, 8192)),
        ("gemm 8..4096x512x64 bf16 mn any_order", "m", (8, 4096)),
        ("rmsnorm 1..65536x4096 bf16 residual", "m", (1, 65536)),
    ],
)
def test_a_range_prints_as_the_line_that_it_is_parsed_from(
    line: str, size: str, ends: tuple[int, int]
) -> None:
    """Any free size of any family, with its options."""
    found = parse_range(line)
    assert str(found) == line
    assert (found.size, (found.first, found.last)) == (size, ends)
    assert found.low in found and found.high in found


def test_a_range_holds_what_differs_in_its_size_only() -> None:
    """Other sizes, options and dtypes are other ranges."""
    found = parse_range(LINE)
    inside = Problem(77, 7168, 2048)
    assert inside in found and found.at(77) == inside
    for other in (
        Problem(8193, 7168, 2048),
        Problem(77, 7168, 4096),
        Problem(77, 7168, 2048, ab_dtype="fp16"),
        replace(inside, epilogue=Epilogue(bias="n")),
        replace(inside, any_order=True),
        replace(inside, unaligned_out=True),
    ):
        assert other not in found, other
    assert found.at(0) is None and found.at(8193) is None


@given(st.integers(8, 4096), st.integers(0, 600))
def test_a_range_holds_only_what_the_layout_allows(last: int, value: int) -> None:
    """With a contiguous m these are multiples of 8; the neighbours of any value are found."""
    found = Range(Problem(8, 64, 64, layout="mn"), Problem(8 * last, 64, 64, layout="mn"))
    assert (found.at(value) is not None) == (value % 8 == 0 and 8 <= value <= 8 * last)
    above, below = found.at_least(value), found.at_most(value)
    assert (above and above.m) == (max(8, -(-value // 8) * 8) if value <= 8 * last else None)
    assert (below and below.m) == (min(8 * last, value // 8 * 8) if value >= 8 else None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gemm 8192..1x7168x2048 bf16 kk", "range 8192..1 of m is reversed; write 1..8192"),
        ("gemm 64..64x7168x2048 bf16 kk", "has one size; write the size alone"),
        ("gemm ..64x7168x2048 bf16 kk", "is no range, or has several; write for example 1..8192"),
        ("gemm 64..x7168x2048 bf16 kk", "is no range"),
        ("gemm 1..2..3x7168x2048 bf16 kk", "is no range, or has several"),
        ("gemm 1...3x7168x2048 bf16 kk", "is no range, or has several"),
        ("gemm 1..8x8..64x2048 bf16 kk", "is no range, or has several"),
        ("gemm 64x7168x2048 bf16 kk", "is no range"),
        ("gemm 0..64x7168x2048 bf16 kk", "m=0 must be an integer from 1"),
        (f"gemm 1..{'9' * 5000}x8x8 bf16 kk", "has 5000 digits"),
        (f"gemm {'9' * 5000}..{'8' * 5000}x8x8 bf16 kk", "has 5000 digits"),
        ("gemm 1..8192x64x64 bf16 mn", "m=1, which must be a multiple of 8"),
        ("gemm 64x64x1..64 bf16 kk", "k=1, which must be a multiple of 8"),
        ("gemm 64x1..64x64 bf16 kn", "n=1, which must be a multiple of 8"),
        ("gemm 64x1..64x64 bf16 kk", "range 1..64 of n: .* need different kernels"),
        ("gemm 1..8x64x64x64 bf16 kk", "range 1..8 of batch: .* need different kernels"),
        ("rmsnorm 4096x1024..4096 bf16", "n of rmsnorm is compiled in, .* valid: a range of m"),
        ("nobody 1..64x64 bf16", "names no kernel family"),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_range_is_refused_with_the_reason(line: str, message: str) -> None:
    """Empty, reversed, malformed, forbidden by the layout, or over a size that is compiled in."""
    with pytest.raises(ProblemError, match=message):
        parse_range(line)


def test_ends_of_different_kinds_are_no_range() -> None:
    """Two problems that differ in anything else."""
    low = Problem(1, 64, 64)
    for high in (Problem(64, 128, 64), Problem(64, 64, 64, ab_dtype="fp16"), replace(low, any_order=True)):
        with pytest.raises(ProblemError, match=r"one size|need different kernels"):
            Range(low, high)


def test_overlapping_ranges_are_found() -> None:
    """Of one kind, whatever the order; neighbours and other kinds do not overlap."""
    lines = ("gemm 1..64x64x64 bf16 kk", "gemm 65..128x64x64 bf16 kk", "gemm 1..64x128x64 bf16 kk")
    apart = [parse_range(line) for line in (*lines, "gemm 64x8..64x64 bf16 kk")]
    assert overlapping(apart) is None
    more = parse_range("gemm 128..256x64x64 bf16 kk")
    assert overlapping([more, *apart]) == (apart[1], more)


ALIGNED, ODD = "gemm 64x8..64x64 bf16 kk", "gemm 64x9..65x64 bf16 kk"
UNALIGNED = f"{ALIGNED} unaligned"


@pytest.mark.parametrize("line", [ALIGNED, ODD, UNALIGNED, "gemm 64x9..64x64 bf16 kk unaligned"])
def test_a_range_of_n_contains_what_it_has_at_its_sizes(line: str) -> None:
    """Aligned rows at multiples of 8, unaligned ones between them; who says unaligned gets both."""
    found = parse_range(line)
    assert str(found) == line
    for n in range(8, 66):
        one = Problem(64, n, 64)
        for problem in (one, replace(one, unaligned_out=True)):
            assert (problem in found) == (found.at(n) == problem), problem
    held = [n for n in range(8, 66) if found.at(n) is not None]
    whole = range(found.first, found.last + 1)
    assert held == [n for n in whole if "unaligned" in line or (n % 8 == 0) == (line == ALIGNED)]


def test_ranges_of_n_overlap_if_they_hold_the_same_problem() -> None:
    """Whatever their lines say of the alignment, and whatever stands between them."""
    aligned, odd, unaligned = map(parse_range, (ALIGNED, ODD, UNALIGNED))
    assert overlapping([aligned, odd]) is None and overlapping([aligned, unaligned]) is None
    assert overlapping([aligned, odd, unaligned]) == (unaligned, odd)
    inside = parse_range("gemm 64x16..24x64 bf16 kk unaligned")
    other = parse_range("gemm 64x10..12x64 bf16 kk any_order")
    assert overlapping([inside, other, odd]) == (odd, inside)


def test_only_text_with_dots_is_meant_to_be_a_range() -> None:
    """Numbers and plain words are not."""
    assert is_range("1..8") and is_range(LINE) and is_range("1...")
    assert not is_range(8) and not is_range("8") and not is_range(None)
