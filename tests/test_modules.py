"""Swapped layers compute what torch does, keep everything else, and never refuse."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu, operators_ask  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import UsageError  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


class Odd(torch.nn.Linear):
    """A layer of somebody's own."""

    def forward(self, input: Any) -> Any:
        return super().forward(input) * 2


def network(dtype: Any = BF16) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16, bias=False), Odd(16, 16)
    )
    return layers.to(dtype)


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


def test_layers_are_swapped_in_place_and_back(gpu: FakeGpu) -> None:
    """Parameters, names, hooks and classes; a subclass may compute something else, and is left alone."""
    model, x = network(), torch.randn(4, 32).to(BF16)
    want, names, parameters = model(x), list(model.state_dict()), list(model.parameters())
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    found = cutegen.optimize(model, lambda module, name: name != "2")
    assert found.layers == ("0",)
    assert set(found.skipped) == {"2", "3"} and "Odd" in found.skipped["3"]
    assert cutegen.optimize(model).layers == ("2",)
    assert isinstance(model[0], torch.nn.Linear)
    assert [*map(id, model.parameters())] == [*map(id, parameters)] and list(model.state_dict()) == names
    launched = len(gpu.calls)
    same(model(x), want)
    assert len(gpu.calls) == launched + 2 and seen == [torch.Size([4, 64])]
    assert cutegen.restore(model) == 2
    assert type(model[0]) is torch.nn.Linear and not hasattr(model[0], "fuse_wgrad")
    assert torch.equal(model(x), want)
    assert cutegen.counters()["fallbacks"] == {}


def test_copies_and_pickles_work_and_are_independent(gpu: FakeGpu) -> None:
    model, x = network(), torch.randn(4, 32).to(BF16)
    want = model(x)
    cutegen.optimize(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is type(model[0])
        launched = len(gpu.calls)
        same(other(x), want)
        assert len(gpu.calls) == launched + 2
        other[0].weight.data.zero_()
    same(model(x), want)


def test_training_a_swapped_model_has_the_gradients_of_torch(gpu: FakeGpu) -> None:
    model, x = network(), torch.randn(2, 4, 32).to(BF16)
    twin = copy.deepcopy(model)
    cutegen.optimize(model)
    model(x).sum().backward()
    twin(x).sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        same(own.grad, other.grad)


def misaligned(*shape: int) -> Any:
    return torch.randn(shape[0] * shape[1] + 1).to(BF16)[1:].view(shape)


UNFIT: dict[str, tuple[Any, Any, str]] = {
    "fp32": (lambda: network(torch.float32), lambda: torch.randn(4, 32), "kernels take torch.bfloat16"),
    "fp64": (lambda: network(torch.float64), lambda: torch.randn(4, 32).double(), "kernels take"),
    "misaligned": (network, lambda: misaligned(4, 32), "does not start at a multiple of 16 bytes"),
    "odd k": (
        lambda: torch.nn.Sequential(torch.nn.Linear(31, 16)).to(BF16),
        lambda: torch.randn(4, 31).to(BF16),
        "multiples of 16 bytes",
    ),
    "strided": (network, lambda: torch.randn(4, 64).to(BF16)[:, ::2], "contiguous along its rows"),
}


@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_no_kernel_takes_is_left_to_torch_and_counted(gpu: FakeGpu, name: str, compiled: bool) -> None:
    """Twice, so that the second call knows; compiled graphs count once."""
    make, operand, reason = UNFIT[name]
    model, x = make(), operand()
    want = model(x)
    cutegen.optimize(model)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    for _ in range(2):
        same(run(x), want)
    if compiled and name == "misaligned":
        return  # known at run time only: the operator copies
    counted = {text: n for text, n in cutegen.counters()["fallbacks"].items() if reason in text}
    assert sum(counted.values()) >= (1 if compiled else 2), cutegen.counters()


def test_layers_whose_class_computes_something_else_are_left_alone(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: 3 * x)
    found = cutegen.optimize(model)
    assert found.layers == () and found.skipped["0"] == "torch.nn.Linear.forward is not torch's"


def test_empty_batches_and_autocast_have_results(gpu: FakeGpu) -> None:
    model = network()
    cutegen.optimize(model)
    assert model(torch.empty(0, 32, dtype=BF16)).shape == (0, 16)
    model = network(torch.float32)
    cutegen.optimize(model)
    with torch.autocast("cpu", dtype=BF16):
        assert model(torch.randn(4, 32)).dtype == BF16
    assert any("autocast" in reason for reason in cutegen.counters()["fallbacks"])


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_decides_the_dtype_of_16_bits_too(gpu: FakeGpu, compiled: bool) -> None:
    """Torch casts bf16 to fp16 where autocast says fp16."""
    model, x = network(), torch.randn(4, 32).to(BF16)
    cutegen.optimize(model)
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.autocast("cpu", dtype=torch.float16):
        found = run(x)
        same(found, network()(x))
    assert found.dtype == torch.float16 and not gpu.calls
    with torch.autocast("cpu", dtype=BF16):
        assert run(x).dtype == BF16 and len(gpu.calls) == 2


def test_tracers_of_torch_get_its_own_operators(gpu: FakeGpu) -> None:
    """A trace would keep the memory that a kernel wrote, and no kernel takes what stands for a tensor."""
    model, x, other = network(), torch.randn(4, 32).to(BF16), torch.randn(2, 32).to(BF16)
    cutegen.optimize(model)
    traced = [torch.fx.symbolic_trace(model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced.append(torch.jit.trace(model, x, check_trace=False))
    assert not gpu.calls
    for each in traced:
        same(each(other), network()(other))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_gradients_are_those_of_torch(gpu: FakeGpu) -> None:
    """A kernel would drop the tangent of its input without a word."""
    from torch.autograd import forward_ad

    model, x = network(), torch.randn(4, 32).to(BF16)
    cutegen.optimize(model)
    found = []
    for each in (model, network()):
        with forward_ad.dual_level(), torch.no_grad():
            found.append(forward_ad.unpack_dual(each(forward_ad.make_dual(x, x))).tangent)
    assert torch.equal(*found) and not gpu.calls


def test_layers_that_torchscript_compiled_are_left_alone_and_listed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(network(), torch.randn(4, 32).to(BF16))
    found = cutegen.optimize(torch.nn.Sequential(scripted, torch.nn.Linear(16, 16)))
    assert found.layers == ("1",)
    assert found.skipped == dict.fromkeys(["0.0", "0.2"], "TorchScript compiled it")


def test_a_model_without_memory_has_shapes(gpu: FakeGpu) -> None:
    model = network().to("meta")
    cutegen.optimize(model)
    assert model(torch.empty(4, 32, dtype=BF16, device="meta")).shape == (4, 16)
    assert model.float()(torch.empty(4, 32, device="meta")).shape == (4, 16)


def test_a_compiled_model_is_one_graph_that_calls_kernels(gpu: FakeGpu) -> None:
    model, x = network(), torch.randn(4, 32).to(BF16)
    want = model(x)
    cutegen.optimize(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    launched = len(gpu.calls)
    same(run(x), want)
    assert len(gpu.calls) == launched + 2
    run(x).sum().backward()
    assert model[0].weight.grad is not None


def test_importing_cutegen_changes_no_class_of_torch() -> None:
    assert torch.nn.Linear.forward.__module__ == "torch.nn.modules.linear"


@pytest.mark.parametrize("change", [cutegen.optimize, cutegen.restore])
def test_what_is_no_module_is_named(change: Any) -> None:
    with pytest.raises(UsageError, match=r"model is a function; it must be a torch\.nn\.Module"):
        change(network)
