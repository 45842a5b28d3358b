"""examples/vllm_plugin.py against the interface that vLLM documents: plug-ins, configs and linear methods."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_kernels import FakeGpu, operators_ask  # noqa: E402
from run_example import ROOT  # noqa: E402
from test_warming import Compiler  # noqa: E402

import cutegen  # noqa: E402
from cutegen.runtime import warming  # noqa: E402
from cutegen.torch_ops import warmup as warmup_module  # noqa: E402

BF16 = torch.bfloat16


class QuantizationConfig(abc.ABC):
    """vLLM's base class: what a config must have."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abc.abstractmethod
    def get_name(self) -> str: ...
    @abc.abstractmethod
    def get_supported_act_dtypes(self) -> list[Any]: ...
    @classmethod
    @abc.abstractmethod
    def get_min_capability(cls) -> int: ...
    @staticmethod
    @abc.abstractmethod
    def get_config_filenames() -> list[str]: ...
    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig: ...
    @abc.abstractmethod
    def get_quant_method(self, layer: Any, prefix: str) -> Any: ...


class UnquantizedLinearMethod:
    """vLLM's method for weights as they are."""

    def create_weights(self, layer: Any, k: int, parts: list[int], dtype: Any) -> None:
        weight = torch.empty(sum(parts), k, dtype=dtype)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.processed = True

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, layer.weight, bias)


class LinearBase(torch.nn.Module):
    """vLLM's linear layer, as far as methods see it."""

    def __init__(self, k: int, parts: list[int], config: Any, dtype: Any = BF16, bias: bool = False) -> None:
        super().__init__()
        self.input_size, self.params_dtype, self.skip_bias_add = k, dtype, False
        self.quant_method = config.get_quant_method(self, prefix="model.layers.0.mlp.gate_up_proj")
        if self.quant_method is None:
            raise ValueError("All linear layers should support quant method.")
        self.quant_method.create_weights(self, k, parts, dtype)
        self.bias = torch.nn.Parameter(torch.zeros(sum(parts), dtype=dtype)) if bias else None

    def forward(self, x: Any) -> Any:
        return self.quant_method.apply(self, x, self.bias)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules under vLLM's names; what was registered is in ``configs`` and ``supported``."""
    linear, quantization = ModuleType("linear"), ModuleType("quantization")
    names: dict[str, Any] = {"QUANTIZATION_METHODS": ["fp8"], "QuantizationConfig": QuantizationConfig}
    configs: dict[str, Any] = {}
    supported: list[str] = []

    def register(name: str) -> Any:
        def wrapped(config: Any) -> Any:
            assert name not in quantization.QUANTIZATION_METHODS and issubclass(config, QuantizationConfig)
            quantization.QUANTIZATION_METHODS.append(name)
            configs[name] = config
            return config

        return wrapped

    def support(method: Any) -> Any:
        supported.append(method.__name__)
        return method

    vars(quantization).update(names, register_quantization_config=register, configs=configs)
    vars(linear).update(LinearBase=LinearBase, UnquantizedLinearMethod=UnquantizedLinearMethod)
    vars(linear).update(register_weight_loader_v2_supported_method=support, supported=supported)
    layers = ModuleType("layers")
    vars(layers).update(linear=linear, quantization=quantization)
    for name, module in (("linear", linear), ("quantization", quantization)):
        monkeypatch.setitem(sys.modules, f"vllm.model_executor.layers.{name}", module)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor", ModuleType("model_executor"))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers", layers)
    return layers


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with operators_ask(FakeGpu(tmp_path), monkeypatch) as fake:
        monkeypatch.setattr(warming, "Builder", Compiler(fake))
        monkeypatch.setattr(warmup_module, "new_workspace", lambda device, n, zeroed=False: torch.zeros(n))
        yield fake


def config_of(vllm: Any) -> Any:
    import vllm_plugin

    vllm_plugin.WARMED.clear()
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may load a plug-in more than once
    config = vllm.quantization.configs["cutegen"].from_config({})
    assert (config.get_name(), config.get_min_capability(), config.get_config_filenames()) == (
        "cutegen",
        90,
        [],
    )
    assert vllm.linear.supported == ["CutegenLinearMethod"]
    return config


@pytest.mark.parametrize("bias", [False, True])
def test_layers_are_warmed_up_and_call_kernels(vllm: Any, gpu: FakeGpu, bias: bool) -> None:
    """Loaded as vLLM does; then frozen, eager and compiled: no kernel is missed, results are torch's."""
    config = config_of(vllm)
    assert config.get_supported_act_dtypes() == [BF16, torch.float16]
    layer = LinearBase(512, [64, 32], config, bias=bias)
    generator = torch.Generator().manual_seed(0)
    layer.weight.data.copy_(torch.randn(96, 512, generator=generator) / 16)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.processed and gpu.calls
    cutegen.freeze("error")
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 8, 256, 8192):
        x = torch.randn(m, 512, generator=generator).to(BF16)
        want = torch.nn.functional.linear(x.double(), layer.weight.double())
        for call in (layer, run):
            launched = len(gpu.calls)
            assert (call(x).double() - want).norm() < 1e-2 * want.norm()
            assert len(gpu.calls) == launched + 1
    assert cutegen.counters()["late_compiles"] == 0


def test_what_no_kernel_takes_stays_with_vllm(vllm: Any, gpu: FakeGpu) -> None:
    """Other dtypes and rows; embeddings and other modules get the method that vLLM has for them."""
    config = config_of(vllm)
    for layer in (LinearBase(512, [64], config, torch.float32), LinearBase(100, [64], config)):
        assert type(layer.quant_method) is UnquantizedLinearMethod
    assert config.get_quant_method(torch.nn.Embedding(8, 8), "model.embed_tokens") is None
