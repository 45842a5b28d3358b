"""``cutegen.gated`` and its names, with kernels that compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_family import FakeFamilies
from fake_kernels import calls_go_to

torch = pytest.importorskip("torch")

from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import ConfigError, OperandError  # noqa: E402
from cutegen.families.registry import parse_problem  # noqa: E402
from cutegen.torch_ops import gates  # noqa: E402

N = 64
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


def act(name: str, x: Any) -> Any:
    f = torch.nn.functional
    if name.startswith("gelu"):
        return f.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return f.silu(x) if name == "silu" else f.relu(x)


def parts(x: Any, layout: str) -> tuple[Any, Any]:
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else (x[..., :half], x[..., half:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
@pytest.mark.parametrize("shape", [(2 * N,), (3, 2 * N), (2, 3, 2 * N), (5, 2)])
def test_gates_of_any_rank(gpu: FakeFamilies, shape: tuple[int, ...], layout: str, activation: str) -> None:
    x = tensor(*shape, dtype=torch.float32)
    gate, up = parts(x, layout)
    if layout == "split":
        got = cutegen.gated(gate, up, activation)
    else:
        got = cutegen.gated(x, activation=activation, layout=layout)
    assert got.shape == gate.shape and got.dtype == x.dtype
    want = act(activation, gate.double()) * up.double()
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-7)
    [source] = gpu.compiled
    assert dict(source.signature.options) == {"dtype": "fp32", "activation": activation, "layout": layout}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
def test_gradients_are_those_of_autograd(gpu: FakeFamilies, layout: str, activation: str) -> None:
    """Of the sum of squares, of a gradient that is expanded, and of gate or up alone."""
    x = tensor(2, 3, 2 * N, dtype=torch.float32)

    def run(x: Any) -> Any:
        if layout != "split":
            return cutegen.gated(x, activation=activation, layout=layout)
        return cutegen.gated(*parts(x, layout), activation)

    for reduce in (lambda y: y.square().sum(), lambda y: y.sum()):
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        reduce(run(ours)).backward()
        gate, up = parts(theirs, layout)
        reduce(act(activation, gate) * up).backward()
        assert torch.allclose(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not run(x.clone().requires_grad_()).requires_grad
    up = x[..., :N].clone().requires_grad_()
    cutegen.gated(x[..., N:], up, activation).sum().backward()
    assert torch.allclose(up.grad, act(activation, x[..., N:]), rtol=1e-5, atol=1e-6)


def test_names_of_gates(gpu: FakeFamilies) -> None:
    x, up = tensor(3, N), tensor(3, N)
    assert torch.equal(cutegen.swiglu(x, up), cutegen.gated(x, up))
    assert torch.equal(
        cutegen.geglu(x, layout="interleaved"), cutegen.gated(x, None, "gelu", layout="interleaved")
    )
    assert torch.equal(cutegen.geglu(x, up, approximate="tanh"), cutegen.gated(x, up, "gelu_tanh"))
    assert torch.equal(cutegen.reglu(x), cutegen.gated(x, activation="relu"))


def test_in_place_and_into_a_given_tensor(gpu: FakeFamilies) -> None:
    gate, up = tensor(3, N), tensor(3, N)
    want = cutegen.gated(gate, up)
    out = torch.empty_like(want)
    assert cutegen.gated(gate, up, out=out) is out and torch.equal(out, want)
    assert cutegen.gated(gate, up, out=up) is up and torch.equal(up, want)


@pytest.mark.parametrize("call", [cutegen.reglu, cutegen.softmax, cutegen.layer_norm])
def test_no_gradient_is_lost_in_a_given_tensor(gpu: FakeFamilies, call: Callable[..., Any]) -> None:
    """Not in a call of a kind that was right before without gradients either."""
    x = tensor(3, N)
    out = torch.empty(3, N // 2 if call is cutegen.reglu else N, dtype=x.dtype)
    for _ in range(2):
        call(x, out=out)
    with pytest.raises(OperandError, match=r"x requires grad, but this call of .* has no gradients"):
        call(x.requires_grad_(), out=out)
    with torch.no_grad():
        call(x, out=out)


def test_overlap_is_looked_for_in_every_call(gpu: FakeFamilies) -> None:
    """A call of a kind that was right before, with its tensors at other distances."""
    buffer, up = tensor(9, N), tensor(3, N)
    for start in (3, 6, 0, 3):
        cutegen.gated(buffer[:3], up, out=buffer[start : start + 3])
    for start in (1, 2):
        with pytest.raises(OperandError, match="out shares memory with gate"):
            cutegen.gated(buffer[:3], up, out=buffer[start : start + 3])
    assert len(gpu.calls) == 4


def test_one_kernel_serves_any_number_of_rows(gpu: FakeFamilies) -> None:
    for rows in (3, 3, 5):
        cutegen.gated(tensor(rows, 2 * N))
    assert len(gpu.calls) == 3 and len(gpu.compiled) == 1
    cutegen.gated(tensor(3, 2 * N), layout="interleaved")
    cutegen.gated(tensor(3, 2 * N + 16))
    assert len(gpu.compiled) == 3


def test_rows_that_start_anywhere_take_the_unaligned_kernel(gpu: FakeFamilies) -> None:
    x = tensor(4, 2 * N + 1)[:, : 2 * N]
    want = act("silu", x[:, :N].double()) * x[:, N:].double()
    assert torch.allclose(cutegen.gated(x).double(), want, rtol=2**-8)
    assert gpu.compiled[-1].signature.unaligned


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    for shape in ((0, 2 * N), (3, 0)):
        assert cutegen.gated(tensor(*shape)).shape == (shape[0], shape[1] // 2)
    assert not gpu.calls


def test_a_config_overrides_the_choice(gpu: FakeFamilies) -> None:
    x = tensor(3, 2 * N)
    cutegen.gated(x, config="access_bytes=16 threads=256 vectors_per_thread=1 ctas_per_sm=0 pdl=off")
    assert gpu.compiled[-1].config["threads"] == 256
    with pytest.raises(ConfigError):
        cutegen.gated(x, config="threads=3")


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("fp64", lambda x: cutegen.gated(x.double()), "x has dtype torch.float64; valid: torch.bfloat16"),
    ("a scalar", lambda x: cutegen.gated(x[0, 0]), "x has no dimensions"),
    ("no tensor", lambda x: cutegen.gated([1.0]), "x is a list; it must be a torch.Tensor"),
    ("no tensor up", lambda x: cutegen.gated(x, [1.0]), "up is a list; it must be a torch.Tensor"),
    (
        "out over part of x",
        lambda x: cutegen.gated(x[:2], tensor(2, 2 * N), out=x[1:]),
        "out shares memory with gate; it may only be gate or up itself",
    ),
    ("odd rows", lambda x: cutegen.gated(x[:, :7]), "without up its rows must have an even length"),
    (
        "activation",
        lambda x: cutegen.gated(x, activation="tanh"),
        "activation='tanh' .* silu, gelu, gelu_tanh",
    ),
    ("layout", lambda x: cutegen.gated(x, layout="split"), "layout='split' .* valid: halves, interleaved"),
    ("gelu", lambda x: cutegen.geglu(x, approximate="erf"), "approximate='erf' .* valid: none, tanh"),
    ("columns", lambda x: cutegen.gated(x.t()[:, :2]), "x has strides .* rows must be contiguous"),
    ("uneven", lambda x: cutegen.gated(tensor(4, 6, N)[:, ::2].transpose(0, 1)), "not evenly spaced"),
    ("short up", lambda x: cutegen.gated(x, x[:, :4]), "up has shape .* that of x"),
    ("other up", lambda x: cutegen.gated(x, x.float()), "up has dtype torch.float32 but others"),
    ("out of x", lambda x: cutegen.gated(x, out=x[:, :N]), "out shares memory with x; pass another"),
    (
        "wide out",
        lambda x: cutegen.gated(x, out=tensor(3, 2 * N)),
        "out has shape .* makes n 128, but x makes it 64",
    ),
    (
        "out with gradients",
        lambda x: cutegen.gated(x.float().requires_grad_(), out=torch.empty(3, N)),
        "x requires grad",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(
    gpu: FakeFamilies, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, 2 * N))
    assert not gpu.calls


@pytest.mark.parametrize("layout", ["halves", "interleaved", "split"])
def test_torch_traces_the_operator(gpu: FakeFamilies, layout: str) -> None:
    """One graph forward and backward, right shapes for symbols, and torch's own tests of an operator."""

    def step(x: Any) -> Any:
        if layout != "split":
            return cutegen.gated(x * 2, layout=layout) + 1
        gate, up = parts(x * 2, layout)
        return cutegen.gated(gate.contiguous(), up.contiguous()) + 1

    run = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = tensor(rows, 2 * N, dtype=torch.float32)
        assert torch.allclose(run(x), step(x))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        run(ours).square().sum().backward()
        step(theirs).square().sum().backward()
        assert torch.allclose(ours.grad, theirs.grad)
    gates.prepare()
    x = tensor(3, 2 * N, dtype=torch.float32).requires_grad_()
    given = (
        (x, None, None)
        if layout != "split"
        else (None, *[p.detach().clone().requires_grad_() for p in parts(x, layout)])
    )
    registry.opcheck(torch.ops.cutegen.gated.default, (*given, "silu", layout, ["out"], None))


def test_a_problem_says_how_gate_and_up_are_given() -> None:
    problem: Any = parse_problem("gated 8x96 bf16 layout=interleaved activation=gelu")
    assert str(problem) == "gated 8x96 bf16 activation=gelu layout=interleaved"
    assert [(a.name, a.shape) for a in problem.declared.arguments(problem)] == [
        ("x", (8, 192)),
        ("out", (8, 96)),
    ]
    split: Any = parse_problem("gated_backward 8x96 bf16 layout=split")
    assert [a.name for a in split.declared.arguments(split)] == ["dout", "gate", "up", "dgate", "dup"]
    assert split.min_bytes == 5 * 8 * 96 * 2
