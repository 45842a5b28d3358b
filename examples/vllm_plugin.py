"""A plug-in that lets vLLM's linear layers call cutegen: ``vllm serve MODEL --quantization cutegen``."""

# The package that holds this file names it among its entry points, by which each process of vLLM finds it:
#     [project.entry-points."vllm.general_plugins"]
#     cutegen = "vllm_plugin:register"

from typing import Any

import torch

import cutegen

DTYPES = [torch.bfloat16, torch.float16]
WARMED: set[Any] = set()


def warm_up(weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
    """Compile and load what a layer will call, before vLLM captures its graphs."""
    kind = weight.shape, weight.dtype, bias is None
    if kind in WARMED:
        return
    WARMED.add(kind)
    layer = torch.nn.Linear(1, 1, device="meta")
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    for m in ("vllm", "1..8192"):  # the batches it captures, and prefill
        cutegen.warmup(layer, m=m)


def register() -> None:
    """Make the method known to vLLM; again does nothing, as vLLM asks of plug-ins."""
    from vllm.model_executor.layers import linear, quantization

    if "cutegen" in quantization.QUANTIZATION_METHODS:
        return

    @linear.register_weight_loader_v2_supported_method  # weights are those of a layer that is not quantized
    class CutegenLinearMethod(linear.UnquantizedLinearMethod):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            warm_up(layer.weight, None if layer.skip_bias_add else layer.bias)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return cutegen.linear(x, layer.weight, bias)

    @quantization.register_quantization_config("cutegen")
    class CutegenConfig(quantization.QuantizationConfig):  # type: ignore[misc]
        get_name = classmethod(lambda cls: "cutegen")
        get_supported_act_dtypes = classmethod(lambda cls: DTYPES)
        get_min_capability = classmethod(lambda cls: 90)
        get_config_filenames = staticmethod(lambda: list[str]())  # no file of the model is asked
        from_config = classmethod(lambda cls, config: cls())

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            if not isinstance(layer, linear.LinearBase):
                return None
            fits = layer.params_dtype in DTYPES and layer.input_size % 512 == 0  # 16 bytes on up to 64 ranks
            return CutegenLinearMethod() if fits else linear.UnquantizedLinearMethod()
