"""``cutegen.layer_norm`` with kernels that compute on the CPU: values, gradients, what is refused."""

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
from cutegen.errors import OperandError  # noqa: E402
from cutegen.families.layernorm.family import LAYERNORM  # noqa: E402
from cutegen.torch_ops import layer_norm as operator_module  # noqa: E402

N = 64


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


def wanted(x: Any, w: Any, b: Any, eps: float) -> Any:
    w, b = (None if t is None else t.double() for t in (w, b))
    return torch.nn.functional.layer_norm(x.double(), (x.shape[-1],), w, b, eps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(3, N), (2, 3, N)])
def test_rows_of_any_rank(gpu: FakeFamilies, shape: tuple[int, ...], dtype: str) -> None:
    x, w, b = (tensor(*s, dtype=getattr(torch, dtype)) for s in (shape, (N,), (N,)))
    got = cutegen.layer_norm(x, w, b, 1e-3)
    assert isinstance(got, torch.Tensor) and got.shape == x.shape and got.dtype == x.dtype
    assert torch.allclose(got.double(), wanted(x, w, b, 1e-3), rtol=2**-8, atol=2**-9)


def test_weight_and_bias_may_be_absent_or_in_fp32(gpu: FakeFamilies) -> None:
    x, kinds = tensor(3, N), []
    for w, b in ((None, None), (tensor(N, dtype=torch.float32), None), (None, tensor(N))):
        got = cutegen.layer_norm(x, w, b)
        assert isinstance(got, torch.Tensor)
        assert torch.allclose(got.double(), wanted(x, w, b, 1e-5), rtol=2**-8, atol=2**-9)
        options = dict(gpu.compiled[-1].signature.options)
        kinds.append((options["weight"], options["bias"]))
    assert kinds == [("", ""), ("fp32", ""), ("", "same")]


def test_means_and_factors_are_returned(gpu: FakeFamilies) -> None:
    x = tensor(2, 3, N)
    y, mean, rstd = cutegen.layer_norm(x, return_stats=True, out=x.clone())
    assert mean.shape == rstd.shape == (2, 3) and mean.dtype == rstd.dtype == torch.float32
    assert torch.allclose(mean.double(), x.double().mean(-1), atol=1e-6)
    want = (x.double().var(-1, unbiased=False) + 1e-5).rsqrt()
    assert torch.allclose(rstd.double(), want, rtol=1e-6) and y.shape == x.shape


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    for shape in ((0, N), (3, 0)):
        y, mean, _ = cutegen.layer_norm(tensor(*shape), return_stats=True)
        assert y.shape == shape and mean.shape == shape[:1]
    assert not gpu.calls


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
def test_the_gradients_are_those_of_torch(gpu: FakeFamilies, compiled: bool, weight_dtype: Any) -> None:
    """Of x, weight and bias, against fp64; a weight in another dtype than x too."""
    x_dtype = torch.bfloat16 if weight_dtype == torch.bfloat16 else torch.float32
    g = tensor(2, 3, N, dtype=torch.float32)

    def step(x: Any, w: Any, b: Any) -> Any:
        return (cutegen.layer_norm(x * 2, w, b) * g.to(x.dtype)).sum()

    run: Callable[..., Any] = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    x = tensor(2, 3, N, dtype=x_dtype).requires_grad_()
    w, b = (None if weight_dtype is None else tensor(N, dtype=weight_dtype).requires_grad_() for _ in "wb")
    if x_dtype == torch.bfloat16:
        w, b = w.detach().float().requires_grad_(), b.detach().float().requires_grad_()
    run(x, w, b).backward()
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    (wanted(leaves[0] * 2, leaves[1], leaves[2], 1e-5) * g.double()).sum().backward()
    rough = 0.05 if x_dtype == torch.bfloat16 else 1e-4
    for got, leaf in zip((x, w, b), leaves, strict=True):
        if got is not None:
            assert got.grad.dtype == got.dtype
            assert torch.allclose(got.grad.double(), leaf.grad, rtol=rough, atol=rough)


def test_torch_traces_the_operator(gpu: FakeFamilies) -> None:
    """With and without the outputs that its gradient would keep."""
    operator_module.prepare()
    operator = torch.ops.cutegen.layernorm.default
    x, w, b = (tensor(*s, dtype=torch.float32).requires_grad_() for s in ((3, N), (N,), (N,)))
    names = ["out", "mean", "rstd"]
    for test in ("test_schema", "test_faketensor", "test_autograd_registration"):
        registry.opcheck(operator, (x, w, b, 1e-5, names, None), test_utils=test)
    registry.opcheck(operator, (x, w, b, 1e-5, ["out"], None))


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("x of fp64", lambda x: cutegen.layer_norm(x.double()), "x has dtype torch.float64"),
    ("a scalar", lambda x: cutegen.layer_norm(x[0, 0]), "x has no dimensions"),
    ("long bias", lambda x: cutegen.layer_norm(x, None, tensor(N + 1)), "bias has shape .* x makes it 64"),
    (
        "bias in fp16",
        lambda x: cutegen.layer_norm(x, None, tensor(N, dtype=torch.float16)),
        "bias has dtype torch.float16",
    ),
    ("out in part of x", lambda x: cutegen.layer_norm(x[:-1], out=x[1:]), "out shares memory with x"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(
    gpu: FakeFamilies, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, N))
    assert not gpu.calls


def test_the_tolerance_follows_what_cancels() -> None:
    """Rows far from zero may differ by what their mean cannot hold; a difference of squares is caught."""
    problem = LAYERNORM.parse("layernorm 64x4096 fp32 stats")
    inputs = LAYERNORM.inputs(problem, torch.Generator().manual_seed(0), awkward=True)
    x, w, b = (inputs.tensors[name] for name in ("x", "weight", "bias"))
    x.add_(3000.0)
    reference = LAYERNORM.reference(problem, inputs)
    eps = inputs.scalars["eps"]
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    [chunk] = reference.chunks("out", (x - mean) * rstd * w + b)
    assert ((chunk.got - chunk.want).abs() <= chunk.allowed).all()
    rough = (x.square().mean(-1, keepdim=True) - mean.square() + eps).clamp_min(1e-6).rsqrt()
    [chunk] = reference.chunks("out", (x - mean) * rough * w + b)
    assert ((chunk.got - chunk.want).abs() > chunk.allowed).any()
