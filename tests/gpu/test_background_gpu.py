"""Compiling in the background and warming up on a real GPU: right results, and nothing compiled after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

import cutegen  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.dtypes import torch_dtype  # noqa: E402
from cutegen.families.registry import find_family, parse_problem  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.filterwarnings("ignore")]
BF16 = torch.bfloat16
ENOUGH_S = 120.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty cache that calls use, compiling in the background."""
    cutegen.gemm, cutegen.rms_norm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    found = Store(tmp_path / "cache")
    dispatcher = cutegen.use(Dispatcher(kernels=Kernels(found), fallback="none"))
    yield found
    dispatcher.kernels._background.close()
    cutegen.use(before)


def rand(*shape: int, dtype: Any = BF16) -> Any:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator, device="cuda") * 2 - 1).to(dtype)


def near(found: Any, want: Any, k: int) -> None:
    """Within the rounding of bf16 and of fp32 sums of values in [-1, 1]."""
    assert not found.isnan().any()
    torch.testing.assert_close(found.double(), want.double(), rtol=2e-2, atol=1e-2 * k**0.5)


def test_the_kernel_takes_over(store: Store) -> None:
    """The first calls are torch.mm's, bit for bit; from the swap on they are those of the kernel."""
    a, b = rand(96, 4096), rand(6144, 4096).t()
    first = cutegen.gemm(a, b)
    assert not store.keys("sm_90a")  # it did not wait for the compiler
    assert torch.equal(first, torch.mm(a, b))
    assert cutegen.wait_for_kernels(ENOUGH_S)
    out = cutegen.gemm(a, b)
    choice = ops.default_dispatcher().kernel(parse_problem("gemm 96x6144x4096 bf16 kk"))
    assert choice is not None
    (plan,) = ops._plans.values()
    assert plan.launch.__code__.co_name == "<lambda>"  # the kernel's launcher, and nothing around it
    near(out, a.float() @ b.float(), 4096)
    cutegen.configure(build="never")
    assert torch.equal(cutegen.gemm(a, b), out)
    assert len(store.keys("sm_90a")) == 1


def test_a_graph_keeps_what_it_captured(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Captured while the kernel is compiled it is torch.mm's, and a warning says so; later the kernel's."""
    a, b = rand(64, 2048), rand(7168, 2048).t()
    out = torch.empty(64, 7168, device="cuda", dtype=BF16)
    cutegen.gemm(a, b, out=out)
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with caplog.at_level(logging.WARNING, logger="cutegen"), torch.cuda.graph(graph):
            cutegen.gemm(a, b, out=out)
        graphs.append(graph)
        assert cutegen.wait_for_kernels(ENOUGH_S)
        cutegen.gemm(a, b, out=out)
    captured = [record for record in caplog.records if "CUDA graph captures" in record.getMessage()]
    assert len(captured) == 1
    for graph in graphs:
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        near(out, a.float() @ b.float(), 2048)


def test_rms_norm_is_served_and_swapped(store: Store) -> None:
    """Its reference stands in, in place too."""
    x, w, residual = rand(513, 4096), rand(4096), rand(513, 4096)
    for _ in range(2):
        y, h = cutegen.rms_norm(x, w, residual=residual, residual_out=True)
        total = x.double() + residual.double()
        want = torch.nn.functional.rms_norm(total, (4096,), w.double(), 1e-6)
        torch.testing.assert_close(y.double(), want, rtol=2**-7, atol=1e-5)
        assert torch.equal(h, total.to(BF16))
        assert cutegen.wait_for_kernels(ENOUGH_S)
    assert len(store.keys("sm_90a")) == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_functions_are_right_throughout(store: Store, mode: str) -> None:
    """Before, during and after the swap; with CUDA graphs too."""

    def block(x: Any, w: Any) -> Any:
        return cutegen.linear(x * 2, w, activation="relu") + 1

    x, w = rand(128, 1024), rand(512, 1024)
    want = torch.relu(2 * x.double() @ w.double().t()) + 1
    run = torch.compile(block, mode=mode, fullgraph=True)
    for step in range(6):
        near(run(x, w), want, 1024)
        if step == 3:
            assert cutegen.wait_for_kernels(ENOUGH_S)
    torch._dynamo.reset()


LINES = [
    "gemm 333x520x712 bf16 kk",
    "gemm 333x520x712 fp16 kn alpha beta bias=n act=gelu_tanh",
    "gemm 5x88x400x640 bf16 mk beta bias=m act=silu",
    "gemm 400x240x720 bf16 mn out=fp32",
    "gemm 333x400x800 e4m3 kk scale promote act=relu",
    "gemm 333x480x800 e5m2 kk alpha bias=n",
    "gemm 333x400x4096 int8 kk",
    "rmsnorm 333x1000 bf16 residual residual_out rstd",
]


@pytest.mark.parametrize("line", LINES)
def test_stand_ins_pass_the_check_of_kernels(line: str) -> None:
    """Every output element is as near to the reference as is asked of a kernel."""
    problem = parse_problem(line)
    family = find_family(problem.family)
    inputs = family.inputs(problem, torch.Generator("cuda").manual_seed(3), awkward=True)
    reference = family.reference(problem, inputs)
    outputs = {
        a.name: torch.full(a.shape, 77, dtype=torch_dtype(a.dtype), device="cuda")
        for a in family.arguments(problem)
        if a.kind == "out"
    }
    stand_in = family.stand_in(problem)
    assert stand_in is not None
    stand_in(inputs, outputs)
    for name, got in outputs.items():
        for chunk in reference.chunks(name, got):
            assert ((chunk.got - chunk.want).abs() <= chunk.allowed).all(), name


def test_after_a_warm_up_200_random_shapes_compile_nothing(store: Store) -> None:
    """Each is right, no thread is started, and a shape that was never called can be captured at once."""
    warmed = cutegen.warmup()
    assert warmed.launched == len(warmed.wanted) and not warmed.failed
    keys = store.keys("sm_90a")
    kernels = ops.default_dispatcher().kernels
    generator = Random(11)
    for _ in range(200):
        m = int(8192 ** generator.random())
        n, k = (64 * int(64 ** generator.random()) for _ in range(2))
        x, w = rand(m, k), rand(n, k)
        near(cutegen.linear(x, w), x.float() @ w.float().t(), k)
    assert store.keys("sm_90a") == keys and kernels._background._thread is None
    x, w = rand(777, 1024), rand(2112, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cutegen.gemm(x, w.t())
    graph.replay()
    near(out, x.float() @ w.float().t(), 1024)
