"""Gradients of ``gemm`` and ``linear`` are torch's, on the CPU with fakes of compiled kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu, operators_ask  # noqa: E402
from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402
from cutegen.torch_ops.gemm_gradient import plain_linear, record_gemm, record_linear  # noqa: E402

BF16 = torch.bfloat16
ACTIVATIONS = {
    "": lambda z: z,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
}


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


def leaf(*shape: int, dtype: Any = BF16, transposed: bool = False) -> Any:
    generator = torch.Generator().manual_seed(sum(shape) + transposed)
    shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    values = (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)
    return (values.mT if transposed else values).requires_grad_()


def doubles(*tensors: Any) -> list[Any]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def same_gradients(found: Any, want: Any, inputs: Any, wanted_inputs: Any, seed: int = 0) -> None:
    """The gradients of a random combination of the results' elements."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    own = torch.autograd.grad(found, [t for t in inputs if t is not None], weights.to(found.dtype))
    weights = weights.to(found.dtype).double()
    ref = torch.autograd.grad(want, [t for t in wanted_inputs if t is not None], weights)
    for one, right in zip(own, ref, strict=True):
        scale = right.abs().max().item()
        torch.testing.assert_close(one.double(), right, rtol=2e-2, atol=2e-2 * scale)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["kk", "kn", "mn", "mk"])
def test_every_epilogue_has_the_gradients_of_torch(gpu: FakeGpu, layout: str, activation: str) -> None:
    """Of A, B, C and the bias, in every layout, with factors."""
    a = leaf(16, 32, transposed=layout[0] == "m")
    b = leaf(32, 24, transposed=layout[1] == "k")
    c, row, column = leaf(16, 24), leaf(24), leaf(16, 1)
    for bias, alpha, beta in ((None, 1.0, 1.0), (row, 0.5, 1.0), (column, 1.0, -2.0)):
        addend = None if bias is None else c
        options: dict[str, Any] = {"beta": beta} if addend is not None else {}
        found = cutegen.gemm(a, b, c=addend, bias=bias, alpha=alpha, activation=activation, **options)
        x, y, z, v = doubles(a, b, addend, bias)
        before = alpha * (x @ y)
        if z is not None:
            before = before + beta * z
        if v is not None:
            before = before + v
        same_gradients(found, ACTIVATIONS[activation](before), (a, b, addend, bias), (x, y, z, v))


def test_batches_and_wide_results_have_gradients(gpu: FakeGpu) -> None:
    a, b = leaf(3, 16, 32), leaf(3, 32, 24)
    x, y = doubles(a, b)
    same_gradients(cutegen.gemm(a, b), x @ y, (a, b), (x, y))
    same_gradients(cutegen.gemm(a, b, out_dtype=torch.float32), x @ y, (a, b), (x, y))


def test_a_linear_layer_runs_three_kernels_and_keeps_strides(gpu: FakeGpu) -> None:
    """Forward, input gradient and weight gradient; the latter is contiguous, as the weight is."""
    w, bias = leaf(24, 32), leaf(24)
    for shape in ((32,), (16, 32), (2, 8, 32), (2, 3, 4, 32)):
        x = leaf(*shape)
        launched = len(gpu.calls)
        found = cutegen.linear(x, w, bias)
        u, v, t = doubles(x, w, bias)
        same_gradients(found, torch.nn.functional.linear(u, v, t), (x, w, bias), (u, v, t))
        assert len(gpu.calls) == launched + 3
    cutegen.linear(leaf(16, 32), w).sum().backward()  # an expanded gradient: strides of 0
    assert w.grad.is_contiguous()
    torch.testing.assert_close(w.grad, leaf(16, 32).detach().sum(0).expand(24, 32), rtol=2e-2, atol=2e-2)


def test_layers_called_again_ask_what_is_asked_now(gpu: FakeGpu) -> None:
    """Their plans are dropped with all others, and say as much of operands that do not fit."""
    x, w = leaf(40, 64), leaf(48, 64)
    for dispatcher in (gpu.dispatcher(), gpu.dispatcher()):
        cutegen.use(dispatcher)
        loaded = len(gpu.loaded)
        for _ in range(2):
            wide = doubles(x, w)
            same_gradients(cutegen.linear(x, w), wide[0] @ wide[1].t(), (x, w), wide)
        assert len(gpu.loaded) > loaded
    shifted = torch.empty(40 * 64 + 1, dtype=BF16)[1:].view(40, 64)
    with pytest.raises(OperandError, match="multiple of 16"):
        cutegen.linear(shifted, w)
    with pytest.raises(OperandError, match="must be the 64 columns of w"):
        cutegen.linear(x[:, :32], w)


@pytest.mark.parametrize("shape", [(32,), (16, 32), (2, 8, 32), (2, 3, 4, 32)])
def test_a_layer_called_again_looks_nothing_up(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Neither forward nor backward; new gradients are ours as well, and of second order right."""
    x, w = leaf(*shape), leaf(24, 32)
    u, v = doubles(x, w)
    for _ in range(2):
        launched = len(gpu.calls)
        found, want = cutegen.linear(x, w), torch.nn.functional.linear(u, v)
        assert found.shape == want.shape
        same_gradients(found, want, (x, w), (u, v))
        assert len(gpu.calls) == launched + 3
        monkeypatch.setattr(ops, "_plan", lambda *_: pytest.fail("looked up again"))
    monkeypatch.undo()
    for linear, one, two in ((cutegen.linear, x, w), (torch.nn.functional.linear, u, v)):
        [first] = torch.autograd.grad(linear(one, two).square().sum(), one, create_graph=True)
        first.square().sum().backward()
    assert (w.grad.double() - v.grad).norm() < 2e-2 * v.grad.norm()


def test_what_no_kernel_takes_is_left_to_torch(gpu: FakeGpu) -> None:
    """The product itself has a kernel, its gradients have rows of 50 bytes."""
    x, w = leaf(16, 32), leaf(25, 32)
    u, v = doubles(x, w)
    found = cutegen.linear(x, w)
    launched = len(gpu.calls)
    same_gradients(found, u @ v.T, (x, w), (u, v))
    assert len(gpu.calls) == launched


@pytest.mark.parametrize("activation", ["", "relu", "silu"])
@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_several_gradients_at_once_are_left_to_torch(gpu: FakeGpu, activation: str, known: bool) -> None:
    """A vectorised Jacobian hands gradients over that have no memory; an optimized model raised there."""
    x, w, bias = leaf(8, 16), leaf(24, 16), leaf(24)
    act = ACTIVATIONS[activation]
    if known:
        cutegen.linear(x, w, bias, activation).sum().backward()

    def one_by_one(function: Any) -> Any:
        return torch.autograd.functional.jacobian(function, (x, w, bias), vectorize=True)

    found = one_by_one(lambda x, w, bias: cutegen.linear(x, w, bias, activation))
    want = one_by_one(lambda x, w, bias: act(torch.nn.functional.linear(x, w, bias)))
    product = one_by_one(lambda x, w, bias: cutegen.gemm(x, w.t()) + bias)
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
    plain = one_by_one(lambda x, w, bias: torch.nn.functional.linear(x, w, bias))
    for got, wanted in zip(product, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_only_gradients_that_are_asked_for_are_computed(gpu: FakeGpu) -> None:
    x, w = leaf(16, 32), leaf(24, 32)
    launched = len(gpu.calls)
    cutegen.linear(x.detach(), w).sum().backward()
    cutegen.linear(x, w.detach()).sum().backward()
    assert len(gpu.calls) == launched + 4


def test_parameters_without_autograd_keep_their_plan(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference with parameters that require grad looks nothing up after the first call."""
    x, w = leaf(16, 32), leaf(24, 32)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            cutegen.linear(x, w)
            monkeypatch.setattr(ops, "_plan", lambda *_: pytest.fail("looked up again"))
            assert not cutegen.linear(x, w).requires_grad
        monkeypatch.undo()


def test_main_grad_accumulates_in_fp32(gpu: FakeGpu) -> None:
    """Micro-batches add up in the buffer; the ordinary gradient stays away."""
    w = torch.nn.Parameter(leaf(24, 32).detach())
    w.main_grad = torch.zeros(24, 32)
    want = torch.zeros(24, 32)
    for step in range(4):
        x = leaf(8 + 8 * step, 32)
        grad = torch.randn(8 + 8 * step, 24).to(BF16)
        cutegen.linear(x, w, fuse_wgrad=True).backward(grad)
        want += grad.float().T @ x.detach().float()
        assert x.grad is not None
    torch.testing.assert_close(w.main_grad, want, rtol=1e-3, atol=1e-3)
    assert w.grad is None and w.grad_added_to_main_grad is True
    del w.main_grad
    cutegen.linear(leaf(8, 32), w, fuse_wgrad=True).sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize("kept", ["checkpoint", "reentrant", "offloaded"])
def test_main_grad_is_found_where_saved_tensors_come_back_as_copies(gpu: FakeGpu, kept: str) -> None:
    """Its gradient went to ``w.grad`` there, and what reads ``main_grad`` missed it."""
    x, w = leaf(16, 32), torch.nn.Parameter(leaf(24, 32).detach())
    w.main_grad = torch.zeros(24, 32)

    def layer(x: Any) -> Any:
        return cutegen.linear(x, w, fuse_wgrad=True)

    if kept == "offloaded":
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = layer(x)
    else:
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=kept == "reentrant")
    y.float().sum().backward()
    assert w.grad is None and w.grad_added_to_main_grad
    want = x.detach().float().sum(0).expand(24, 32)
    torch.testing.assert_close(w.main_grad, want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["plain", "bias", "relu", "silu"])
@pytest.mark.parametrize("rank", [2, 3])
def test_main_grad_of_fp32_parameters_accumulates_under_autocast(gpu: FakeGpu, form: str, rank: int) -> None:
    """Autocast casts the parameter, and the cast has no ``main_grad``: the gradient went to ``w.grad``."""
    fp32 = torch.float32
    w = torch.nn.Parameter(leaf(24, 32, dtype=fp32).detach())
    bias = None if form == "plain" else leaf(24, dtype=fp32)
    activation = form if form in ("relu", "silu") else ""
    w.main_grad, want = torch.zeros(24, 32), torch.zeros(24, 32, dtype=torch.float64)
    for step in range(3):
        shape = (2, 8 + 8 * step)[2 - rank + 1 :]
        x, grad = leaf(*shape, 32, dtype=fp32), torch.randn(*shape, 24).to(BF16)
        with torch.autocast("cpu", dtype=BF16):
            found = cutegen.linear(x, w, bias, activation, fuse_wgrad=True)
        found.backward(grad)
        assert found.dtype == BF16 and x.grad.dtype == fp32
        u, v, t = doubles(x.to(BF16), w.to(BF16), None if bias is None else bias.to(BF16))
        before, upstream = torch.nn.functional.linear(u, v, t), grad.double()
        if activation == "relu":  # where a result is 0 or nearly so, as the kernel rounded it
            before.backward(upstream * (found > 0))
        else:
            ACTIVATIONS[activation](before).backward(upstream)
        want += v.grad
    assert w.grad is None and w.grad_added_to_main_grad is True
    assert (w.main_grad - want).norm() < 5e-3 * want.norm()
    assert bias is None or bias.grad.dtype == fp32


def test_calls_without_gradients_refuse_while_autograd_records(gpu: FakeGpu) -> None:
    """Writing into a given tensor, and 8-bit operands: by name, however warm the plan is."""
    a, b, out = leaf(16, 32), leaf(32, 24), torch.empty(16, 24, dtype=BF16)
    for _ in range(2):
        with torch.no_grad():
            cutegen.gemm(a, b, out=out)
        with pytest.raises(OperandError, match="a requires grad, but a call with out= has no gradients"):
            cutegen.gemm(a, b, out=out)
    eight = [t.detach().to(torch.float8_e4m3fn) for t in (a, b.mT)]
    scale, bias = torch.tensor(1.0), leaf(24)
    with pytest.raises(OperandError, match="bias requires grad, but 8-bit products have no gradients"):
        cutegen.scaled_gemm(eight[0], eight[1].mT, scale, scale, bias=bias)

    @torch.compile(backend="eager")
    def compiled(a: Any, b: Any, out: Any) -> Any:
        return cutegen.gemm(a, b, out=out)

    with pytest.raises(OperandError, match="a requires grad, but a call with out="):
        compiled(a, b, out)


def test_autocast_casts_fp32_operands(gpu: FakeGpu) -> None:
    """Gradients arrive in the dtype of the parameters."""
    x, w, bias = leaf(16, 32, dtype=torch.float32), leaf(24, 32, dtype=torch.float32), leaf(24)
    with torch.autocast("cpu", dtype=BF16):
        found = cutegen.linear(x, w, bias)
        with torch.no_grad():
            assert cutegen.gemm(x, w.mT).dtype == BF16
    assert found.dtype == BF16
    u, v, t = doubles(x, w, bias)
    same_gradients(found, u @ v.T + t, (x, w, bias), (u, v, t))
    assert torch.autograd.grad(cutegen.linear(x.to(BF16), w.to(BF16)).sum(), w)[0].dtype == torch.float32


def test_regions_of_autocast_are_kept_apart(gpu: FakeGpu) -> None:
    """fp16 gives fp16, a disabled region inside casts nothing, and scales of 8-bit products stay fp32."""
    x, w = leaf(16, 32, dtype=torch.float32), leaf(24, 32, dtype=torch.float32)
    eight = [t.detach().to(torch.float8_e4m3fn) for t in (x, w)]
    scale = torch.tensor(0.5)
    with torch.autocast("cpu", dtype=torch.float16):
        assert cutegen.linear(x, w).dtype == torch.float16
        with torch.autocast("cpu", enabled=False):
            with pytest.raises(OperandError, match="float32"):
                cutegen.linear(x, w)
            assert cutegen.linear(x.to(BF16), w.to(BF16)).dtype == BF16
        found = cutegen.scaled_gemm(eight[0], eight[1].mT, scale, scale)
    assert found.dtype == BF16 and gpu.calls[-1][0].dtype == torch.float8_e4m3fn
    assert [t.dtype for t in gpu.calls[-1] if getattr(t, "shape", None) == (1,)] == [torch.float32] * 2
    want = 0.25 * (eight[0].double() @ eight[1].double().mT)
    torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)


def exact(
    a: Any, b: Any, *, out: Any = None, c: Any = None, alpha: float = 1.0, beta: float = 1.0, **more: Any
) -> Any:
    """The definition, in whatever dtype."""
    assert out is None
    value = alpha * (a @ b) + (0 if c is None else beta * c)
    value = value if more.get("bias") is None else value + more["bias"]
    return torch.relu(value) if more.get("activation") == "relu" else value


@pytest.mark.parametrize("activation", ["", "relu"])
def test_the_formulas_are_exact_to_second_order(activation: str) -> None:
    """In fp64, against differences, with the definition in the kernel's place."""
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    a, b, c, bias, x = rand(6, 4), rand(4, 8), rand(6, 8), rand(8), rand(3, 2, 4)
    options = {"alpha": 0.5, "beta": 2.0, "activation": activation}

    def gemm(a: Any, b: Any, c: Any, bias: Any) -> Any:
        return record_gemm(exact, a, b, c, bias, options)

    def linear(x: Any, w: Any, bias: Any) -> Any:
        return record_linear(unknown, exact, x, w, bias, bool(activation), ())

    def unknown(a: Any, b: Any) -> None:
        """No product was called before."""

    w = b.detach().t().contiguous().requires_grad_()
    plain = plain_linear(unknown, exact)
    for function, inputs in ((gemm, (a, b, c, bias)), (linear, (x, w, bias)), (plain, (x, w))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


def test_second_derivatives_and_checkpoints(gpu: FakeGpu) -> None:
    """Of a penalty on the gradient, and with activations that are computed again."""
    x, w = leaf(16, 32), leaf(24, 32)
    u, v = doubles(x, w)

    def penalty(product: Any, left: Any) -> Any:
        [first] = torch.autograd.grad((product * product).sum(), left, create_graph=True)
        return (first * first).sum()

    own = torch.autograd.grad(penalty(cutegen.linear(x, w, activation="silu"), x), w)[0].double()
    ref = torch.autograd.grad(penalty(torch.nn.functional.silu(u @ v.T), u), v)[0]
    assert (own - ref).norm() < 3e-2 * ref.norm()
    again = torch.utils.checkpoint.checkpoint(cutegen.linear, x, w, use_reentrant=False)
    same_gradients(again, u @ v.T, (x, w), (u, v))
    torch.utils.checkpoint.checkpoint(cutegen.linear, x, w, use_reentrant=True).float().sum().backward()
    (u @ v.T).sum().backward()
    for own, other in ((x, u), (w, v)):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("activation", ["", "relu", "gelu"])
def test_compiled_gradients_are_those_of_eager(gpu: FakeGpu, activation: str) -> None:
    """One graph, forward and backward, whatever the rows."""

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def run(x: Any, w: Any, bias: Any) -> Any:
        return cutegen.linear(x, w, bias, activation)

    w, bias = leaf(24, 32), leaf(24)
    for rows in (16, 7):
        x = leaf(rows, 32)
        u, v, t = doubles(x, w, bias)
        same_gradients(run(x, w, bias), ACTIVATIONS[activation](u @ v.T + t), (x, w, bias), (u, v, t))


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_operator_has_gradients_and_passes_the_checks_of_torch(gpu: FakeGpu, activation: str) -> None:
    a, b, c, bias = leaf(16, 32), leaf(32, 24), leaf(16, 24), leaf(24)
    options = (c, 2.0, 0.5, bias, activation, None, None, None)
    arguments = (a, b, *ops.pack(options))
    found = torch.ops.cutegen.gemm.default(*arguments)
    x, y, z, v = doubles(a, b, c, bias)
    want = ACTIVATIONS[activation](2 * (x @ y) + 0.5 * z + v)
    same_gradients(found, want, (a, b, c, bias), (x, y, z, v))
    registry.opcheck(torch.ops.cutegen.gemm.default, arguments, raise_exception=True)


FRESH = """
import sys
sys.path[:0] = {paths!r}
import torch
from pathlib import Path
from fake_kernels import FakeGpu
import cutegen

@torch.compile(backend="aot_eager", fullgraph=True)
def run(x, w):
    return cutegen.linear(x, w)

cutegen.use(FakeGpu(Path(sys.argv[1])).dispatcher())
x = torch.ones(16, 32, dtype=torch.bfloat16)
w = torch.ones(24, 32, dtype=torch.bfloat16, requires_grad=True)
run(x, w).sum().backward()
print(w.grad.sum().item())
"""


def test_a_process_that_compiles_first_has_gradients(tmp_path: Path) -> None:
    """The formula is registered before anything can trace the operator; else they would be None."""
    here = Path(__file__).parent
    code = FRESH.format(paths=[str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(16.0 * 24 * 32), done.stderr
