"""Norms and gated MLPs of models on a real GPU: results and gradients of torch, in graphs and compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hopper import NEEDS_HOPPER

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

torch = pytest.importorskip("torch")

from test_norms import GRADIENTS  # noqa: E402
from test_swapped_blocks import WIDTH, HfMlp, HfNorm, Packed, block  # noqa: E402

import cutegen  # noqa: E402
from cutegen.torch_ops.inductor import compile_with_cutegen  # noqa: E402

pytestmark = [*NEEDS_HOPPER, pytest.mark.dsl, pytest.mark.filterwarnings("ignore")]
BF16 = torch.bfloat16


@pytest.fixture
def operators() -> Iterator[None]:
    before = cutegen.configure()
    cutegen.configure(build="allow", fallback="none")
    cutegen.reset_counters()
    yield
    cutegen.use(before)


def formula(x: Any, w: Any, r: Any) -> tuple[Any, Any]:
    h = x if r is None else x + r
    y = h * (h.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    return (y if w is None else y * w), h


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_norms_are_those_in_fp64(operators: None, case: Any) -> None:
    """By torch's kernel, and by Inductor's; of second order by the formula."""
    dtype, weight, residual, wants_sum = case
    generator = torch.Generator("cuda").manual_seed(0)

    def leaf(dtype: Any, *shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()

    x, r = leaf(dtype, 3, 40, 1000), leaf(dtype, 3, 40, 1000) if residual else None
    w = leaf(weight, 1000) if weight else None
    grads = torch.randn(2, 3, 40, 1000, device="cuda", generator=generator)

    def loss(x: Any, w: Any, r: Any) -> Any:
        found = cutegen.rms_norm(x, w, 1e-3, residual=r, residual_out=wants_sum)
        y, h = found if wants_sum else (found, None)
        return (y.float() * grads[0]).sum() + (0 if h is None else (h.float() * grads[1]).sum())

    own = [t for t in (x, w, r) if t is not None]
    wide = {id(t): t.detach().double().requires_grad_() for t in own}
    y, h = formula(*(None if t is None else wide[id(t)] for t in (x, w, r)))
    total = (y * grads[0]).sum() + ((h * grads[1]).sum() if wants_sum else 0)
    want = torch.autograd.grad(total, list(wide.values()))
    bound = 1e-5 if dtype == torch.float32 else 2.0**-6
    for run in (loss, torch.compile(loss, fullgraph=True)):
        for found, exact in zip(torch.autograd.grad(run(x, w, r), own), want, strict=True):
            assert (found.double() - exact).norm() <= bound * exact.norm()
    first = torch.autograd.grad(loss(x, w, r), own, create_graph=True)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(sum(f.float().sum() for f in first), own))


@pytest.mark.parametrize("mlp", [HfMlp, Packed])
def test_an_optimized_block_computes_and_trains_as_its_twin(operators: None, mlp: Any) -> None:
    """Eager, under Inductor with our backend, and in a CUDA graph."""
    model, twin = (block(HfNorm, mlp).to("cuda") for _ in range(2))
    found = cutegen.optimize(model)
    assert found.norms and found.gates
    x = torch.randn(300, WIDTH, device="cuda", dtype=BF16)
    with cutegen.record() as recording:
        for run in (model, torch.compile(model, backend=compile_with_cutegen)):
            y, want = run(x), twin(x)
            assert (y.double() - want.double()).norm() <= 2e-2 * want.double().norm()
            y.float().square().sum().backward()
            want.float().square().sum().backward()
            for own, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert (own.grad.double() - other.grad.double()).norm() <= 3e-2 * other.grad.double().norm()
                own.grad = other.grad = None
    families = {problem.family for problem in recording.problems}
    assert families == {"gemm", "rmsnorm", "gated_gemm", "gated_backward"}
    assert all("under torch.compile" in reason for reason in cutegen.counters()["fallbacks"])
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        x.normal_()
        graph.replay()
        assert torch.equal(captured, model(x))
