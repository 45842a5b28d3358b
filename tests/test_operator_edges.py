"""All operators beside the GEMM at the edges: calls without rows, gradients of second order, torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from torch.func import functional_call, grad, jvp, vmap  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.torch_ops import fallbacks  # noqa: E402

N = 16
BF16, FP8, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        yield fake


def matrix(rows: int, columns: int = N, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator).to(dtype or torch.float32)


def turned(x: Any) -> Any:
    heads = x.view(-1, 2, N // 2)
    table = torch.ones(heads.shape[0], N // 4)
    return cutegen.rope(heads, heads, 0.6 * table, 0.8 * table)[0]


#: Operators that have gradients, of one matrix in fp32; each with its other leaf.
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda x, w: cutegen.softmax(x),
    "layer_norm": lambda x, w: cutegen.layer_norm(x, w, w),
    "rms_norm": lambda x, w: cutegen.rms_norm(x, w),
    "gated": lambda x, w: cutegen.gated(x, layout="interleaved"),
    "gated of two": lambda x, w: cutegen.gated(x, x * w, "relu"),
    "activate": lambda x, w: cutegen.activate(x, "silu"),
    "rope": lambda x, w: turned(x),
    "cross_entropy": lambda x, w: cutegen.cross_entropy(
        x, torch.ones(x.shape[0], dtype=torch.int64), reduction="sum"
    ),
    "gated_gemm": lambda x, w: cutegen.gated_gemm(x.to(BF16), w.to(BF16).expand(32, N).contiguous()).float(),
}
SECOND = ("softmax", "layer_norm", "rms_norm")
FIRST = tuple(name for name in OPERATORS if name not in SECOND)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_autograd_knows_what_results_without_rows_depend_on(
    gpu: AllFamilies, name: str, compiled: bool
) -> None:
    """An expert without tokens is no end of a training step: gradients are zeros, as those of torch are."""
    x, w = torch.zeros(0, N).requires_grad_(), torch.ones(N).requires_grad_()
    run: Any = OPERATORS[name]
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    run(x, w).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert w.grad is None or not w.grad.any()
    assert not gpu.calls


@pytest.mark.parametrize("name", SECOND)
def test_gradients_of_second_order_are_those_of_torch(name: str) -> None:
    functional = torch.nn.functional
    theirs: dict[str, Callable[[Any, Any], Any]] = {
        "softmax": lambda x, w: functional.softmax(x, -1),
        "layer_norm": lambda x, w: functional.layer_norm(x, (N,), w, w, 1e-5),
        "rms_norm": lambda x, w: functional.rms_norm(x, (N,), w, 1e-6),
    }
    found = []
    for function in (OPERATORS[name], theirs[name]):
        x, w = matrix(5).requires_grad_(), (matrix(1)[0] + 1).requires_grad_()
        (first,) = torch.autograd.grad(function(x, w).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, w), allow_unused=True))
    for own, other in zip(*found, strict=True):
        assert (own is None) == (other is None)
        assert own is None or torch.allclose(own, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FIRST)
def test_gradients_of_second_order_that_there_are_none_of_are_refused(name: str) -> None:
    x, w = matrix(5).requires_grad_(), torch.ones(N)
    with pytest.raises((OperandError, RuntimeError), match=r"requires grad|differentiate twice"):
        torch.autograd.grad(OPERATORS[name](x, w).square().sum(), x, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_that_have_no_rule_are_refused_by_name(name: str, transform: str) -> None:
    def run(x: Any) -> Any:
        return OPERATORS[name](x, torch.ones(N)).sum()

    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: grad(run)(matrix(3)),
        "vmap": lambda: vmap(run)(torch.stack([matrix(3), matrix(3)])),
        "jvp": lambda: jvp(run, (matrix(3),), (matrix(3),)),
    }
    with pytest.raises(OperandError, match=r"[xq] is under a transform of torch.func, such as grad or vmap"):
        calls[transform]()


def test_grouped_products_refuse_transforms() -> None:
    b, offs = torch.ones(2, 8, N, dtype=BF16), torch.tensor([1, 3], dtype=INT32)
    with pytest.raises(OperandError, match=r"a is under a transform of torch\.func"):
        vmap(lambda a: cutegen.grouped_gemm(a, b, offs))(torch.ones(2, 3, N, dtype=BF16))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(N, 32, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(32, N, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = torch.nn.RMSNorm(N, eps=1e-6), Block()

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_optimized_models_go_through_transforms(dtype: Any) -> None:
    """Layers never refuse: torch computes under transforms, also after a call of the kind was refused."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    x = matrix(4, dtype=dtype)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, rows: Any) -> Any:
        return functional_call(model, parameters, (rows,)).float().square().sum()

    want = grad(loss)(weights, x)
    mapped = vmap(grad(loss), in_dims=(None, 0))(weights, x[:, None])
    swapped = cutegen.optimize(model)
    assert swapped.norms and swapped.layers
    model(x[:, :-1].new_ones(3, N + 1)[:, 1:])  # rows at odd addresses are refused, and remembered
    found = grad(loss)(weights, x)
    each = vmap(grad(loss), in_dims=(None, 0))(weights, x[:, None])
    for name in want:
        torch.testing.assert_close(found[name].float(), want[name].float(), rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(each[name].float(), mapped[name].float(), rtol=5e-2, atol=5e-2)
    assert any("torch.func" in reason for reason in fallbacks.counts())


def blocks(m: int) -> tuple[Any, ...]:
    a, b = torch.zeros(m, 128).to(FP8), torch.zeros(2, 128, 128).to(FP8)
    return a, b, torch.ones(1, m).t(), torch.ones(2, 1, 1)


NOTHING = matrix(0)
NO_HEADS, NO_TABLE = torch.zeros(0, 2, 8), torch.zeros(0, 4)
EMPTY: list[tuple[str, Callable[[], Any], str]] = [
    ("dtype", lambda: cutegen.softmax(NOTHING.double()), "x has dtype torch.float64; valid: torch.bfloat16"),
    (
        "out",
        lambda: cutegen.softmax(NOTHING, out=matrix(5, 5)),
        r"out has shape .* m 5, but x .* 0",
    ),
    ("weight", lambda: cutegen.rms_norm(NOTHING, torch.ones(3)), r"weight has shape \(3,\), which makes n 3"),
    ("bias", lambda: cutegen.layer_norm(NOTHING, None, torch.ones(3)), r"bias has shape \(3,\)"),
    ("residual", lambda: cutegen.rms_norm(NOTHING, residual=matrix(1)), r"residual has shape \(1, 16\)"),
    ("gate's out", lambda: cutegen.gated(NOTHING, out=matrix(0, 5)), "out has shape .* makes n 5"),
    ("activated", lambda: cutegen.activate(NOTHING, "relu", out=matrix(1)), "out has shape .* makes m 1"),
    (
        "labels",
        lambda: cutegen.cross_entropy(NOTHING, torch.zeros(0, dtype=INT32)),
        "target has dtype torch.int32; it must be torch.int64",
    ),
    (
        "heads",
        lambda: cutegen.rope(NO_HEADS.double(), NO_HEADS.double(), NO_TABLE, NO_TABLE),
        "q has dtype torch.float64",
    ),
    (
        "tables in place",
        lambda: cutegen.rope_(NO_HEADS, NO_HEADS, NO_TABLE.half(), NO_TABLE.half()),
        "cos has dtype torch.float16; valid: torch.float32",
    ),
    ("k", lambda: cutegen.gated_gemm(matrix(0, dtype=BF16), matrix(4, 8, BF16)), "w has shape .* makes k 8"),
    (
        "group's k",
        lambda: cutegen.grouped_gemm(matrix(0, dtype=BF16), torch.ones(2, 8, 8, dtype=BF16), [0, 0]),
        "b has shape .* makes k 8",
    ),
    (
        "group's out",
        lambda: cutegen.grouped_gemm(
            matrix(0, dtype=BF16), torch.ones(2, 8, N, dtype=BF16), [0, 0], out=matrix(7, 8, BF16)
        ),
        "out has shape .* makes m 7",
    ),
    (
        "factors",
        lambda: cutegen.scaled_grouped_gemm(*blocks(0)[:3], torch.ones(2, 2, 1), [0, 0]),
        "scale_b has shape .* makes n 256",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in EMPTY], ids=[case[0] for case in EMPTY])
def test_wrong_arguments_of_calls_without_rows_are_named_too(
    gpu: AllFamilies, call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call()
    assert not gpu.calls


def test_rows_without_elements_have_results() -> None:
    x = torch.zeros(2, 3, 0)
    assert cutegen.softmax(x).shape == cutegen.activate(x, "relu").shape == x.shape
    y, mean, rstd = cutegen.layer_norm(x, return_stats=True)
    assert y.shape == x.shape and mean.shape == rstd.shape == (2, 3) and not mean.any()


def test_grouped_products_refuse_gradients_in_every_call(gpu: AllFamilies) -> None:
    """Not in the first of a kind only: the result is none that autograd could follow."""
    a, b, offs = matrix(4, dtype=BF16), torch.ones(2, 8, N, dtype=BF16), torch.tensor([1, 4], dtype=INT32)
    cutegen.grouped_gemm(a, b, offs)
    for operands in ((a.clone().requires_grad_(), b), (a, b.clone().requires_grad_())):
        with pytest.raises(OperandError, match="requires grad, but this call of grouped_gemm"):
            cutegen.grouped_gemm(*operands, offs)
        with torch.no_grad():
            cutegen.grouped_gemm(*operands, offs)
    assert len(gpu.calls) == 3


@pytest.mark.parametrize("name", ["rms_norm", "softmax", "activate"])
def test_rows_of_the_imaginary_part_of_a_conjugate_are_refused(name: str) -> None:
    """Of one element each: longer ones are not contiguous."""
    column = torch.complex(matrix(3, 1), matrix(3, 1)).conj().imag
    with pytest.raises(OperandError, match=r"x has the negative bit.*pass x.resolve_neg\(\).contiguous\(\)"):
        OPERATORS[name](column, torch.ones(1))
