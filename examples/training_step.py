"""Train a small network: gradients of linear layers are GEMMs of cutegen too."""

import torch

import cutegen


class MLP(torch.nn.Module):
    """Two linear layers; while autograd records, the kernel keeps what gelu needs for its gradient."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, device="cuda", dtype=torch.bfloat16)
        self.down = torch.nn.Linear(hidden, width, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cutegen.linear(x, self.up.weight, self.up.bias, activation="gelu")
        return x + cutegen.linear(hidden, self.down.weight, self.down.bias)


torch.manual_seed(0)
model = MLP(256, 1024)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16)
for step in range(5):
    loss = (model(x) - x.roll(1, dims=-1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
