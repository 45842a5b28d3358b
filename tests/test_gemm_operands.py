"""Laws of the operand checks: what is refused, in which words, and what a tensor is taken for."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutegen.errors import OperandError
from cutegen.families.gemm import operands
from cutegen.families.gemm.operands import Operands, Request, describe
from cutegen.families.gemm.problem import Epilogue, Problem
from cutegen.families.strides import View, overlap, span_bytes

torch = pytest.importorskip("torch")
BF16 = torch.bfloat16


def matrix(*shape: int, dtype: Any = BF16, stride: tuple[int, ...] | None = None, offset: int = 0) -> Any:
    """A CPU tensor of any strides, starting ``offset`` elements behind an aligned address."""
    steps = stride or torch.empty(shape, device="meta").stride()
    last = sum((e - 1) * s for e, s in zip(shape, steps, strict=True) if e)
    size = torch.empty((), dtype=dtype).element_size()
    buffer = torch.zeros(last + 1 + offset + 64 // size, dtype=dtype)
    skip = -(buffer.data_ptr() // size) % (64 // size)
    return torch.as_strided(buffer, shape, steps, skip + offset)


def see(a: Any, b: Any, **options: Any) -> Any:
    return describe(Request(a, b, **options), device_type="cpu")


def test_layout_follows_strides() -> None:
    """Each operand may be contiguous along either axis; the letters say which."""
    for letters, a, b in (
        ("kn", matrix(16, 32), matrix(32, 8)),
        ("kk", matrix(16, 32), matrix(8, 32).t()),
        ("mn", matrix(32, 16).t(), matrix(32, 8)),
        ("mk", matrix(32, 16).t(), matrix(8, 32).t()),
    ):
        found = see(a, b)
        assert found.problem == Problem(16, 8, 32, layout=letters)
        assert found.views == (None,) * 3


UNUSUAL = (
    *(("alpha", 2.0), ("alpha", "1"), ("alpha", 1), ("beta", 0.5), ("activation", "relu")),
    *(("out_dtype", BF16), ("out_dtype", torch.float32), ("fast_accum", True), ("any_order", True)),
)


def test_usual_requests_are_described_as_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense matrices and almost dense ones, aligned or not, with an output or an option that is not usual."""
    generator = Random(5)
    sizes, dtypes = (1, 2, 7, 8, 16, 24, 64), (BF16, BF16, torch.float16, torch.float32)
    usual = 0
    for _ in range(3000):
        m, n, k = (generator.choice(sizes) for _ in range(3))
        dtype, odd = generator.choice(dtypes), generator.random() < 0.1

        def operand(rows: int, columns: int, dtype: Any = dtype, odd: bool = odd) -> Any:
            pad, offset = (generator.choice((0, 1, 8)) if odd else 0 for _ in range(2))
            if generator.random() < 0.5:
                return matrix(rows, columns, dtype=dtype, stride=(columns + pad, 1), offset=offset)
            return matrix(rows, columns, dtype=dtype, stride=(1, rows + pad), offset=offset)

        options: dict[str, Any] = {}
        if generator.random() < 0.9:
            out_dtype = dtype if generator.random() < 0.9 else torch.float32
            options["out"] = operand(m, n, out_dtype) if odd else matrix(m, n, dtype=out_dtype, stride=(n, 1))
        if generator.random() < 0.2:
            name, value = generator.choice(UNUSUAL)
            options[name] = value
        request = Request(operand(m, k), operand(k, n + (generator.random() < 0.02)), **options)
        found = []
        for quick in (operands._usual, lambda request, device_type: None):
            with monkeypatch.context() as patch:
                patch.setattr(operands, "_usual", quick)
                try:
                    found.append(describe(request, device_type="cpu"))
                except OperandError as error:
                    found.append(str(error))
        assert found[0] == found[1], request
        if isinstance(found[0], Operands) and found[0].dense:
            assert all(span_bytes(t) == t.nbytes for t in request.tensors.values())
        usual += operands._usual(request, "cpu") is not None
    assert usual > 300


def test_batches_and_pitches_are_taken_as_they_are() -> None:
    """A batch whose heads interleave and rows with a pitch are passed without a view."""
    heads = matrix(4, 16, 32, stride=(32, 128, 1))
    found = see(heads, matrix(4, 32, 8))
    assert found.problem == Problem(16, 8, 32, 4, layout="kn")
    assert found.views[0] is None
    assert see(matrix(16, 32, stride=(40, 1)), matrix(32, 8)).views[0] is None


def test_a_batch_of_one_is_a_plain_product() -> None:
    """Three dimensions with one batch go to the plain kernel, as views."""
    found = see(matrix(1, 16, 32), matrix(1, 32, 8), out=matrix(1, 16, 8))
    assert found.problem == Problem(16, 8, 32, layout="kn")
    assert found.shape == (1, 16, 8)
    assert found.views[:3] == (View((16, 32), (32, 1)), View((32, 8), (8, 1)), View((16, 8), (8, 1)))


def test_strides_along_an_extent_of_one_do_not_matter() -> None:
    """torch lets them be anything; the kernel gets ones that its signature accepts."""
    found = see(matrix(1, 32, stride=(1, 1)), matrix(8, 32).t())
    assert found.problem == Problem(1, 8, 32)
    assert found.views[0] == View((1, 32), (32, 1))
    assert see(matrix(1, 32, stride=(0, 1)), matrix(8, 32).t()).views[0] == View((1, 32), (32, 1))
    column = see(matrix(16, 32), matrix(1, 32).t(), out=matrix(16, 1, stride=(1, 7)))
    assert column.views[2] == View((16, 1), (1, 1))


def test_output_alignment_chooses_the_signature() -> None:
    """An odd pitch, an odd address or an odd n give the unaligned kernel instead of an error."""
    a, b = matrix(16, 32), matrix(32, 8)
    assert not see(a, b, out=matrix(16, 8)).problem.unaligned_out
    assert see(a, b, out=matrix(16, 8, stride=(9, 1))).problem.unaligned_out
    assert see(a, b, out=matrix(16, 8, offset=1)).problem.unaligned_out
    assert see(a, b, out=matrix(16, 8), c=matrix(16, 8, offset=1)).problem.unaligned_out
    assert see(a, matrix(3, 32).t()).problem.unaligned_out


def test_epilogue_is_what_was_asked_for() -> None:
    """alpha=1, c=None and beta=0 fuse nothing, so they share the plain kernel."""
    a, b, c = matrix(16, 32), matrix(32, 8), matrix(16, 8)
    assert see(a, b, alpha=1, c=c, beta=0.0).epilogue == Epilogue()
    bias = matrix(8)
    full = see(a, b, alpha=2.0, c=c, beta=1.0, bias=bias, activation="relu").epilogue
    assert full == Epilogue(True, True, "n", "relu")
    column = see(a, b, bias=matrix(16, 1))
    assert column.epilogue.bias == "m" and column.views[3] == View((16,), (1,))
    square = see(matrix(16, 32), matrix(32, 16), bias=matrix(16))
    assert square.epilogue.bias == "n"


@pytest.mark.parametrize(
    "shapes", [((0, 32), (32, 8)), ((16, 32), (32, 0)), ((16, 0), (0, 8)), ((0, 0), (0, 0))]
)
def test_nothing_to_multiply_is_no_problem(shapes: Any) -> None:
    """A size of 0 is described, but poses no problem to a kernel."""
    found = see(matrix(*shapes[0]), matrix(*shapes[1]))
    assert found.problem is None
    assert found.shape == (shapes[0][0], shapes[1][1])


BAD: dict[str, tuple[Any, str]] = {
    "dtype": (
        lambda: (matrix(8, 8, dtype=torch.float32), matrix(8, 8)),
        "a has dtype torch.float32; supported: torch.bfloat16, torch.float16, torch.float8_e4m3fn, "
        "torch.float8_e5m2, torch.int8",
    ),
    "two dtypes": (
        lambda: (matrix(8, 8), matrix(8, 8, dtype=torch.float16)),
        "b has dtype torch.float16 but a",
    ),
    "vector": (lambda: (matrix(8), matrix(8, 8)), r"a has shape \(8,\); it must be a matrix"),
    "ranks": (lambda: (matrix(2, 8, 8), matrix(8, 8)), "both must be matrices or both batches"),
    "batches": (lambda: (matrix(2, 8, 8), matrix(3, 8, 8)), "their batches must agree"),
    "sizes": (lambda: (matrix(8, 16), matrix(8, 8)), "its 8 rows must be the 16 columns of a"),
    "no axis": (lambda: (matrix(8, 8, stride=(32, 2)), matrix(8, 8)), "neither its rows nor its columns"),
    "pitch": (
        lambda: (matrix(8, 8, stride=(9, 1)), matrix(8, 8)),
        "its pitch must be a multiple of 8 ",
    ),
    "address": (lambda: (matrix(8, 8, offset=1), matrix(8, 8)), "a starts 2 bytes behind a multiple of 16"),
    "overlap": (lambda: (matrix(8, 16, stride=(8, 1)), matrix(16, 8)), "under which elements overlap"),
    "expanded": (lambda: (matrix(1, 8).expand(8, 8), matrix(8, 8)), "under which elements overlap"),
    "odd k": (lambda: (matrix(8, 12, stride=(16, 1)), matrix(12, 8)), "contiguous along k=12, which must be"),
    "array": (
        lambda: (matrix(8, 8).float().numpy(), matrix(8, 8)),
        "a is a ndarray; it must be a torch",
    ),
    "sparse": (lambda: (matrix(8, 8).to_sparse(), matrix(8, 8)), "a has layout torch.sparse_coo"),
    "meta": (lambda: (matrix(8, 8), torch.empty(8, 8, dtype=BF16, device="meta")), "b is on meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_refused(name: str) -> None:
    """Each names the operand, its value, the rule, and what would be valid."""
    make, message = BAD[name]
    with pytest.raises(OperandError, match=message):
        see(*make())


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "out shape": ({"out": lambda: matrix(8, 16)}, r"out has shape \(8, 16\); it must have the result's"),
    "out dtype": (
        {"out": lambda: matrix(8, 8, dtype=torch.float64)},
        "the result cannot have dtype torch.float64; of",
    ),
    "out twice": ({"out": lambda: matrix(8, 8), "out_dtype": torch.float32}, "but out_dtype=torch.float32"),
    "out columns": ({"out": lambda: matrix(8, 8).t()}, "its rows must be contiguous"),
    "out overlaps": ({"out": lambda: matrix(8, 8, stride=(4, 1))}, "under which elements overlap"),
    "wish": ({"out_dtype": torch.int32}, "the result cannot have dtype torch.int32; of"),
    "c shape": ({"c": lambda: matrix(1, 8)}, "c has shape"),
    "c dtype": (
        {"c": lambda: matrix(8, 8, dtype=torch.float32)},
        "c has dtype torch.float32 but",
    ),
    "bias shape": ({"bias": lambda: matrix(9)}, r"bias has shape \(9,\); it must be \(8,\)"),
    "bias stride": ({"bias": lambda: matrix(8, stride=(2,))}, "bias has stride 2"),
    "beta alone": ({"beta": 0.5}, "beta=0.5 scales c, which was not given"),
    "alpha": ({"alpha": "2"}, "alpha is a str; it must be a number"),
    "activation": ({"activation": "tanh"}, "unknown activation 'tanh'; valid: 'relu'"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused(name: str) -> None:
    """The same for everything that is not a or b."""
    options, message = BAD_OPTIONS[name]
    given_options = {key: value() if callable(value) else value for key, value in options.items()}
    with pytest.raises(OperandError, match=message):
        see(matrix(8, 8), matrix(8, 8), **given_options)


@pytest.mark.parametrize("name", ["a", "b", "out", "bias", "scale"])
def test_operands_with_the_negative_bit_are_refused(name: str) -> None:
    """Their memory holds the numbers with the other sign."""
    scaled = name == "scale"
    tensors = {"a": matrix(16, 32), "b": matrix(32, 8), "out": matrix(16, 8), "bias": matrix(8)}
    if scaled:
        name = "scale_a"
        tensors = {"a": matrix(16, 32, dtype=torch.int8), "b": matrix(8, 32, dtype=torch.int8).t()}
        tensors |= {"scale_a": torch.tensor(1.0), "scale_b": torch.tensor(1.0)}
    elif name != "bias":
        del tensors["bias"]
    tensors[name] = torch.tensor(1 + 2j).conj().imag if scaled else torch._neg_view(tensors[name])
    with pytest.raises(OperandError, match=rf"{name} has the negative bit.*pass {name}.resolve_neg"):
        see(tensors.pop("a"), tensors.pop("b"), **tensors)


def test_a_wrong_device_is_refused() -> None:
    """CPU tensors need a GPU."""
    a, b = matrix(8, 8), matrix(8, 8)
    with pytest.raises(OperandError, match="a is on cpu; it must be on a cuda device"):
        describe(Request(a, b))
    assert describe(Request(a, b), device_type="cpu").problem is not None


@settings(max_examples=200, deadline=None)
@given(
    at=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    shapes=st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 6)) for _ in range(2)]),
    pitches=st.tuples(st.integers(6, 9), st.integers(6, 9)),
)
def test_overlap_never_misses_a_shared_element(at: Any, shapes: Any, pitches: Any) -> None:
    """Whenever two matrices share an address, overlap is true; with one pitch apart means apart."""
    buffer = torch.zeros(128)
    one, two = (
        torch.as_strided(buffer, shape, (pitch, 1), offset)
        for offset, shape, pitch in zip(at, shapes, pitches, strict=True)
    )
    cells = [
        {offset + row * pitch + column for row in range(shape[0]) for column in range(shape[1])}
        for offset, shape, pitch in zip(at, shapes, pitches, strict=True)
    ]
    if cells[0] & cells[1]:
        assert overlap(one, two)
    if cells[0] and cells[1] and max(cells[0]) < min(cells[1]):
        assert not overlap(one, two)
    assert span_bytes(one) == (max(cells[0]) - min(cells[0]) + 1) * 4 if cells[0] else span_bytes(one) == 0


def test_columns_of_one_buffer_do_not_overlap() -> None:
    """Two column ranges of one buffer interleave in memory without sharing an element."""
    buffer = torch.zeros(16, 32)
    assert not overlap(buffer[:, :16], buffer[:, 16:])
    assert overlap(buffer[:, :17], buffer[:, 16:])
    assert overlap(buffer[1:, :17], buffer[:, 16:])
