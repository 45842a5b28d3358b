"""The backend ``cutegen`` on compiled kernels: inference, training and CUDA graphs, beside fp64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

torch = pytest.importorskip("torch")

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
def _dispatcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from cutegen.torch_ops import gemm as ops

    cutegen.gemm  # noqa: B018  prepares the operators
    before = ops.default_dispatcher()
    kernels = Kernels(Store(tmp_path_factory.mktemp("cache")), build="allow")
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
