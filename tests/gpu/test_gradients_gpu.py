"""Gradients of compiled kernels beside fp64, eager, compiled and accumulated in fp32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl, pytest.mark.filterwarnings("ignore")]
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def dispatcher(store: Store) -> Iterator[Dispatcher]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    yield cutegen.use(Dispatcher(kernels=Kernels(store, build="allow"), fallback="none"))
    cutegen.use(before)
    torch._dynamo.reset()


def leaf(*shape: int) -> Any:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator, device="cuda") * 2 - 1).to(BF16).requires_grad_()


def doubles(*tensors: Any) -> list[Any]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def same_gradients(found: Any, want: Any, inputs: Any, wanted_inputs: Any) -> None:
    weights = torch.rand_like(found) - 0.5
    own = torch.autograd.grad(found, inputs, weights)
    ref = torch.autograd.grad(want, wanted_inputs, weights.double())
    for one, right in zip(own, ref, strict=True):
        assert (one.double() - right).norm() < 6e-3 * right.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ["", "relu", "gelu"])
def test_a_linear_layer_has_the_gradients_of_torch(activation: str, compiled: bool) -> None:
    def layer(x: Any, w: Any, bias: Any) -> Any:
        return cutegen.linear(x, w, bias, activation)

    run: Any = torch.compile(layer, fullgraph=True, dynamic=True) if compiled else layer
    w, bias = leaf(768, 512), leaf(768)
    for rows in (200, 77):
        x = leaf(2, rows, 512)
        u, v, t = doubles(x, w, bias)
        want = torch.nn.functional.linear(u, v, t)
        functions = {"": lambda z: z, "relu": torch.relu, "gelu": torch.nn.functional.gelu}
        same_gradients(run(x, w, bias), functions[activation](want), (x, w, bias), (u, v, t))


def test_every_layout_and_addend_has_gradients() -> None:
    for a, b in (
        (leaf(128, 256), leaf(256, 192)),
        (leaf(256, 128).mT, leaf(192, 256).mT),
        (leaf(3, 128, 256), leaf(3, 256, 192)),
    ):
        c = leaf(*a.shape[:-1], 192)
        x, y, z = doubles(a, b, c)
        found = cutegen.gemm(a, b, c=c, alpha=0.5, beta=-2.0)
        same_gradients(found, 0.5 * (x @ y) - 2 * z, (a, b, c), (x, y, z))


def test_main_grad_is_the_sum_of_the_micro_batches() -> None:
    w = torch.nn.Parameter(leaf(768, 512).detach())
    w.main_grad = torch.zeros(768, 512, device="cuda")
    want = torch.zeros(768, 512, device="cuda", dtype=torch.float64)
    for step in range(4):
        x, grad = leaf(128 + 8 * step, 512).detach(), leaf(128 + 8 * step, 768).detach()
        cutegen.linear(x, w, fuse_wgrad=True).backward(grad)
        want += grad.double().T @ x.double()
    assert w.grad is None
    torch.testing.assert_close(w.main_grad.double(), want, rtol=1e-4, atol=1e-3)


def test_a_compiled_training_step_runs_in_cuda_graphs() -> None:
    """mode="reduce-overhead": forward and backward, memory flat over 20 steps."""
    w = torch.nn.Parameter(leaf(512, 512).detach())
    x = leaf(64, 512).detach()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def loss(x: Any, w: Any) -> Any:
        return cutegen.linear(x, w, activation="silu").float().square().mean()

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        loss(x, w).backward()

    for _ in range(5):
        step()
        w.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step()
        got, w.grad = w.grad, None
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20  # got, and no workspace of cuBLAS yet
    u, v = doubles(x, w)
    [want] = torch.autograd.grad(torch.nn.functional.silu(u @ v.T).square().mean(), v)
    assert (got.double() - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimized_model_trains_as_its_twin(compiled: bool) -> None:
    """Layers of a size that kernels take, one of fp32 for torch, and a misaligned input."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 250), torch.nn.Linear(250, 64)
    ).to("cuda", BF16)
    twin = copy.deepcopy(model)
    assert len(cutegen.optimize(model).layers) == 3
    run: Any = torch.compile(model, fullgraph=True) if compiled else model
    memory = leaf(1, 128 * 512 + 1).detach().flatten()
    for x in (memory[:-1].view(128, 512), memory[1:].view(128, 512)):
        for one, net in ((model, run), (twin, twin)):
            one.zero_grad()
            net(x).float().square().mean().backward()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            difference = (own.grad.double() - other.grad.double()).norm()
            assert difference < 2e-2 * other.grad.double().norm()


def test_layers_that_no_kernel_takes_are_left_to_torch() -> None:
    """Results of more than 2^31 elements, odd k, repeated rows and no rows, with a reason for each."""
    layer = torch.nn.Linear(64, 32768, bias=False).to("cuda", BF16)
    odd = torch.nn.Linear(63, 128, bias=False).to("cuda", BF16)
    cutegen.reset_counters()
    for net in (layer, odd):
        cutegen.optimize(torch.nn.Sequential(net))
    x = torch.randn(66000, 64, device="cuda", dtype=BF16)
    with torch.no_grad():
        for net, rows in ((layer, x), (odd, x[:, :63]), (layer, x[:1].expand(64, 64)), (layer, x[:0])):
            found, want = net(rows), torch.nn.functional.linear(rows, net.weight)
            assert found.shape == want.shape
            for part in (slice(0, 64), slice(max(0, len(rows) - 64), len(rows))):
                torch.testing.assert_close(found[part], want[part], rtol=2e-2, atol=2e-2)
    assert cutegen.counters()["fallbacks"]


def test_mapped_calls_and_gradients_by_torch_func() -> None:
    """Also where plans for the shapes of one of them are known: their kernels find no memory to read."""
    x, w = (leaf(*shape).detach() for shape in ((3, 64, 128), (256, 128)))
    cutegen.linear(x[0], w)
    found = torch.vmap(cutegen.linear, (0, None))(x, w)
    assert (found.double() - x.double() @ w.double().T).norm() < 1e-2 * found.double().norm()

    def loss(w: Any, x: Any) -> Any:
        return cutegen.linear(x, w, activation="silu").float().square().sum()

    per_sample = torch.vmap(torch.func.grad(loss), (None, 0))(w, x)
    for at in range(3):
        v = w.double().requires_grad_()
        torch.nn.functional.silu(x[at].double() @ v.T).square().sum().backward()
        assert v.grad is not None
        assert (per_sample[at].double() - v.grad).norm() < 2e-2 * v.grad.norm()
