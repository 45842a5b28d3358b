"""``torch.func`` over the operators: mapped and differentiated calls are what torch computes, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu, operators_ask  # noqa: E402

import cutegen  # noqa: E402
from cutegen.torch_ops import gemm as ops  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


def rand(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) * 2 - 1).to(BF16)


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


X, W, C, BIAS = rand(3, 16, 32), rand(24, 32), rand(3, 16, 24), rand(24)
#: What is mapped over the first axis of its arguments, the same by torch, and how many kernels run.
MAPPED: dict[str, tuple[Any, Any, Any, int]] = {
    "rows": (lambda a: cutegen.linear(a, W, BIAS), lambda a: a @ W.T + BIAS, (X,), 1),
    "both": (lambda a, b: cutegen.gemm(a, b.mT), lambda a, b: a @ b.mT, (X, rand(3, 24, 32)), 1),
    "weights": (lambda b: cutegen.gemm(X[0], b.mT), lambda b: X[0] @ b.mT, (rand(3, 24, 32),), 1),
    "addend": (lambda a, c: cutegen.gemm(a, W.T, c=c), lambda a, c: a @ W.T + c, (X, C), 1),
    "addend alone": (lambda c: cutegen.gemm(X[0], W.T, c=c), lambda c: X[0] @ W.T + c, (C,), 1),
    "one addend": (lambda a: cutegen.gemm(a, W.T, c=C[0]), lambda a: a @ W.T + C[0], (X,), 1),
    "bias": (lambda v: cutegen.linear(X[0], W, v), lambda v: X[0] @ W.T + v, (rand(3, 24),), 3),
    "relu": (
        lambda a: cutegen.gemm(a, W.T, activation="relu"),
        lambda a: torch.relu(a @ W.T),
        (X,),
        1,
    ),
}


@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.parametrize("called_before", [False, True])
def test_mapped_calls_are_one_kernel_where_they_can_be(gpu: FakeGpu, name: str, called_before: bool) -> None:
    """Also where a plan for the shapes of one of them is known."""
    run, reference, arguments, kernels = MAPPED[name]
    if called_before:
        run(*(tensor[0] for tensor in arguments))
    launched = len(gpu.calls)
    found = torch.vmap(run)(*arguments)
    assert len(gpu.calls) - launched - kernels in (0, 1)  # one more may find that there is nothing to read
    same(found, torch.vmap(reference)(*arguments))


def test_other_axes_and_nested_maps() -> None:
    same(torch.vmap(cutegen.linear, (1, None), 1)(X.movedim(0, 1).contiguous(), W), (X @ W.T).movedim(0, 1))
    nested = torch.vmap(torch.vmap(cutegen.linear, (0, None)), (0, None))
    same(nested(rand(2, 3, 16, 32), W), rand(2, 3, 16, 32) @ W.T)


def test_gradients_by_torch_func_are_those_of_torch() -> None:
    """With activations, of a layer with parameters, per sample, and of second order."""

    def loss(x: Any, w: Any, product: Any) -> Any:
        return product(x, w).float().square().sum()

    ours = lambda x, w: cutegen.linear(x, w, activation="silu")  # noqa: E731
    torchs = lambda x, w: torch.nn.functional.silu(x @ w.T)  # noqa: E731
    for wanted in (0, 1):
        gradient = torch.func.grad(loss, wanted)
        same(gradient(X[0], W, ours) / 64, gradient(X[0].float(), W.float(), torchs) / 64)
        per_sample = torch.vmap(gradient, (0, None, None))
        same(per_sample(X, W, ours) / 64, per_sample(X.float(), W.float(), torchs) / 64)

    def slope(x: Any, w: Any, product: Any) -> Any:
        return torch.func.grad(loss)(x, w, product).float().square().sum()

    second = torch.func.grad(slope, 1)
    found, want = second(X[0], W, ours).double(), second(X[0].double(), W.double(), torchs)
    assert (found - want).norm() < 3e-2 * want.norm()
    layer = torch.nn.Linear(32, 24).to(BF16)
    cutegen.optimize(layer_in := torch.nn.Sequential(layer))
    found = torch.func.grad(lambda p: torch.func.functional_call(layer_in, p, (X[0],)).float().sum())(
        dict(layer_in.named_parameters())
    )
    same(found["0.bias"], torch.full((24,), 16.0))


@pytest.mark.filterwarnings("ignore")  # torch compiles scripts for forward mode, and warns of it
def test_what_has_no_rule_is_refused_not_wrong() -> None:
    """Forward mode, and torch.func over the operator itself: torch says what is missing."""
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda a: cutegen.linear(a, W), (X[0],), (X[0],))
    arguments = ops.pack((None, 1.0, 1.0, None, "", None, None, None))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda a: torch.ops.cutegen.gemm.default(a, W.T, *arguments).float().sum())(X[0])
