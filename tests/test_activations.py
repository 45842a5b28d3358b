"""``cutegen.activate`` with kernels that compute on the CPU: values, gradients, tracing, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import FakeFamilies  # noqa: E402
from fake_kernels import calls_go_to  # noqa: E402
from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import ConfigError, OperandError  # noqa: E402
from cutegen.families.pointwise import ACTIVATIONS, activated, chain_rule, slope  # noqa: E402

N = 64


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


def by_torch(name: str, x: Any) -> Any:
    f = torch.nn.functional
    if name.startswith("gelu"):
        return f.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return {"silu": f.silu, "relu": f.relu, "relu_squared": lambda y: f.relu(y) ** 2}[name](x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(N,), (3, N), (2, 3, N), (5, 1)])
def test_rows_of_any_rank(gpu: FakeFamilies, shape: tuple[int, ...], activation: str) -> None:
    x = tensor(*shape, dtype=torch.float32)
    got = cutegen.activate(x, activation)
    assert got.shape == x.shape and got.dtype == x.dtype
    assert torch.allclose(got.double(), by_torch(activation, x.double()), rtol=1e-6, atol=1e-7)
    [source] = gpu.compiled
    assert dict(source.signature.options) == {"dtype": "fp32", "activation": activation}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_autograd(gpu: FakeFamilies, activation: str) -> None:
    """Of the sum of squares, and of a gradient that is expanded."""
    for reduce in (lambda y: y.square().sum(), lambda y: y.sum()):
        x = tensor(2, 3, N, dtype=torch.float32).requires_grad_()
        wide = x.detach().double().requires_grad_()
        reduce(cutegen.activate(x, activation)).backward()
        reduce(by_torch(activation, wide)).backward()
        assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not cutegen.activate(x, activation).requires_grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_are_derivatives(activation: str) -> None:
    """What kernels are checked against, and what they are compared with."""
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64).requires_grad_()
    [want] = torch.autograd.grad(activated(activation, x).sum(), x)
    with torch.no_grad():
        # torch adds 1 to a tanh near -1, which leaves half an epsilon, times up to 6 and a derivative.
        assert torch.allclose(slope(activation, x), want, rtol=1e-12, atol=5e-15)
        assert torch.allclose(chain_rule(activation, 3 * torch.ones_like(x), x), 3 * want)


def test_in_place_and_into_another(gpu: FakeFamilies) -> None:
    x = tensor(5, N)
    want, other = cutegen.activate(x, "silu"), torch.empty_like(x)
    assert cutegen.activate(x, "silu", out=other) is other and torch.equal(other, want)
    assert cutegen.activate(x, "silu", out=x) is x and torch.equal(x, want)
    with pytest.raises(OperandError, match="x requires grad, but this call of activation has no gradients"):
        cutegen.activate(x.requires_grad_(), "silu", out=other)


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    for shape in ((0, N), (3, 0)):
        assert cutegen.activate(tensor(*shape), "relu").shape == shape
    assert not gpu.calls


def test_a_config_overrides_the_choice(gpu: FakeFamilies) -> None:
    x = tensor(3, N)
    cutegen.activate(
        x, "gelu", config="access_bytes=16 threads=256 vectors_per_thread=1 ctas_per_sm=0 pdl=off"
    )
    assert gpu.compiled[-1].config["threads"] == 256
    with pytest.raises(ConfigError):
        cutegen.activate(x, "gelu", config="threads=3")


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("fp64", lambda x: cutegen.activate(x.double(), "relu"), "x has dtype torch.float64; valid: torch.bf"),
    ("a scalar", lambda x: cutegen.activate(x[0, 0], "relu"), "x has no dimensions"),
    ("no tensor", lambda x: cutegen.activate([1.0], "relu"), "x is a list; it must be a torch.Tensor"),
    ("name", lambda x: cutegen.activate(x, "tanh"), "activation='tanh' is not valid; valid: silu, gelu"),
    (
        "out over part of x",
        lambda x: cutegen.activate(x[:2], "relu", out=x[1:]),
        "out shares memory with x; it may only be x itself",
    ),
    ("columns", lambda x: cutegen.activate(x.t(), "relu"), "x has strides .* rows must be contiguous"),
    ("short out", lambda x: cutegen.activate(x, "relu", out=tensor(3, 8)), "out has shape .* makes n"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(
    gpu: FakeFamilies, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, N))
    assert not gpu.calls


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_program_calls_the_operator(gpu: FakeFamilies) -> None:
    x = tensor(3, N, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(lambda x: cutegen.activate(2 * x, "gelu_tanh").sum(), backend="aot_eager")
    compiled(x).backward()
    wide = x.detach().double().requires_grad_()
    by_torch("gelu_tanh", 2 * wide).sum().backward()
    assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    assert [s.signature.family for s in gpu.compiled] == ["activation", "activation_backward"]


def test_the_operator_is_what_torch_expects(gpu: FakeFamilies) -> None:
    x = tensor(3, N, dtype=torch.float32).requires_grad_()
    cutegen.activate(x, "silu")
    registry.opcheck(torch.ops.cutegen.activation.default, (x, "silu", ["out"], None))
