"""The kernel that runs before each launch: it writes what it should, changes no bit, and spans the cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="it works on torch tensors")

from cutegen.measure.predecessor import Predecessor  # noqa: E402
from cutegen.measure.sizing import plan_copies  # noqa: E402

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


def every_byte(dtype: torch.dtype) -> torch.Tensor:
    """All values of a byte in every place, NaN, infinities and both zeros among them."""
    raw = torch.arange(2048, dtype=torch.int32).to(torch.uint8)
    return raw.view(dtype).view(-1, 8).clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_it_writes_a_tensor_of_any_dtype_and_changes_no_bit(dtype: torch.dtype, transposed: bool) -> None:
    """Its version counts writes; as bytes it is what it was."""
    tensor = every_byte(dtype)
    tensor = tensor.t() if transposed else tensor
    before, version = tensor.clone().contiguous().view(torch.uint8), tensor._version
    for call in Predecessor([tensor], 1).calls(3):
        call()
    assert tensor._version == version + 3
    assert torch.equal(tensor.contiguous().view(torch.uint8), before)


def test_it_takes_turns_with_the_operands() -> None:
    """Launch i follows the one that wrote the first input of set i; on its own it writes none of them."""
    sets = [torch.ones(4, 4) for _ in range(3)]
    predecessor = Predecessor(sets, 1000)
    for call in predecessor.calls(5):
        call()
    assert [tensor._version for tensor in sets] == [2, 2, 1]
    for call in predecessor.own_calls(50):
        call()
    assert [tensor._version for tensor in sets] == [2, 2, 1]
    assert len({tensor.data_ptr() for tensor in predecessor._copies}) == 47  # 3 caches of 1000 bytes
    assert predecessor._copies[0].numel() == 16 and predecessor._copies[0].element_size() == 4


def test_one_of_nothing_touches_no_operand() -> None:
    """A single element of its own."""
    predecessor = Predecessor.of_nothing(torch.device("cpu"))
    for call in [*predecessor.calls(2), *predecessor.own_calls(2)]:
        call()
    assert [tensor.numel() for tensor in (*predecessor._written, *predecessor._copies)] == [1, 1]


@pytest.mark.parametrize(
    ("size", "least", "copies"), [(60, 1, 3), (59, 1, 4), (1, 1, 180), (1000, 1, 1), (1000, 4, 4)]
)
def test_copies_span_three_caches(size: int, least: int, copies: int) -> None:
    """As many as there are sets, at least; no more than a graph has launches."""
    assert plan_copies(size, 60, least) == copies
    assert plan_copies(1, 10**6, 1) == 200
