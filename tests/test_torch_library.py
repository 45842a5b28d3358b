"""Laws of the operators as ``torch.compile`` and the dispatcher of torch see them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu  # noqa: E402
from torch import library as registry  # noqa: E402

import cutegen  # noqa: E402
from cutegen import ops  # noqa: E402
from cutegen.errors import OperandError  # noqa: E402

BF16 = torch.bfloat16
PLAIN = (None, 1.0, 1.0, None, "", None, None, None, None, False, False)
# torch's own tracer uses deprecated parts of Python and of itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[FakeGpu]:
    fake = FakeGpu(tmp_path)
    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    cutegen.use(fake.dispatcher())
    yield fake
    cutegen.use(before)
    torch._dynamo.reset()


def rand(*shape: int) -> Any:
    return torch.rand(shape).to(BF16)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_functions_compile(gpu: FakeGpu, backend: str) -> None:
    """gemm and linear stay opaque operators, so nothing breaks the graph."""

    @torch.compile(backend=backend, fullgraph=True)
    def block(x: Any, w1: Any, w2: Any, bias: Any) -> Any:
        hidden = cutegen.linear(x, w1, bias, activation="relu")
        return cutegen.gemm(hidden.view(-1, 24), w2, alpha=2.0, out_dtype=torch.float32) + 1

    x, w1, w2, bias = rand(2, 8, 32), rand(24, 32), rand(24, 16), rand(24)
    hidden = torch.relu(x.float() @ w1.float().t() + bias.float()).to(BF16)
    want = 2 * hidden.view(-1, 24).float() @ w2.float() + 1
    torch.testing.assert_close(block(x, w1, w2, bias), want, rtol=1e-2, atol=1e-1)
    assert len(gpu.calls) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_output_argument_compiles(gpu: FakeGpu, backend: str) -> None:
    """Writing into ``out`` is a declared mutation: it happens, and the caller's tensor comes back."""

    @torch.compile(backend=backend, fullgraph=True)
    def into(a: Any, b: Any, out: Any) -> Any:
        return cutegen.gemm(a, b, out=out) * 2

    a, b, out = rand(16, 32), rand(32, 24), torch.zeros(16, 24, dtype=BF16)
    twice = into(a, b, out)
    want = a.float() @ b.float()
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(twice.float(), 2 * want, rtol=2e-2, atol=2e-2)


def test_config_survives_tracing(gpu: FakeGpu) -> None:
    """A config is a constant of the graph, whichever form it has."""
    problem = cutegen.Problem(64, 64, 128, layout="nn")
    config = ops.default_dispatcher().explain(problem).config
    assert config is not None
    config = config.replace(swizzle_size=4)

    @torch.compile(backend="eager", fullgraph=True)
    def run(a: Any, b: Any) -> Any:
        return cutegen.gemm(a, b, config=config)

    run(rand(64, 128), rand(128, 64))
    assert gpu.calls[-1][4] == 4


def test_dynamic_shapes_compile_once(gpu: FakeGpu) -> None:
    """Sizes may be symbols while tracing; each real size then gets its own plan."""

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def run(a: Any, b: Any) -> Any:
        return cutegen.gemm(a, b)

    b = rand(32, 24)
    for m in (8, 16, 40):
        assert run(rand(m, 32), b).shape == (m, 24)


def test_operators_pass_torch_checks(gpu: FakeGpu) -> None:
    """torch's own battery for custom operators: schema, shapes of fakes, registration."""
    a, b, c, bias = rand(16, 32), rand(32, 24), rand(16, 24), rand(24)
    tests = ("test_schema", "test_faketensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in (PLAIN, (c, 2.0, 0.5, bias, "silu", BF16, None, None, None, False, True)):
            registry.opcheck(torch.ops.cutegen.gemm, (a, b, *options), test_utils=tests)
            out = torch.empty(16, 24, dtype=BF16)
            registry.opcheck(torch.ops.cutegen.gemm_out, (a, b, out, *options), test_utils=tests)


def test_fake_tensors_launch_nothing(gpu: FakeGpu) -> None:
    """A fake tensor has no memory; it gets a fake result of the right shape, even if a plan is warm."""
    from torch._subclasses import FakeTensorMode

    cutegen.gemm(rand(16, 32), rand(32, 24))
    launched = len(gpu.calls)
    with FakeTensorMode():
        a, b = torch.empty(16, 32, dtype=BF16), torch.empty(32, 24, dtype=BF16)
        found = cutegen.gemm(a, b, out_dtype=torch.float32)
        assert found.shape == (16, 24) and found.dtype == torch.float32
        with pytest.raises(RuntimeError, match="a has 32 columns but b has 16 rows"):
            cutegen.gemm(a, torch.empty(16, 24, dtype=BF16))
    real = rand(16, 32), rand(32, 24)
    for at in (0, 1):
        with FakeTensorMode(allow_non_fake_inputs=True):
            mixed = [torch.empty(t.shape, dtype=BF16) if at == i else t for i, t in enumerate(real)]
            assert type(cutegen.gemm(*mixed)) is not torch.Tensor
    assert len(gpu.calls) == launched


def test_gradients_are_refused_while_tracing(gpu: FakeGpu) -> None:
    """A compiled function must not silently lose the gradient that an eager one would refuse."""

    @torch.compile(backend="eager")
    def run(a: Any, b: Any) -> Any:
        return cutegen.gemm(a, b)

    with pytest.raises(OperandError, match="a requires grad"):
        run(rand(16, 32).requires_grad_(), rand(32, 24))
