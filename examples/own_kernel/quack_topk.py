"""QuACK's top-k of rows (``pip install quack-kernels``), as its wheel has it: two outputs, one of integers.

    python -m cutegen.tune --kernel quack_topk.py --shape 4096x1024x32

QuACK imports torch and triton, so both must be there where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, write

kernel = Kernel(
    "quack_topk",
    "QuACK's largest values of rows, and where they are",
    entry="quack.topk:TopK",
    sizes={"m": free, "n": fixed, "k": fixed},
    options={"dtype": ("fp32",)},
    arguments=(
        read("x", "dtype", ("m", "n")),
        write("values", "dtype", ("m", "k")),
        write("indices", "int32", ("m", "k")),
    ),
    construct="dtype, n, k",
    rows="m",
    examples=("4096x1024x32 fp32",),
)


@kernel.inputs
def inputs(generator: Any, m: int, n: int) -> dict[str, Any]:
    """Return rows of distinct integers, so that there is one right order."""
    import torch

    rows = torch.rand((m, n), generator=generator, device=generator.device).argsort(-1)
    return {"x": rows.float()}


@kernel.reference
def reference(x: Any, k: int) -> dict[str, Any]:
    """Return the largest values, the first of them first."""
    values, indices = x.topk(k)
    return {"values": values, "indices": indices.double()}


@kernel.tolerance
def allowed(output: str, want: Any, n: int) -> Any:
    """None of indices; the kernel keeps these in the last log2(n) bits of the values."""
    return want.new_full(want.shape, 0.25) if output == "indices" else want.abs() * (2.0 * n * 2.0**-23)


@kernel.baseline("torch")
def torch_topk(x: Any, k: int) -> dict[str, Any]:
    """Call PyTorch's own kernel."""
    values, indices = x.topk(k)
    return {"values": values, "indices": indices.int()}
