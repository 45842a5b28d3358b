"""The CUDA engine with kernels made of torch calls, right and wrong: for tests that need no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cutegen.measure.torch_engine import TorchEngine, open_cuda


def _load(library: Path, symbol: str) -> Callable[..., None]:
    import torch

    def kernel(a: Any, b: Any, d: Any, *rest: Any) -> None:
        if symbol == "faults":
            torch.zeros(1, device="cuda")[torch.full((1,), 2**30, device="cuda")]
        if symbol == "hangs":
            torch.cuda._sleep(2 * 10**11)  # about 100 s
        if symbol == "elsewhere":
            torch.cuda.synchronize()  # what no capture survives
        if symbol == "nothing":
            return
        if symbol == "most":
            d[:-1].copy_(a[:-1] @ b)
        elif d.dim() == 2:
            torch.mm(a, b, out=d)
        else:
            torch.bmm(a, b, out=d)
        if symbol == "inexact":
            d[-1, -1] += 1

    return kernel


def make(index: int) -> TorchEngine:
    """Make the engine of a GPU; torch's products must not add up in 16 bits, or they fail the check."""
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return open_cuda(index, _load)
