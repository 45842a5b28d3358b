"""``cutegen.softmax`` with kernels that compute on the CPU: values, gradients, tracing, what is refused."""

from __future__ import annotations

import math
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
from cutegen.families.cross_entropy.family import CROSS_ENTROPY  # noqa: E402
from cutegen.families.softmax.family import SOFTMAX  # noqa: E402
from cutegen.torch_ops import softmax as operator_module  # noqa: E402

N = 64


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeFamilies]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeFamilies(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(3, N), (2, 3, N), (1, 1)])
def test_rows_of_any_rank(gpu: FakeFamilies, shape: tuple[int, ...], dtype: str) -> None:
    x = tensor(*shape, dtype=getattr(torch, dtype))
    got = cutegen.softmax(x)
    assert got.shape == x.shape and got.dtype == x.dtype
    assert torch.allclose(got.double(), x.double().softmax(-1), rtol=2**-8, atol=1e-7)
    assert len(gpu.calls) == 1


def test_in_place_and_into_another(gpu: FakeFamilies) -> None:
    x = tensor(5, N)
    want, other = x.double().softmax(-1).bfloat16(), torch.empty_like(x)
    assert cutegen.softmax(x, out=other) is other and torch.equal(other, want)
    assert cutegen.softmax(x, out=x) is x and torch.equal(x, want)


def test_nothing_to_do_is_done(gpu: FakeFamilies) -> None:
    for shape in ((0, N), (3, 0)):
        assert cutegen.softmax(tensor(*shape)).shape == shape
    assert not gpu.calls


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_is_that_of_torch(gpu: FakeFamilies, compiled: bool) -> None:
    """Against fp64, through a function around it, eager and traced."""
    run: Callable[..., Any] = lambda x, g: (cutegen.softmax(x * 2) * g).sum()  # noqa: E731
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    x, g = tensor(2, 3, N, dtype=torch.float32).requires_grad_(), tensor(2, 3, N, dtype=torch.float32)
    run(x, g).backward()
    wide = x.detach().double().requires_grad_()
    ((wide * 2).softmax(-1) * g.double()).sum().backward()
    assert torch.allclose(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    assert len(gpu.calls) == 1


def test_torch_traces_the_operator(gpu: FakeFamilies) -> None:
    operator_module.prepare()
    operator = torch.ops.cutegen.softmax.default
    registry.opcheck(operator, (tensor(3, N, dtype=torch.float32).requires_grad_(), ["out"], None))


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("x of fp64", lambda x: cutegen.softmax(x.double()), "x has dtype torch.float64; valid: torch.bfloat16"),
    ("a scalar", lambda x: cutegen.softmax(x[0, 0]), "x has no dimensions"),
    ("no tensor", lambda x: cutegen.softmax([1.0]), "x is a list; it must be a torch.Tensor"),
    ("columns", lambda x: cutegen.softmax(x.t()), "x has strides .* rows must be contiguous"),
    ("out in part of x", lambda x: cutegen.softmax(x[:-1], out=x[1:]), "out shares memory with x"),
    ("out of fp32", lambda x: cutegen.softmax(x, out=x.float()), "out has dtype torch.float32"),
    (
        "gradients into out",
        lambda x: cutegen.softmax(x.float().requires_grad_(), out=x.float()),
        "x requires grad",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(
    gpu: FakeFamilies, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, N))
    assert not gpu.calls


def test_awkward_rows_are_masked_but_never_whole() -> None:
    """What a kernel is checked on besides: wide logits, -inf, and padding between rows."""
    problem = SOFTMAX.parse("softmax 37x1000 bf16")
    inputs = SOFTMAX.inputs(problem, torch.Generator().manual_seed(0), awkward=True)
    x = inputs.tensors["x"]
    assert x.isneginf().any() and not x.isneginf().all(-1).any() and x[x.isfinite()].abs().max() > 100
    assert x.stride(0) > 1000 and math.isfinite(float(SOFTMAX.reference(problem, inputs).compared("out")))


@pytest.mark.parametrize("family", [SOFTMAX, CROSS_ENTROPY], ids=lambda family: family.name)
def test_the_first_awkward_rows_leave_warps_without_a_finite_logit(family: Any) -> None:
    """For which -inf less -inf is not a number: warp 3 of 4 has vectors 96 to 127 of every 128."""
    problem = family.tails(family.parse(f"{family.name} 64x4096 bf16"))[0]
    inputs = family.inputs(problem, torch.Generator().manual_seed(0), awkward=True)
    x = inputs.tensors["x"].unflatten(1, (4, 4, 32, 8))[:, :, 3].flatten(1)
    assert x.isneginf().all(-1).any() and inputs.tensors["x"].isfinite().any(-1).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_tolerance_passes_fp32_and_catches_a_wrong_peak(dtype: str) -> None:
    """torch in fp32 is within; powers relative to another number, in half precision, are not."""
    problem = SOFTMAX.parse(f"softmax 64x5000 {dtype}")
    inputs = SOFTMAX.inputs(problem, torch.Generator().manual_seed(0), awkward=True)
    x = inputs.tensors["x"]
    [want] = [chunk.want for chunk in SOFTMAX.reference(problem, inputs).chunks("out", x)]
    allowed = SOFTMAX.allowed(problem, "out", want)
    right = x.float().softmax(-1).to(x.dtype).double()
    assert ((right - want).abs() <= allowed).all()
    peak = x.float().amax(-1, keepdim=True)
    total = (x.float() - peak).exp().sum(-1, keepdim=True)
    wrong = ((x.float() - peak).exp() / (total * 1.01)).to(x.dtype).double()
    assert ((wrong - want).abs() > allowed).any()
