"""Laws of poisoned outputs of every dtype and rank: what was left out, and what was touched by mistake."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="outputs are torch tensors")

from cutegen.dtypes import DTYPE_BYTES, TORCH_DTYPES, torch_dtype  # noqa: E402
from cutegen.family import Argument  # noqa: E402
from cutegen.measure.poisoned_output import (  # noqa: E402
    NEVER,
    PoisonedOutput,
    first_difference,
    is_poisoned,
    new_output,
    poison,
    same_bits,
    unwritten,
)

CPU = torch.device("cpu")
#: Types in which no kernel may write poison: NaN, more than a sum of bytes, or a byte that is no truth value.
CERTAIN = ("bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2", "e8m0", "int32", "bool")
UNCERTAIN = ("int8", "uint8", "int64")
SHAPES = ((7,), (5, 6), (3, 4, 5), (2, 3, 4, 5))


def poisoned(
    dtype: str, shape: tuple[int, ...], *, aligned: bool = True, gaps: bool = True, initial: object = None
) -> PoisonedOutput:
    argument = Argument("y", "out", dtype, shape, aligned)
    return PoisonedOutput(argument, CPU, gaps=gaps, initial=initial)  # type: ignore[arg-type]


def ones(output: PoisonedOutput) -> torch.Tensor:
    return torch.ones(output.tensor.shape).to(output.tensor.dtype)


def last(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent - 1 for extent in shape)


def test_every_dtype_is_one_or_the_other() -> None:
    assert {*CERTAIN, *UNCERTAIN} == {*TORCH_DTYPES}
    assert all(poisoned(dtype, (4,)).is_certain == (dtype in CERTAIN) for dtype in TORCH_DTYPES)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_the_last_element_counts_and_everything_around_it_is_watched(
    dtype: str, shape: tuple[int, ...], gaps: bool
) -> None:
    """Nothing is stray after a complete store; each neighbour of the output is, when it changes."""
    output = poisoned(dtype, shape, gaps=gaps)
    output.poison()
    assert output.tensor.shape == shape and output.tensor.stride(-1) == 1
    assert output.unwritten() == (math.prod(shape), (0,) * len(shape))
    at = last(shape)
    good = ones(output)
    output.tensor.copy_(good)
    assert output.unwritten() == (0, ()) and output.stray() == 0
    start = output.tensor.storage_offset()
    end = start + sum(i * step for i, step in zip(at, output.tensor.stride(), strict=True))
    outside = [0, start - 1, end + 1, output.buffer.numel() - 1]
    outside += [start + shape[-1]] if gaps and len(shape) > 1 else []  # behind the first row
    for count, place in enumerate(outside, 1):
        output.buffer[place : place + 1].copy_(good.flatten()[:1])
        assert output.stray() == count, place
    assert output.unwritten() == (0, ())
    output.poison()
    output.tensor.copy_(good)
    poison(output.tensor[at[:-1]][-1:])
    assert output.unwritten() == (1, at) and output.stray() == 0


@pytest.mark.parametrize("dtype", UNCERTAIN)
def test_where_any_value_may_be_right_two_runs_tell_what_was_not_written(dtype: str) -> None:
    """One run may write what poison is; only what holds the poison of both runs was left."""
    first, again = poisoned(dtype, (4, 6)), poisoned(dtype, (4, 6))
    first.poison(0)
    again.poison(1)
    assert first.kept_poison_of_both(again) and not same_bits(first.tensor, again.tensor)
    for output in (first, again):
        output.tensor.copy_(ones(output))
    value = first.buffer[0].clone()
    for output in (first, again):
        output.tensor[3, 5] = value  # by chance the poison of the first run
    assert not first.kept_poison_of_both(again)
    assert first.unwritten() == (1, (3, 5)) and again.unwritten() == (0, ())
    again.poison(1)
    again.tensor.copy_(first.tensor)
    poison(again.tensor[3, 5:], 1)
    assert first.kept_poison_of_both(again)
    assert first.stray() == again.stray() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64", "e5m2"])
def test_what_is_not_finite_counts_as_not_written(dtype: str, value: float) -> None:
    output = poisoned(dtype, (4, 6))
    output.poison()
    output.tensor.copy_(ones(output))
    output.tensor[2, 1] = value
    assert output.unwritten() == (1, (2, 1))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("columns", [8, 7])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_rows_start_at_16_bytes_exactly_where_they_must(dtype: str, columns: int, gaps: bool) -> None:
    """Aligned outputs do if their rows are whole steps of 16 bytes; others never do."""
    size = DTYPE_BYTES[dtype]
    whole = columns * size % 16 == 0
    steps = {}
    for aligned in (True, False):
        tensor = poisoned(dtype, (3, columns), aligned=aligned, gaps=gaps).tensor
        steps[aligned] = (tensor.stride(0) * size % 16, tensor.storage_offset() * size % 16)
    assert steps[False][0] != 0
    if whole:
        assert steps[True] == (0, 0)
    if gaps:
        assert steps[False][1] != 0


def test_gaps_lie_between_rows_and_between_matrices() -> None:
    packed, spread = poisoned("bf16", (3, 4, 8), gaps=False), poisoned("bf16", (3, 4, 8))
    assert packed.tensor.stride() == (32, 8, 1) and spread.tensor.stride() == (6 * 16, 16, 1)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "e4m3"])
def test_what_is_worked_on_in_place_holds_its_values_before_each_run(dtype: str) -> None:
    """Its surroundings are poisoned all the same."""
    before = torch.arange(24).view(4, 6).to(torch_dtype(dtype))
    output = poisoned(dtype, (4, 6), initial=before)
    assert not output.must_be_written and poisoned(dtype, (4, 6)).must_be_written
    for turn in (0, 1):
        output.poison(turn)
        assert same_bits(output.tensor, before) and output.stray() == 0
        output.tensor.copy_(ones(output))
        output.buffer[0:1].copy_(ones(output).flatten()[:1])
        assert output.stray() == 1


def test_bits_are_compared_not_values() -> None:
    """NaN equals itself, the zeros differ, and the first difference is where it is."""
    x = torch.tensor([[0.0, math.nan], [1.0, 2.0]])
    assert same_bits(x, x.clone()) and first_difference(x, x.clone()) == ()
    y = x.clone()
    y[0, 0] = -0.0
    assert not same_bits(x, y) and first_difference(x, y) == (0, 0)
    z = x.clone()
    z[1, 1] = 3
    assert first_difference(x, z) == (1, 1)


def test_large_tensors_are_looked_at_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts add up and places stay those of the whole."""
    monkeypatch.setattr("cutegen.measure.poisoned_output._CHUNK_BYTES", 64)
    output = poisoned("fp32", (9, 8))
    output.poison()
    output.tensor.copy_(ones(output))
    output.tensor[6:8, 3] = math.nan
    assert output.unwritten() == (2, (6, 3)) and output.stray() == 0
    other = output.tensor.clone()
    other[8, 7] = 5
    assert first_difference(output.tensor, other) == (8, 7)


def test_a_fresh_output_is_as_a_caller_would_make_it() -> None:
    """Dense where rows are aligned or their size is odd, one element wider where they must not be."""
    for aligned, columns, pitch in ((True, 8, 8), (True, 7, 7), (False, 7, 7), (False, 8, 9)):
        tensor = new_output(Argument("y", "out", "bf16", (3, columns), aligned), CPU)
        assert tensor.shape == (3, columns) and tensor.stride() == (pitch, 1)


@pytest.mark.parametrize(("align_bytes", "gap", "start"), [(16, 16, 0), (8, 8, 8), (1, 1, 1)])
def test_rows_are_no_more_aligned_than_kernels_must_bear(align_bytes: int, gap: int, start: int) -> None:
    """Nor is where the output starts, if that is less than 16 bytes."""
    output = PoisonedOutput(Argument("y", "out", "e4m3", (3, 32), align_bytes=align_bytes), CPU, gaps=True)
    assert output.tensor.stride() == (32 + gap, 1) and output.tensor.storage_offset() % 16 == start
    odd = Argument("y", "out", "e4m3", (3, 29), aligned=False, align_bytes=align_bytes)
    assert PoisonedOutput(odd, CPU, gaps=True).tensor.stride() == (33, 1)
    assert PoisonedOutput(odd, CPU, gaps=True).tensor.storage_offset() % 16 == 1


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_an_output_counts_as_left_alone_only_if_that_is_certain(dtype: str) -> None:
    """One poisoned element is enough where no kernel writes it, else all must be."""
    tensor = torch.empty(4, 6, dtype=torch_dtype(dtype))
    poison(tensor)
    assert is_poisoned(tensor) and unwritten(tensor)[0] == 24
    tensor[0].copy_(torch.ones(6).to(tensor.dtype))
    assert is_poisoned(tensor) == (dtype in CERTAIN)


def test_poison_of_int32_is_beyond_sums_of_bytes() -> None:
    assert abs(NEVER) > 127 * 128 * 2**16
