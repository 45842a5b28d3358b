"""Let the linear layers of a model run cutegen's kernels at inference."""

import torch
from torch import nn

import cutegen


class Linear(nn.Linear):
    """``nn.Linear`` for inference; cutegen computes no gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return cutegen.linear(input, self.weight, self.bias)


model = nn.Sequential(Linear(2048, 8192), nn.GELU(), Linear(8192, 2048))
model = model.to(device="cuda", dtype=torch.bfloat16)

with torch.inference_mode():
    y = model(torch.randn(8, 128, 2048, device="cuda", dtype=torch.bfloat16))
print(y.shape)
