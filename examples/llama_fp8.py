"""Run a Llama-shaped model in fp8: weights are quantized once, activations in every call."""

import torch
from llama import Llama
from torch import Tensor, nn

import cutegen

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in fp8, and the fp32 factor that gives x back."""
    scale = x.abs().amax().float().clamp(min=1e-12) / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8), scale.reshape(1)


class Fp8Linear(nn.Module):
    """A linear layer without a bias; sums are in fp32, results in bf16."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantized(layer.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = quantized(x.flatten(0, -2))
        y = cutegen.scaled_gemm(rows, self.get_buffer("weight").t(), scale, self.get_buffer("scale"))
        return y.reshape(*x.shape[:-1], -1)


torch.manual_seed(0)
with torch.device("cuda"), torch.no_grad():
    model = Llama("1B", layers=4).to(torch.bfloat16)
    tokens, places = torch.randint(0, 1024, (2, 256)), torch.arange(256)
    want = model(tokens, places, head=False)
    for block in model.blocks:
        for module in (block, block.get_submodule("mlp")):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(module, name, Fp8Linear(layer))
    found = model(tokens, places, head=False)
print(f"difference to bf16: {((found - want).norm() / want.norm()).item():.3f}")
