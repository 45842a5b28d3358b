"""The backend ``cutegen`` on compiled kernels: inference, training and CUDA graphs, beside fp64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters  # noqa: E402
from torch._functorch import config as aot_config  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

import cutegen  # noqa: E402
from cutegen.build.store import Store  # noqa: E402
from cutegen.runtime.dispatch import Dispatcher  # noqa: E402
from cutegen.runtime.kernel_cache import Kernels  # noqa: E402
from cutegen.torch_ops.inductor import compile_with_cutegen  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl, pytest.mark.filterwarnings("ignore")]
BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def _dispatcher(store: Store) -> Iterator[None]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    kernels = Kernels(store, build="allow")
    cutegen.use(Dispatcher(kernels=kernels, fallback="none"))
    with inductor_config.patch(fx_graph_cache=False), aot_config.patch(enable_autograd_cache=False):
        yield
    cutegen.use(before)
    torch._dynamo.reset()


class Block(torch.nn.Module):
    """A residual MLP with a relu and a gelu."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid = torch.nn.Linear(256, 512), torch.nn.Linear(512, 512)
        self.down = torch.nn.Linear(512, 256)

    def forward(self, x: Any) -> Any:
        hidden = torch.nn.functional.gelu(self.mid(torch.relu(self.up(x))))
        return x + self.down(hidden)


def targets(function: Any, *inputs: Any) -> list[str]:
    """The operators that the compiled code names."""
    from torch._inductor.utils import run_and_get_code

    _, code = run_and_get_code(function, *inputs)
    return [line for text in code for line in text.splitlines() if "torch.ops.cutegen" in line]


def test_a_block_is_right_in_inference_and_names_our_operators() -> None:
    torch.manual_seed(0)
    model = Block().to("cuda", BF16)
    x = torch.randn(3, 40, 256, device="cuda", dtype=BF16)
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
        run = torch.compile(model, backend=compile_with_cutegen, fullgraph=True)
        assert len(targets(run, x)) >= 3
        assert (run(x).double() - want).norm() < 1e-2 * want.norm()


ACTIVATIONS: dict[str, Any] = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_fused_and_right(name: str) -> None:
    """Behind a bias and a residual; one call of ours is all that is left."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512).to("cuda", BF16)
    x, residual = (
        torch.randn(3, 40, 256, device="cuda", dtype=BF16),
        torch.randn(3, 40, 512, device="cuda").to(BF16),
    )

    def step(x: Any, residual: Any, layer: Any = layer) -> Any:
        return ACTIVATIONS[name](layer(x) + residual)

    with torch.no_grad():
        found, code = run_and_get_code(
            torch.compile(step, backend=compile_with_cutegen, fullgraph=True), x, residual
        )
        want = step(x.double(), residual.double(), copy.deepcopy(layer).double())
    assert (found.double() - want).norm() < 1e-2 * want.norm()
    assert not any("triton_" in text for text in code)


def test_fp8_products_are_replaced_and_right() -> None:
    """With the operands and scales of ``torch._scaled_mm``, summed in fp32 as there."""
    torch.manual_seed(0)
    a, b = (torch.randn(rows, 512, device="cuda").to(torch.float8_e4m3fn) for rows in (64, 256))
    scale = torch.tensor(0.5, device="cuda")

    def step(a: Any, b: Any) -> Any:
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=BF16)

    run = torch.compile(step, backend=compile_with_cutegen, fullgraph=True)
    with torch.no_grad():
        assert len(targets(run, a, b)) >= 1
        want = 0.25 * (a.double() @ b.double().t())
        assert (run(a, b).double() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_training_step_has_the_gradients_of_torch(mode: str | None) -> None:
    torch.manual_seed(0)
    model = Block().to("cuda", BF16)
    twin = copy.deepcopy(model).double()
    run = torch.compile(model, backend=compile_with_cutegen, fullgraph=True, mode=mode)
    x = torch.randn(64, 256, device="cuda", dtype=BF16)
    twin(x.double()).square().mean().backward()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        run(x).float().square().mean().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad.double() - other.grad).norm() < 2e-2 * other.grad.norm()


class Mlp(torch.nn.Module):
    """A gated MLP whose first layer, or two, are gate and up."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        widths = [1024] if packed else [512, 512]
        self.first = torch.nn.ModuleList(torch.nn.Linear(256, n, bias=False) for n in widths)
        self.down = torch.nn.Linear(512, 256, bias=False)

    def forward(self, x: Any) -> Any:
        parts = [layer(x) for layer in self.first]
        gate, up = parts[0].chunk(2, -1) if len(parts) == 1 else parts
        return self.down(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("packed", [True, False])
def test_gates_are_part_of_the_product_before_them_and_right(packed: bool) -> None:
    """In inference; in training too where both weights are one, with the gradients of torch."""
    torch.manual_seed(0)
    model = Mlp(packed).to("cuda", BF16)
    twin, x = copy.deepcopy(model).double(), torch.randn(3, 40, 256, device="cuda", dtype=BF16)
    run = torch.compile(model, backend=compile_with_cutegen, fullgraph=True)
    with torch.no_grad():
        assert sum("gated_gemm" in line for line in targets(run, x)) >= 1
        assert (run(x).double() - twin(x.double())).norm() < 1e-2 * twin(x.double()).norm()
    with cutegen.record() as recording:
        run(x).float().square().mean().backward()
    twin(x.double()).square().mean().backward()
    assert ("gated_gemm" in {problem.family for problem in recording.problems}) == packed
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad.double() - other.grad).norm() < 2e-2 * other.grad.norm()


def test_training_of_mixed_rows_in_graphs_keeps_memory_flat() -> None:
    """Three numbers of rows take turns: no graph is left out, gradients stay right, no memory is lost."""
    torch.manual_seed(0)
    model = Block().to("cuda", BF16)
    twin = copy.deepcopy(model).double()
    run = torch.compile(
        model, backend=compile_with_cutegen, fullgraph=True, dynamic=True, mode="reduce-overhead"
    )
    inputs = [torch.randn(rows, 256, device="cuda", dtype=BF16) for rows in (64, 136, 200)]
    wanted = []
    for x in inputs:
        twin.zero_grad()
        twin(x.double()).square().mean().backward()
        wanted.append([parameter.grad.clone() for parameter in twin.parameters()])
    counters.clear()

    def step(at: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad()
        run(inputs[at % 3]).float().square().mean().backward()
        for own, other in zip(model.parameters(), wanted[at % 3], strict=True):
            assert (own.grad.double() - other).norm() < 2e-2 * other.norm()

    for at in range(12):  # what is compared takes memory, too
        step(at)
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for at in range(21):
        step(at)
    model.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before[0] + 2**20 and torch.cuda.memory_reserved() == before[1]
    assert not counters["inductor"]["cudagraph_skips"]
