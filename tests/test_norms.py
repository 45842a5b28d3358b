"""``cutegen.rms_norm`` and the operators of declared families, with kernels that compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_kernels import FakeGpu, calls_go_to

torch = pytest.importorskip("torch")

from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.arch import ARCHES  # noqa: E402
from cutegen.errors import ConfigError, LaunchError, OperandError  # noqa: E402
from cutegen.families.registry import find_space  # noqa: E402
from cutegen.families.rmsnorm.family import RMSNORM  # noqa: E402
from cutegen.torch_ops import gemm as operators  # noqa: E402
from cutegen.torch_ops import norms  # noqa: E402

N = 64


class FakeNorms(FakeGpu):
    """Kernels of RMSNorm that compute their reference."""

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        self.loaded.append(symbol)
        source = self._signatures[symbol]
        options = dict(source.signature.options)
        declared = [a for a in RMSNORM.declared_arguments if not a.when or options[a.when]]
        names = [a.name for a in declared if a.kind in ("in", "out", "scalar")]

        def function(*arguments: Any) -> None:
            self.calls.append(arguments)
            given = dict(zip(names, arguments, strict=True))
            outputs = [a.name for a in declared if a.kind == "out"]
            values = {name: given.get(name) for name in ("x", "weight", "residual")}
            wide = {name: None if t is None else t.double() for name, t in values.items()}
            found = RMSNORM._reference(**wide, eps=given["eps"])
            for name in outputs:
                given[name].copy_(found[name])

        return function


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeNorms]:
    """Every call of the test goes to kernels on the CPU."""
    with calls_go_to(FakeNorms(tmp_path)) as fake:
        yield fake


def tensor(*shape: int, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype or torch.bfloat16)


def wanted(x: Any, w: Any, eps: float, residual: Any = None) -> Any:
    h = x.double() if residual is None else x.double() + residual.double()
    y = h * (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y if w is None else y * w.double()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(N,), (3, N), (2, 3, N), (1, 1)])
def test_rows_of_any_rank_are_normalised(gpu: FakeNorms, shape: tuple[int, ...], dtype: str) -> None:
    x, w = tensor(*shape, dtype=getattr(torch, dtype)), tensor(shape[-1], dtype=getattr(torch, dtype))
    if len(shape) == 1:
        x = x[None]
    got = cutegen.rms_norm(x, w, 1e-3)
    assert isinstance(got, torch.Tensor) and got.shape == x.shape and got.dtype == x.dtype
    assert torch.allclose(got.double(), wanted(x, w, 1e-3), rtol=2**-8, atol=1e-6)


def test_a_weight_may_be_absent_or_in_fp32(gpu: FakeNorms) -> None:
    x = tensor(3, N)
    for weight in (None, tensor(N, dtype=torch.float32), tensor(N)):
        got = cutegen.rms_norm(x, weight)
        assert torch.allclose(got.double(), wanted(x, weight, 1e-6), rtol=2**-7, atol=1e-6)
    kinds = [dict(source.signature.options)["weight"] for source in gpu.compiled]
    assert kinds == ["", "fp32", "same"]


def test_everything_that_was_asked_for_is_returned(gpu: FakeNorms) -> None:
    """The result, the sum and the factors; in place where the caller says so."""
    x, w, residual = tensor(2, 3, N), tensor(N), tensor(2, 3, N)
    total = x.double() + residual.double()
    want = wanted(x, w, 1e-6, residual)
    y, h, rstd = cutegen.rms_norm(x, w, residual=residual, residual_out=True, return_rstd=True)
    assert y.shape == h.shape == x.shape and rstd.shape == (2, 3) and rstd.dtype == torch.float32
    assert torch.equal(h, total.bfloat16())
    assert torch.allclose(rstd.double(), (total.square().mean(-1) + 1e-6).rsqrt(), rtol=1e-6)
    kept = residual
    y2, h2 = cutegen.rms_norm(x, w, residual=residual, residual_out=residual, out=x)
    assert y2 is x and h2 is kept and torch.equal(h2, h) and torch.equal(y2, y)
    assert torch.allclose(y2.double(), want, rtol=2**-7, atol=1e-6)


def test_the_second_call_of_a_kind_looks_nothing_up(gpu: FakeNorms) -> None:
    x = tensor(3, N)
    cutegen.rms_norm(x)
    loaded = len(gpu.loaded)
    cutegen.rms_norm(x)
    assert len(gpu.calls) == 2 and len(gpu.loaded) == loaded and len(gpu.compiled) == 1
    cutegen.rms_norm(tensor(5, N))
    assert len(gpu.compiled) == 1  # another number of rows, the same kernel
    cutegen.rms_norm(tensor(3, N + 8))
    assert len(gpu.compiled) == 2


def test_rows_that_start_anywhere_take_the_unaligned_kernel(gpu: FakeNorms) -> None:
    padded = tensor(4, N + 1)
    x = padded[:, :N]
    got = cutegen.rms_norm(x)
    assert torch.allclose(got.double(), wanted(x, None, 1e-6), rtol=2**-8, atol=1e-6)
    assert gpu.compiled[-1].signature.unaligned


def test_nothing_to_do_is_done(gpu: FakeNorms) -> None:
    """No rows, or rows of no elements."""
    for shape in ((0, N), (3, 0)):
        y, rstd = cutegen.rms_norm(tensor(*shape), return_rstd=True)
        assert y.shape == shape and rstd.shape == shape[:1]
    assert not gpu.calls


def test_a_config_overrides_the_choice(gpu: FakeNorms) -> None:
    x = tensor(3, 4096)
    space = find_space("rmsnorm", ARCHES["sm_90a"])
    problem = RMSNORM.parse("rmsnorm 3x4096 bf16 weight=none")
    other = next(c for c in space.configs(problem) if c != space.default(problem))
    cutegen.rms_norm(x, config=str(other))
    assert gpu.compiled[-1].config == space.compile_view(other)
    with pytest.raises(ConfigError):
        cutegen.rms_norm(x, config="threads_per_row=3")


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("x of fp64", lambda x: cutegen.rms_norm(x.double()), "x has dtype torch.float64; valid: torch.bfloat16"),
    ("a scalar", lambda x: cutegen.rms_norm(x[0, 0]), "x has no dimensions"),
    ("no tensor", lambda x: cutegen.rms_norm([1.0]), "x is a list; it must be a torch.Tensor"),
    ("columns", lambda x: cutegen.rms_norm(x.t()), "x has strides .* rows must be contiguous"),
    ("uneven rows", lambda x: cutegen.rms_norm(tensor(4, 6, N)[:, ::2].transpose(0, 1)), "not evenly spaced"),
    ("repeated rows", lambda x: cutegen.rms_norm(x[:1].expand(3, N)), "under which elements overlap"),
    ("long weight", lambda x: cutegen.rms_norm(x, tensor(N + 1)), "weight has shape .* but x makes it 64"),
    (
        "weight matrix",
        lambda x: cutegen.rms_norm(x, tensor(1, N)),
        r"weight has shape \(1, 64\); it must be \(n,\)",
    ),
    (
        "weight in fp16",
        lambda x: cutegen.rms_norm(x, tensor(N, dtype=torch.float16)),
        "weight has dtype torch.float16; valid: torch.bfloat16, torch.float32",
    ),
    ("other residual", lambda x: cutegen.rms_norm(x, residual=x.float()), "residual has dtype torch.float32"),
    (
        "short residual",
        lambda x: cutegen.rms_norm(x, residual=tensor(2, N)),
        "residual has shape .* makes m 2",
    ),
    (
        "sum of nothing",
        lambda x: cutegen.rms_norm(x, residual_out=True),
        "residual_out is given but residual is not",
    ),
    (
        "out in part of x",
        lambda x: cutegen.rms_norm(x[:-1], out=x[1:]),
        "out shares memory with x; it may only be x",
    ),
    (
        "out is the residual",
        lambda x: (lambda r: cutegen.rms_norm(x, residual=r, out=r))(tensor(3, N)),
        "out shares memory with residual; it may only be x itself",
    ),
    (
        "gradients of a given tensor",
        lambda x: cutegen.rms_norm(x.float().requires_grad_(), out=torch.empty(3, N)),
        "requires grad, but a call with out= has no gradients",
    ),
    (
        "gradients of 8 bits",
        lambda x: cutegen.rms_norm(x.float().requires_grad_(), quantize="e4m3"),
        "a call with quantize= has no gradients",
    ),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_be_an_operand_is_named(gpu: FakeNorms, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        call(tensor(3, N))
    assert not gpu.calls


def test_a_tensor_elsewhere_is_refused(tmp_path: Path) -> None:
    fake = FakeNorms(tmp_path)
    operators.use(fake.dispatcher())
    try:
        with pytest.raises(OperandError, match="weight is on meta; it must be on a cpu device"):
            cutegen.rms_norm(tensor(3, N), torch.empty(N, dtype=torch.bfloat16, device="meta"))
    finally:
        operators._dispatcher = None


def test_a_kernel_that_fails_is_named(gpu: FakeNorms, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(library: Path, symbol: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> None:
            raise RuntimeError("invalid argument\nmore")

        return function

    operators.use(FakeGpu.dispatcher(gpu))
    monkeypatch.setattr(gpu, "load", load)
    operators.use(gpu.dispatcher())
    with pytest.raises(
        LaunchError, match=r"the kernel for rmsnorm 3x64 bf16 .*failed to launch: invalid argument"
    ):
        cutegen.rms_norm(tensor(3, N), tensor(N))


def test_torch_traces_the_operator(gpu: FakeNorms) -> None:
    """One graph, right shapes for symbolic sizes, and torch's own tests of an operator."""
    x, w = tensor(3, N), tensor(N)

    def step(x: Any) -> Any:
        y, h = cutegen.rms_norm(x * 2, w, residual=x, residual_out=True)
        return y + h

    run = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = tensor(rows, N)
        assert torch.allclose(run(x).double(), step(x).double())
    norms.prepare()
    operator = torch.ops.cutegen.rmsnorm.default
    registry.opcheck(operator, (x, w, None, 1e-6, ["out", "rstd"], None))


def leaves(dtype: Any, weight: Any, residual: bool) -> list[Any]:
    """x, weight and residual that require grad; None for what is absent."""
    found = [tensor(2, 3, N, dtype=dtype), tensor(N, dtype=weight) if weight else None]
    found.append(tensor(2, 3, N, dtype=dtype).flip(0) if residual else None)
    return [None if t is None else t.clone().requires_grad_() for t in found]


def loss(y: Any, h: Any = None) -> Any:
    scale = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return (y * scale).double().sum() + (0 if h is None else (h * scale.flip(0)).double().sum())


GRADIENTS = {
    "bf16": (torch.bfloat16, torch.bfloat16, False, False),
    "fp32 without a weight": (torch.float32, None, False, False),
    "weight in fp32": (torch.float16, torch.float32, False, False),
    "residual": (torch.bfloat16, torch.bfloat16, True, False),
    "sum": (torch.float32, torch.float32, True, True),
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_the_formula_in_fp64(gpu: FakeNorms, case: Any, compiled: bool) -> None:
    """Of all that requires grad, of the sum as well; alike eager and compiled; nothing under no_grad."""
    dtype, weight, residual, wants_sum = case
    own = leaves(dtype, weight, residual)

    def step(x: Any, w: Any, r: Any) -> Any:
        found = cutegen.rms_norm(x, w, 1e-3, residual=r, residual_out=wants_sum)
        return loss(*found) if wants_sum else loss(found)

    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    run(*own).backward()
    wide = [None if t is None else t.detach().double().requires_grad_() for t in own]
    x, w, r = wide
    h = x if r is None else x + r
    loss(wanted(x, w, 1e-3, r), h if wants_sum else None).backward()
    exact = 1e-5 if dtype == torch.float32 else 2.0**-6
    for found, want in zip(own, wide, strict=True):
        if found is not None:
            assert found.grad.dtype == found.dtype
            assert (found.grad.double() - want.grad).norm() <= exact * want.grad.norm()
    with torch.no_grad():
        assert not cutegen.rms_norm(own[0], own[1]).requires_grad
    if compiled:
        torch._dynamo.reset()


def test_one_row_without_leading_dimensions_has_gradients(gpu: FakeNorms) -> None:
    x, w = (tensor(N, dtype=torch.float32).requires_grad_() for _ in range(2))
    found = torch.autograd.grad(loss(cutegen.rms_norm(x, w, 1e-3)), (x, w))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    for own, want in zip(found, torch.autograd.grad(loss(wanted(*wide, 1e-3)), wide), strict=True):
        assert own.shape == want.shape and (own - want).norm() <= 1e-5 * want.norm()


def test_second_derivatives_of_rows(gpu: FakeNorms) -> None:
    """By the formula of torch in fp32, against fp64."""
    found = []
    for wide in (False, True):
        x, w, r = (t.detach().double() if wide else t for t in leaves(torch.float32, torch.float32, True))
        for t in (x, w, r):
            t.requires_grad_()
        y = wanted(x, w, 1e-3, r) if wide else cutegen.rms_norm(x, w, 1e-3, residual=r)
        first = torch.autograd.grad(loss(y), (x, w, r), create_graph=True)
        total = sum(g.double().square().sum() for g in first)
        found.append([g.double() for g in torch.autograd.grad(total, (x, w, r))])
    for own, want in zip(*found, strict=True):
        assert (own - want).norm() <= 1e-4 * want.norm()


def test_what_needs_no_gradient_gets_none(gpu: FakeNorms) -> None:
    """A frozen weight, rows that are data, and a result that nobody used."""
    x, w, r = leaves(torch.bfloat16, torch.bfloat16, True)
    loss(cutegen.rms_norm(x, w.detach())).backward()
    assert x.grad is not None and w.grad is None
    loss(cutegen.rms_norm(x.detach(), w)).backward()
    assert w.grad is not None
    y, h, rstd = cutegen.rms_norm(x, w, residual=r, residual_out=True, return_rstd=True)
    assert not rstd.requires_grad and y.requires_grad
    x.grad = None
    h.sum().backward()
    assert torch.equal(r.grad, torch.ones_like(r)) and torch.equal(x.grad, r.grad)


def test_the_operator_passes_the_checks_of_torch(gpu: FakeNorms) -> None:
    norms.prepare()
    operator = torch.ops.cutegen.rmsnorm.default
    x, w = (tensor(*shape, dtype=torch.float32).requires_grad_() for shape in ((3, N), (N,)))
    registry.opcheck(operator, (x, w, None, 1e-6, ["out", "rstd"], None))
