"""The backend ``cutegen``: graphs call our operators where kernels fit, and compute what torch computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

from fake_kernels import FakeGpu, operators_ask  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._functorch import config as aot_config  # noqa: E402
from torch._inductor import config as inductor_config  # noqa: E402

import cutegen  # noqa: E402
from cutegen.torch_ops import inductor  # noqa: E402

BF16 = torch.bfloat16
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    torch._dynamo.reset()
    counters.clear()
    with (
        inductor_config.patch(fx_graph_cache=False),
        aot_config.patch(enable_autograd_cache=False),
        operators_ask(FakeGpu(tmp_path), monkeypatch) as fake,
    ):
        yield fake


def compiled(function: Any, **settings: Any) -> Any:
    return torch.compile(function, backend=inductor.compile_with_cutegen, fullgraph=True, **settings)


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


def rand(*shape: int, dtype: Any = BF16) -> Any:
    return (torch.rand(shape) * 2 - 1).to(dtype)


LINEAR = torch.nn.functional.linear
W, BIAS = rand(24, 32), rand(24)
#: What is computed for x, and the arguments of the kernel behind a and b that show what was fused.
FORMS: dict[str, Any] = {
    "plain": lambda x, r: LINEAR(x, W),
    "bias": lambda x, r: LINEAR(x, W, BIAS),
    "bias, relu": lambda x, r: torch.relu(LINEAR(x, W, BIAS)),
    "residual": lambda x, r: LINEAR(x, W) + r,
    "bias, residual, relu": lambda x, r: torch.relu(r + LINEAR(x, W, BIAS)),
    "addmm": lambda x, r: torch.addmm(r.flatten(0, -2), x.flatten(0, -2), W.t(), alpha=0.5, beta=2.0),
    "not contiguous": lambda x, r: x.flatten(0, -2) @ rand_like_w(),
}


def rand_like_w() -> Any:
    return W.t().contiguous()


@pytest.mark.parametrize("name", FORMS)
def test_a_linear_layer_and_what_is_behind_it_is_one_kernel(gpu: FakeGpu, name: str) -> None:
    """Of 2 and 3 dimensions; no other call of the graph adds, or cuts off, anything."""
    for shape in ((16,), (2, 8)):
        x, residual = rand(*shape, 32), rand(*shape, 24)
        want = FORMS[name](x, residual)
        launched = len(gpu.calls)
        with torch.no_grad():
            same(compiled(FORMS[name])(x, residual), want)
        assert len(gpu.calls) == launched + 1
        extras = sum(word in name for word in ("bias", "residual", "addmm"))
        assert len([t for t in gpu.calls[-1] if hasattr(t, "shape")]) == 3 + extras


def test_training_graphs_call_kernels_for_every_gemm_and_compile_once(gpu: FakeGpu) -> None:
    """Forward, input gradient and weight gradient of two layers, whatever the number of rows."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).to(BF16)
    twin = copy.deepcopy(model)
    run = compiled(model, dynamic=True)
    for rows in (8, 16, 40):
        x = rand(rows, 32).requires_grad_()
        y = x.detach().clone().requires_grad_()
        launched = len(gpu.calls)
        run(x).float().square().mean().backward()
        twin(y).float().square().mean().backward()
        assert len(gpu.calls) == launched + 6
        same(x.grad, y.grad)
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            same(own.grad, other.grad)
    assert counters["stats"]["unique_graphs"] == 1


def test_batched_gemms_are_replaced(gpu: FakeGpu) -> None:
    a, b = rand(3, 16, 32), rand(3, 32, 24)
    launched = len(gpu.calls)
    same(compiled(torch.bmm)(a, b), a @ b)
    assert len(gpu.calls) == launched + 1


@pytest.mark.parametrize(
    "operands",
    [(rand(16, 32, dtype=torch.float32), rand(32, 24, dtype=torch.float32)), (rand(16, 31), rand(31, 24))],
    ids=["fp32", "odd k"],
)
def test_what_no_kernel_takes_stays_with_inductor(gpu: FakeGpu, operands: Any) -> None:
    launched = len(gpu.calls)
    same(compiled(torch.mm)(*operands), torch.mm(*operands))
    assert len(gpu.calls) == launched


def test_options_and_modes_of_inductor_are_kept(gpu: FakeGpu) -> None:
    """And what it does not know is refused."""
    x = rand(16, 32)
    with torch.no_grad():
        same(compiled(FORMS["bias"], options={"max_fusion_size": 2})(x, None), LINEAR(x, W, BIAS))
        same(torch.compile(FORMS["bias"], options=inductor.inductor_options())(x, None), LINEAR(x, W, BIAS))
        same(compiled(FORMS["bias"], mode="max-autotune-no-cudagraphs")(x, None), LINEAR(x, W, BIAS))
    with pytest.raises(cutegen.CutegenError, match="does not know speed"):
        inductor.compile_with_cutegen(None, [], speed=1)


def test_the_key_of_the_cache_depends_on_versions_only() -> None:
    """What the pass does depends on the graph alone, so a new table needs no new compilation."""
    assert inductor._pass().uuid() == ("cutegen", cutegen.__version__, inductor._VERSION)


def test_torch_finds_the_backend_by_its_name() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'cutegen = "cutegen.torch_ops.inductor:compile_with_cutegen"' in text
    assert callable(inductor.compile_with_cutegen)
