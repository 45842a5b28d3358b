"""What people do to models works with swapped layers too: FSDP2, LoRA, parametrisations, hooks, sharing."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch.distributed as dist  # noqa: E402
from fake_kernels import FakeGpu, operators_ask  # noqa: E402
from torch.nn.utils import parametrizations, parametrize  # noqa: E402

import cutegen  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        yield fake


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One process that shards among itself."""
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Lora(torch.nn.Module):
    """A frozen layer and a product of low rank beside it."""

    def __init__(self, base: Any, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Linear(base.in_features, rank, bias=False, dtype=BF16)
        self.b = torch.nn.Linear(rank, base.out_features, bias=False, dtype=BF16)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.b(self.a(x))


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).to(BF16)


def rows() -> Any:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(BF16)


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


def same_step(model: Any, twin: Any) -> None:
    """Results and gradients of one step are those of a twin."""
    found, want = model(rows()), twin(rows())
    same(found, want)
    found.float().sum().backward()
    want.float().sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            same(own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad, other.grad)


def test_layers_are_sharded_after_they_were_swapped(gpu: FakeGpu, mesh: Any) -> None:
    """FSDP2 makes classes of its own above ours; layers that it has already are left alone, and listed."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has FSDP2 elsewhere")
    model, twin = network(), network()
    assert cutegen.optimize(model).layers == ("0", "2")
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, mesh=mesh)
    same_step(model, twin)
    assert len(gpu.calls) == 5 and cutegen.counters()["fallbacks"] == {}
    assert cutegen.restore(model) == 2 and cutegen.restore(model) == 0
    same(model(rows()), twin(rows()))
    assert len(gpu.calls) == 5 and cutegen.optimize(model).layers == ("0", "2")
    same(model(rows()), twin(rows()))
    assert len(gpu.calls) == 7
    sharded = network()
    for layer in (sharded[0], sharded[2], sharded):
        fsdp.fully_shard(layer, mesh=mesh)
    found = cutegen.optimize(sharded)
    assert not found.layers and all("FSDPLinear" in reason for reason in found.skipped.values())
    same(sharded(rows()), twin(rows()))
    assert list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("first", ["swapped", "adapted"])
def test_adapters_of_low_rank_are_trained(gpu: FakeGpu, first: str) -> None:
    """Around swapped layers, and with layers of their own swapped; what is frozen gets no gradient."""
    model, twin = network(), network()
    if first == "swapped":
        cutegen.optimize(model)
    for net in (model, twin):
        torch.manual_seed(3)
        net[0], net[2] = Lora(net[0]), Lora(net[2])
    found = cutegen.optimize(model).layers
    assert set(found) >= {"0.a", "0.b", "2.a", "2.b"} and ("0.base" in found) == (first == "adapted")
    same_step(model, twin)
    assert model[0].base.weight.grad is None
    # Six products forward; backward both of each adapter, and the input gradient of one frozen layer, but
    # no input gradient of the first of all.
    assert len(gpu.calls) == 6 + 8 + 1 - 1
    assert cutegen.restore(model) == 6 and type(model[0].base) is torch.nn.Linear


@pytest.mark.parametrize("first", ["swapped", "parametrized"])
def test_parametrised_weights_are_computed_as_before(gpu: FakeGpu, first: str) -> None:
    """Before, the layer is of another class, and listed; after, the kernel takes what comes out."""
    model, twin = network(), network()
    if first == "swapped":
        cutegen.optimize(model)
    for net in (model, twin):
        parametrizations.weight_norm(net[0])
    found = cutegen.optimize(model)
    if first == "parametrized":
        assert found.layers == ("2",) and "ParametrizedLinear" in found.skipped["0"]
    same_step(model, twin)
    assert len(gpu.calls) == (5 if first == "swapped" else 3)
    parametrize.remove_parametrizations(model[0], "weight")
    parametrize.remove_parametrizations(twin[0], "weight")
    assert isinstance(model[0], torch.nn.Linear)
    same(model(rows()), twin(rows()))


def test_hooks_of_all_kinds_see_what_they_saw(gpu: FakeGpu) -> None:
    seen: dict[str, list[Any]] = {}
    for name, net in (("own", network()), ("torch", network())):
        seen[name] = events = []
        if name == "own":
            cutegen.optimize(net)
        for layer in (net[0], net[2]):
            layer.register_forward_pre_hook(lambda m, given, e=events: e.append(("before", given[0].shape)))
            layer.register_forward_hook(lambda m, given, out, e=events: e.append(("after", out.shape)))
            layer.register_full_backward_hook(
                lambda m, gin, gout, e=events: e.append(("backward", [g is None for g in gin], gout[0].shape))
            )
            layer.weight.register_hook(lambda grad, e=events: e.append(("gradient", grad.shape)))
            layer.weight.register_post_accumulate_grad_hook(
                lambda p, e=events: e.append(("done", p.grad.shape))
            )
        net(rows()).float().sum().backward()
    assert seen["own"] == seen["torch"] and len(seen["own"]) == 10
    assert len(gpu.calls) == 5


def test_state_moves_between_swapped_and_plain_models(gpu: FakeGpu) -> None:
    """By ``state_dict``, by files, and by changes in place; a model on another dtype is left to torch."""
    model, plain = network(), network()
    cutegen.optimize(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    plain.load_state_dict(model.state_dict())
    same(model(rows()), plain(rows()))
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    launched = len(gpu.calls)
    same(loaded(rows()), plain(rows()))
    assert len(gpu.calls) == launched + 2
    wide = copy.deepcopy(model).float()
    same(wide(rows().float()), plain(rows()))
    assert len(gpu.calls) == launched + 2 and cutegen.counters()["fallbacks"]


def test_shared_weights_accumulate_twice(gpu: FakeGpu) -> None:
    """In ``grad``, and in ``main_grad`` with the hook's flag; without a ``main_grad`` in ``grad`` again."""
    weight = torch.nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).to(BF16))
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False, dtype=BF16) for _ in range(2)))
    model[0].weight = model[1].weight = weight
    twin = copy.deepcopy(model)
    cutegen.optimize(model, fuse_wgrad=True)
    weight.main_grad = torch.zeros(32, 32)
    model(rows()).float().sum().backward()
    twin(rows()).float().sum().backward()
    assert weight.grad is None and weight.grad_added_to_main_grad
    assert (weight.main_grad - twin[0].weight.grad.float()).norm() < 2e-2 * weight.main_grad.norm()
    del weight.main_grad
    model(rows()).float().sum().backward()
    same(weight.grad, twin[0].weight.grad)


def test_main_grad_of_fp32_layers_accumulates_under_autocast(gpu: FakeGpu) -> None:
    """Torch computed such layers, and gradients went to ``grad``; without autocast they still do."""
    model = network().float()
    twin = copy.deepcopy(model).double()
    cutegen.optimize(model, fuse_wgrad=True)
    weights, x = [model[0].weight, model[2].weight], rows().float()
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    model(x).sum().backward()
    assert not gpu.calls and all(weight.grad is not None for weight in weights)
    model.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", dtype=BF16):
            found = model(x)
        found.float().sum().backward()
    assert gpu.calls
    twin(x.double()).sum().backward()
    for weight, other in zip(weights, (twin[0].weight, twin[2].weight), strict=True):
        assert weight.grad is None and weight.grad_added_to_main_grad
        assert (weight.main_grad - 2 * other.grad).norm() < 2e-2 * weight.main_grad.norm()
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        launched = len(gpu.calls)
        same(model(x), twin(x.double()))
        assert len(gpu.calls) == launched
