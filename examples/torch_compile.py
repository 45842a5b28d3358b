"""Use the operators under ``torch.compile``: they stay whole in the graph, with no graph breaks."""

import torch

import cutegen


@torch.compile(fullgraph=True)
def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """A residual block whose elementwise parts the compiler fuses around the two products."""
    hidden = cutegen.linear(x, w1, activation="silu")
    return x + cutegen.linear(hidden, w2)


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)


print(block(matrix(512, 1024), matrix(4096, 1024), matrix(1024, 4096)).shape)
