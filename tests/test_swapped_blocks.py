"""Norms and gated MLPs of models call cutegen in place, whatever their classes are called."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch.distributed as dist  # noqa: E402
from fake_family import AllFamilies  # noqa: E402
from fake_kernels import operators_ask  # noqa: E402
from torch import nn  # noqa: E402

import cutegen  # noqa: E402
from cutegen.errors import FrozenError  # noqa: E402

BF16 = torch.bfloat16
WIDTH, HIDDEN = 64, 96
F = nn.functional


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AllFamilies]:
    with operators_ask(AllFamilies(tmp_path), monkeypatch) as fake:
        assert isinstance(fake, AllFamilies)
        yield fake


class HfNorm(nn.Module):
    """As models of Hugging Face write it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Any) -> Any:
        wide = hidden_states.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)


class EpsNorm(HfNorm):
    """The same with another name for eps."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.variance_epsilon
        self.eps = 1e-5

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class OnePlus(EpsNorm):
    """Gemma's, whose weight is about zero."""

    def forward(self, x: Any) -> Any:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).type_as(x)


class EpsOutside(EpsNorm):
    """Another formula, equal where eps does not matter."""

    def forward(self, x: Any) -> Any:
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Centred(EpsNorm):
    def forward(self, x: Any) -> Any:
        return F.layer_norm(x, (x.shape[-1],), self.weight, None, self.eps)


class ChannelsFirst(EpsNorm):
    """Of images and sounds: the same as a norm of rows on matrices only."""

    def forward(self, x: Any) -> Any:
        factor = torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps)
        return x * factor * self.weight.view([1, -1] + [1] * (x.dim() - 2))


class WideResult(EpsNorm):
    """Its result is in fp32, whatever its input is."""

    def forward(self, x: Any) -> Any:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


class TrainsOtherwise(EpsNorm):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * (2 if self.training else 1)


class Silu(nn.Module):
    """An activation of somebody's own class, as transformers has them."""

    def forward(self, x: Any) -> Any:
        return F.silu(x)


class HfMlp(nn.Module):
    def __init__(self, act: Any = None, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=bias)
        self.act_fn = nn.SiLU() if act is None else act

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(HfMlp):
    """The activated factor on the right, by a function."""

    def forward(self, x: Any) -> Any:
        return self.down_proj(torch.mul(self.up_proj(x), F.gelu(self.gate_proj(x), approximate="tanh")))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class UpFirst(Packed):
    def forward(self, x: Any) -> Any:
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Scaled(HfMlp):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2


class DropsInTraining(HfMlp):
    def forward(self, x: Any) -> Any:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(hidden) if self.training else hidden)


class Branching(HfMlp):
    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.shape[0] > 1 else x


class Clamped(HfMlp):
    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-7, 7))


class Block(nn.Module):
    """A norm before a gated MLP, and what goes around them."""

    def __init__(self, norm: Any, mlp: Any) -> None:
        super().__init__()
        self.norm, self.mlp = norm, mlp

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


def block(norm: Any = HfNorm, mlp: Any = HfMlp) -> Any:
    torch.manual_seed(0)
    made = Block(norm(WIDTH), mlp())
    with torch.no_grad():
        made.norm.weight.add_(torch.randn(WIDTH) / 4)
    return made.to(BF16)


def rows(seed: int = 1) -> Any:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(BF16)


def near(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=3e-2, atol=3e-2)


def same_step(model: Any, twin: Any) -> None:
    """Results and gradients of one step are those of a twin, in norm."""
    found, want = model(rows()), twin(rows())
    near(found, want)
    found.float().square().sum().backward()
    want.float().square().sum().backward()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            grad = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
            assert (grad.double() - other.grad.double()).norm() <= 3e-2 * other.grad.double().norm()
        own.grad = other.grad = None


NORMS: list[Callable[[int], Any]] = [
    HfNorm,
    EpsNorm,
    nn.RMSNorm,
    lambda width: nn.RMSNorm(width, 1e-5),
]
MLPS: dict[str, tuple[Callable[[], Any], str]] = {
    "silu": (HfMlp, "silu"),
    "gelu": (lambda: HfMlp(nn.GELU()), "gelu"),
    "gelu tanh": (lambda: HfMlp(nn.GELU(approximate="tanh"), True), "gelu_tanh"),
    "relu": (lambda: HfMlp(nn.ReLU()), "relu"),
    "a class of its own": (lambda: HfMlp(Silu()), "silu"),
    "the other way round": (Swapped, "gelu_tanh"),
    "packed": (Packed, "silu"),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_call_a_kernel_forward_and_have_gradients(gpu: AllFamilies, norm: Any) -> None:
    model, twin = block(norm), block(norm)
    model.mlp, twin.mlp = nn.Identity(), nn.Identity()
    found = cutegen.optimize(model)
    assert found == type(found)((), ("norm",)) and isinstance(model.norm, type(twin.norm))
    same_step(model, twin)
    assert gpu.families == ["rmsnorm"] and cutegen.counters()["fallbacks"] == {}
    assert cutegen.restore(model) == 1 and type(model.norm) is type(twin.norm)
    near(model(rows()), twin(rows()))
    assert len(gpu.families) == 1


@pytest.mark.parametrize("name", MLPS)
def test_gated_mlps_call_a_kernel_between_their_layers(gpu: AllFamilies, name: str) -> None:
    make, activation = MLPS[name]
    model, twin = block(mlp=make), block(mlp=make)
    found = cutegen.optimize(model)
    assert found.gates == ("mlp",) and found.norms == ("norm",) and not found.skipped
    assert list(model.state_dict()) == list(twin.state_dict())
    same_step(model, twin)
    linears = len(found.layers)
    fused = all(layer.bias is None for layer in model.mlp.children() if isinstance(layer, nn.Linear))
    before = ["gated_gemm"] if fused else [*["gemm"] * (linears - 1), "gated"]
    assert gpu.families[: 2 + len(before)] == ["rmsnorm", *before, "gemm"]
    assert gpu.families[2 + len(before) :].count("gated_backward") == 1
    [source] = [s for s in gpu.compiled if s.signature.family == before[-1]]
    assert dict(source.signature.options)["activation"] == activation
    assert cutegen.counters()["fallbacks"] == {}
    assert cutegen.restore(model) == linears + 2 and type(model.mlp) is type(twin.mlp)


def _with_bias(model: Any) -> Any:
    model.mlp = HfMlp(bias=True).to(BF16)
    return model


def _listened_to(model: Any) -> Any:
    model.mlp.up_proj.register_forward_hook(lambda module, given, out: None)
    return model


def _not_wanted(model: Any) -> Any:
    cutegen.restore(model.mlp.gate_proj)
    return model


def _parametrised(model: Any) -> Any:
    nn.utils.parametrize.register_parametrization(model.mlp.gate_proj, "weight", nn.Identity())
    return model


@pytest.mark.parametrize("change", [_with_bias, _listened_to, _not_wanted, _parametrised])
def test_layers_that_are_more_than_a_product_are_called(gpu: AllFamilies, change: Any) -> None:
    """Then a kernel computes the gate behind them."""
    model = block()
    cutegen.optimize(model)
    change(model)
    cutegen.optimize(model, lambda module, name: name != "mlp.gate_proj" or change is not _not_wanted)
    twin = copy.deepcopy(model)
    cutegen.restore(twin)
    near(model(rows()), twin(rows()))
    assert "gated" in gpu.families and "gated_gemm" not in gpu.families


def _other_activation(model: Any) -> None:
    model.mlp.act_fn = nn.ReLU()


def _other_forward(model: Any) -> None:
    model.mlp.act_fn.forward = F.relu


@pytest.mark.parametrize("change", [_other_activation, _other_forward])
def test_an_activation_that_is_replaced_is_called(gpu: AllFamilies, change: Any) -> None:
    model, twin = block(), block()
    cutegen.optimize(model)
    change(model)
    change(twin)
    same_step(model, twin)
    assert "gated_gemm" not in gpu.families and "gated" not in gpu.families
    assert any("its activation is another one" in reason for reason in cutegen.counters()["fallbacks"])


@pytest.mark.parametrize("kind", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_see_what_they_saw(gpu: AllFamilies, kind: str) -> None:
    """As profilers set them; a layer that one kernel computes with others would be missing."""
    model, seen = block(), []
    cutegen.optimize(model)
    handle = getattr(nn.modules.module, kind)(lambda module, *_: seen.append(type(module).__name__))
    try:
        with torch.no_grad():
            model(rows())
    finally:
        handle.remove()
    assert sorted(seen) == sorted(["Block", "HfNorm", "HfMlp", "SiLU", *["Linear"] * 3])
    model(rows())
    assert "gated_gemm" in gpu.families


def test_gpus_without_such_kernels_compute_layers_and_gate_apart(
    gpu: AllFamilies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutegen.torch_ops.gated_modules.has_kernels", lambda device: False)
    model = block()
    cutegen.optimize(model)
    same_step(model, block())
    assert "gated" in gpu.families and "gated_gemm" not in gpu.families
    assert cutegen.counters()["fallbacks"] == {}


@pytest.mark.parametrize("norm", [OnePlus, EpsOutside, Centred, ChannelsFirst, WideResult, TrainsOtherwise])
def test_norms_of_other_formulas_are_left_alone(norm: Any) -> None:
    """In training too, on rows of any rank, and in the dtype of the result."""
    model = block(norm).eval()
    found = cutegen.optimize(model)
    assert not found.norms and found.skipped == {"norm": "its forward is not that of RMSNorm"}


@pytest.mark.parametrize(
    ("mlp", "reason"),
    [
        (UpFirst, "is not that of a gated MLP"),
        (Scaled, "is not that of a gated MLP"),
        (Clamped, "is not that of a gated MLP"),
        (DropsInTraining, "is not that of a gated MLP"),
        (Branching, "cannot be traced"),
        (lambda: HfMlp(nn.Tanh()), "is not that of a gated MLP"),
    ],
)
def test_other_mlps_are_left_alone(mlp: Any, reason: str) -> None:
    """Their linear layers are swapped all the same."""
    model, twin = block(mlp=mlp).eval(), block(mlp=mlp).eval()
    found = cutegen.optimize(model)
    assert not found.gates and reason in found.skipped["mlp"] and found.layers
    same_step(model, twin)


def test_what_is_tried_leaves_no_trace(gpu: AllFamilies) -> None:
    """No hook runs, no memory changes, no random number is drawn."""
    model, seen = block(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
    state = torch.get_rng_state()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with torch.device("meta"):  # where a program makes its tensors is not where norms are tried
        assert len(cutegen.optimize(model).norms) == 1
    cutegen.restore(model)
    assert not seen and torch.equal(state, torch.get_rng_state())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not gpu.calls


def test_copies_pickles_and_filters(gpu: AllFamilies) -> None:
    model = block(mlp=Packed)
    found = cutegen.optimize(model, lambda module, name: name != "norm")
    assert found.skipped == {"norm": "filter_fn said no"} and found.gates == ("mlp",)
    assert cutegen.optimize(model).norms == ("norm",)
    want = model(rows())
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(memory, weights_only=False)]
    for other in copies:
        launched = len(gpu.families)
        assert torch.equal(other(rows()), want)
        assert gpu.families[launched:] == ["rmsnorm", "gated_gemm", "gemm"]
        other.norm.weight.data.zero_()
        assert cutegen.restore(other) == 4 and type(other.mlp) is Packed
    assert torch.equal(model(rows()), want)


def test_hooks_of_layers_see_what_they_saw_and_those_of_activations_stop_the_kernel(gpu: AllFamilies) -> None:
    seen: dict[str, list[Any]] = {}
    for name, model in (("own", block()), ("torch", block())):
        seen[name] = events = []
        if name == "own":
            cutegen.optimize(model)
        for at, layer in enumerate((model.norm, model.mlp, model.mlp.gate_proj, model.mlp.down_proj)):
            layer.register_forward_hook(lambda m, given, out, at=at, e=events: e.append((at, out.shape)))
            layer.register_full_backward_hook(lambda m, gin, gout, at=at, e=events: e.append(("back", at)))
        model(rows().requires_grad_()).float().sum().backward()
        if name == "own":
            model.mlp.act_fn.register_forward_hook(lambda m, given, out: out * 0)
            launched = gpu.families.count("gated")
            model.mlp(rows())
            assert gpu.families.count("gated") == launched
            assert cutegen.counters()["fallbacks"] == {"a gated MLP: its activation has hooks": 1}
            del events[8:]
    assert seen["own"] == seen["torch"] and len(seen["own"]) == 8


UNFIT: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "fp64": (lambda m: m.double(), lambda x: x.double(), "dtype torch.float64"),
    "mixed": (lambda m: (m.norm.float(), m)[1], lambda x: x, "input and weight differ in dtype"),
    "strided": (lambda m: m, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    "empty": (lambda m: m, lambda x: x[:0], "the input is empty"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_norms_that_no_kernel_takes_are_left_to_torch_and_counted(gpu: AllFamilies, name: str) -> None:
    change, operand, reason = UNFIT[name]
    model, twin = change(block()), change(block())
    cutegen.optimize(model)
    for _ in range(2):
        near(model.norm(operand(rows())), twin.norm(operand(rows())))
    counted = {text: n for text, n in cutegen.counters()["fallbacks"].items() if reason in text}
    assert sum(counted.values()) == 2, cutegen.counters()


def test_autocast_and_other_dtypes_are_left_to_torch(gpu: AllFamilies) -> None:
    """What autocast does with norms is torch's to say; an eps that torch chooses depends on the dtype."""
    model, twin = block(nn.RMSNorm).float(), block(nn.RMSNorm).float()
    cutegen.optimize(model)
    with torch.autocast("cpu", dtype=BF16):
        found, want = model(rows().float()), twin(rows().float())
    assert found.dtype == want.dtype
    near(found, want)
    near(model.to(BF16)(rows()), twin.to(BF16)(rows()))
    reasons = " ".join(cutegen.counters()["fallbacks"])
    assert "autocast" in reasons and "its eps is torch's choice" in reasons


@pytest.mark.parametrize(
    ("norm", "name"),
    [(HfNorm, "variance_epsilon"), (EpsNorm, "eps"), (nn.RMSNorm, "eps")],
    ids=["a model's", "by another name", "torch's"],
)
def test_an_eps_that_changes_later_counts(gpu: AllFamilies, norm: Any, name: str) -> None:
    model, twin = block(norm), block(norm)
    cutegen.optimize(model)
    near(model.norm(rows()), twin.norm(rows()))
    for one in (model, twin):
        setattr(one.norm, name, 1.5)
    near(model.norm(rows()), twin.norm(rows()))
    assert list(cutegen.counters()["fallbacks"]) == [f"a norm: its {name} has changed since it was swapped"]


@pytest.mark.parametrize("norm", NORMS)
def test_a_norms_class_whose_forward_is_patched_later_computes_that(
    gpu: AllFamilies, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs patch classes of others: norms that are swapped already kept their formula."""
    model, twin = block(norm), block(norm)
    cutegen.optimize(model)
    near(model.norm(rows()), twin.norm(rows()))
    own = type(twin.norm)
    with monkeypatch.context() as patch:
        patch.setattr(own, "forward", lambda self, x: 2 * x)
        near(model.norm(rows()), 2 * rows())
        near(copy.deepcopy(model).norm(rows()), 2 * rows())
        reason = "the forward of its class is another one than when a module was swapped"
        assert cutegen.counters()["fallbacks"] == {reason: 2} and gpu.families == ["rmsnorm"]
        assert cutegen.restore(model) and type(model.norm) is own
        assert not cutegen.optimize(model).norms
        cutegen.restore(model)
    assert cutegen.optimize(model).norms == ("norm",)
    near(model.norm(rows()), twin.norm(rows()))
    assert gpu.families == ["rmsnorm"] * 2


def test_an_mlps_class_whose_forward_is_patched_later_computes_that(
    gpu: AllFamilies, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = block(), block()
    cutegen.optimize(model)
    monkeypatch.setattr(type(twin.mlp), "forward", lambda self, x: self.down_proj(self.gate_proj(x)))
    same_step(model, twin)
    assert "gated_gemm" not in gpu.families and "gated" not in gpu.families


def test_a_compiler_gets_what_it_can_fuse(gpu: AllFamilies) -> None:
    """Norms and gates stay with it, linear layers do not; counted when they are traced."""
    model, twin = block(), block()
    cutegen.optimize(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    near(run(rows()), twin(rows()))
    assert set(gpu.families) == {"gemm"}
    reasons = cutegen.counters()["fallbacks"]
    assert sum(reasons.values()) == 2 and all("under torch.compile" in reason for reason in reasons)


def test_adapters_may_come_before_or_after(gpu: AllFamilies) -> None:
    class Lora(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.in_features, self.out_features = base.in_features, base.out_features
            self.a = nn.Linear(base.in_features, 8, bias=False, dtype=BF16)
            self.b = nn.Linear(8, base.out_features, bias=False, dtype=BF16)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.b(self.a(x))

    for first in ("swapped", "adapted"):
        model, twin = block(), block()
        if first == "swapped":
            assert cutegen.optimize(model).gates
        for net in (model, twin):
            torch.manual_seed(3)
            net.mlp.gate_proj = Lora(net.mlp.gate_proj)
            net.mlp.down_proj = Lora(net.mlp.down_proj)
        if first == "adapted":
            assert cutegen.optimize(model).gates == ("mlp",)
        launched = gpu.families.count("gated")
        same_step(model, twin)
        assert gpu.families.count("gated") == launched + 1


def test_blocks_are_sharded_after_they_were_swapped(gpu: AllFamilies) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    device_mesh = pytest.importorskip("torch.distributed.device_mesh")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this torch has FSDP2 elsewhere")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        model, twin = block(), block()
        cutegen.optimize(model)
        for module in (model.norm, model.mlp, model):
            fsdp.fully_shard(module, mesh=mesh)
        same_step(model, twin)
        assert {"rmsnorm", "gated_gemm"} <= set(gpu.families) and cutegen.counters()["fallbacks"] == {}
        assert cutegen.restore(model) == 5
        launched = len(gpu.families)
        near(model(rows()), twin(rows()))
        assert len(gpu.families) == launched
        assert cutegen.optimize(model).norms == ("norm",)
        near(model(rows()), twin(rows()))
        assert "rmsnorm" in gpu.families[launched:]
        sharded = block()
        for module in (sharded.norm, sharded.mlp):
            fsdp.fully_shard(module, mesh=mesh)
        found = cutegen.optimize(sharded)
        assert not found.norms and not found.gates and "FSDP" in found.skipped["norm"]
    finally:
        dist.destroy_process_group()


def test_a_model_is_warmed_up_with_its_norms_and_gates(gpu: AllFamilies) -> None:
    """Before or after it is swapped; what was not warmed up is an error once frozen."""
    from cutegen.torch_ops.warm_sources import read_source

    model = block()
    want = {"rmsnorm 10x64 bf16", "gated 10x96 bf16 layout=split", "gated_gemm 10x96x64 bf16 layout=split"}
    for _ in range(2):
        assert want <= set(map(str, read_source(model, 10, None).problems))
        cutegen.optimize(model)
    model(rows())
    cutegen.freeze("error")
    model(rows())
    with pytest.raises(FrozenError, match="rmsnorm"):
        cutegen.rms_norm(torch.ones(10, 2 * WIDTH, dtype=BF16))


def test_recording_and_its_swaps_leave_what_was_swapped(gpu: AllFamilies) -> None:
    """What the one line records is what the optimized model calls."""
    from cutegen.torch_ops.model_run import record_run

    model = block()
    cutegen.optimize(model.mlp.gate_proj)
    recording = record_run(model, (rows(),), training=True)
    families = {problem.family for problem in recording.problems}
    assert families == {"gemm", "rmsnorm", "gated_gemm", "gated_backward"}
    assert type(model.mlp) is HfMlp and type(model.norm) is HfNorm
    assert cutegen.restore(model) == 1


@pytest.mark.parametrize("norm", [HfNorm, lambda width: nn.RMSNorm(width, 1e-5), nn.RMSNorm])
def test_models_of_fake_tensors_are_recorded_with_their_norms_and_gates(gpu: AllFamilies, norm: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_default_dtype(BF16)
    try:
        with FakeTensorMode():
            model = Block(norm(WIDTH), Packed())
            found = cutegen.optimize(model)
            with cutegen.record() as recording:
                model(torch.empty(7, WIDTH)).float().sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.norms and found.gates
    assert {p.family for p in recording.problems} == {"gemm", "rmsnorm", "gated_gemm", "gated_backward"}
    assert not gpu.calls
