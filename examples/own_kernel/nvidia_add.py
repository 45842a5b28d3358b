"""NVIDIA's elementwise addition, an example of CUTLASS: a function that knows no stream.

python tools/fetch_foreign.py foreign && export PYTHONPATH=foreign
python -m cutegen.tune --kernel nvidia_add.py --shape 8192x8192

What it launches gets cutegen's stream all the same.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, free, read, write

kernel = Kernel(
    "nvidia_add",
    "NVIDIA's elementwise addition",
    entry="cute.ampere.kernel.elementwise.elementwise_add:elementwise_add",
    sizes={"m": free, "n": free},
    options={"dtype": ("fp32", "bf16", "fp16")},
    arguments=(
        read("a", "dtype", ("m", "n")),
        read("b", "dtype", ("m", "n")),
        write("c", "dtype", ("m", "n"), may_alias=("a", "b")),
    ),
    knobs={"copy_bits": (128, 64, 32, 256)},
    takes_stream=False,
    rows="m",
    examples=("8192x8192 fp32",),
)


@kernel.reference
def reference(a: Any, b: Any) -> Any:
    """Return the sum in fp64."""
    return a + b


@kernel.baseline("torch")
def torch_add(a: Any, b: Any) -> Any:
    """Call PyTorch's own kernel."""
    return a + b
