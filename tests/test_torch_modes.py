"""Modes of torch that see operators: tracing with real tensors, counting, checkpointing by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from test_fake_operands import BF16, CALLS, results, some  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402

import cutegen  # noqa: E402


class Unseen(AllFamilies):
    """A GPU whose kernels no mode sees, as none sees a launch."""

    def load(self, library: Path, symbol: str) -> Callable[..., Any]:
        function = super().load(library, symbol)

        def unseen(*arguments: Any) -> None:
            with _disable_current_modes():
                function(*arguments)

        return unseen


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(Unseen(tmp_path), monkeypatch) as fake:
        yield fake  # type: ignore[misc]


class Watch(TorchDispatchMode):
    """Writes down the operators of cutegen that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.namespace == "cutegen":
            self.seen.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_one_operator_for_each_call(gpu: AllFamilies, name: str) -> None:
    """Of calls whose kind is known too; two modes see it each, and the kernel is launched once."""
    call, operands = CALLS[name]
    wanted = results(call(**operands))
    launched = len(gpu.calls)
    with Watch() as outer, Watch() as inner:
        found = results(call(**operands))
    assert len(inner.seen) == 1 and inner.seen == outer.seen
    assert len(gpu.calls) == launched + 1
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


INTO: dict[str, Callable[[Any], Any]] = {
    "gemm": lambda out: cutegen.gemm(some(16, 64, dtype=BF16), some(64, 24, dtype=BF16), out=out),
    "linear": lambda out: cutegen.linear(some(2, 8, 64, dtype=BF16), some(24, 64, dtype=BF16), out=out),
    "rms_norm": lambda out: cutegen.rms_norm(some(16, 24, dtype=BF16), out=out),
    "activate": lambda out: cutegen.activate(some(16, 24, dtype=BF16), "silu", out=out),
}


@pytest.mark.parametrize("name", INTO)
def test_a_mode_sees_calls_that_write_into_a_tensor(gpu: AllFamilies, name: str) -> None:
    shape = (2, 8, 24) if name == "linear" else (16, 24)
    wanted, found = torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16)
    INTO[name](wanted)
    with Watch() as watch:
        assert INTO[name](found) is found
    assert len(watch.seen) == 1 and torch.equal(found, wanted)


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_sees_the_products_of_a_layer(gpu: AllFamilies, training: bool) -> None:
    """Also those that go the short way of a layer that trains, forward and backward."""
    x, w = some(16, 64, dtype=BF16), some(24, 64, dtype=BF16).requires_grad_(training)
    for known in (False, True):
        with Watch() as watch:
            y = cutegen.linear(x, w)
            if training:
                y.sum().backward()
        assert watch.seen == ["cutegen.gemm.default"] * (1 + training), known
    assert not training or torch.equal(w.grad, torch.full_like(w, 32))


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize(
    "name", [name for name in CALLS if name != "grouped_gemm"]
)  # it reads what it is given
def test_graphs_traced_with_real_tensors_compute(gpu: AllFamilies, name: str, known: bool) -> None:
    """They held the memory of a result, and nothing that wrote it."""
    call, operands = CALLS[name]
    keys = list(operands)
    if known:
        call(**operands)

    def positional(*tensors: Any) -> Any:
        return results(call(**dict(zip(keys, tensors, strict=True))))

    graph = make_fx(positional, tracing_mode="real")(*operands.values())
    others = [t * 2 if t.is_floating_point() else t + 1 for t in operands.values()]
    for found, wanted in zip(graph(*others), positional(*others), strict=True):
        assert torch.equal(found, wanted)
