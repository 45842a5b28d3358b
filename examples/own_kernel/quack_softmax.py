"""QuACK's softmax (``pip install quack-kernels``), unmodified but for where it takes its launch from.

python -m cutegen.tune --kernel quack_softmax.py --shape 16384x4096

QuACK imports torch and triton, so both must be there where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, write

kernel = Kernel(
    "quack_softmax",
    "QuACK's softmax of rows",
    entry="quack_softmax_launch:TunedSoftmax",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("bf16", "fp16", "fp32")},
    arguments=(read("x", "dtype", ("m", "n")), write("out", "dtype", ("m", "n"))),
    knobs={
        "online": (True, False),
        "threads": (128, 256, 512),
        "per_row": (8, 16, 32, 64, 128, 256),
        "cluster": (1, 2, 4, 8),
    },
    default=lambda n, dtype: quack_config(n, dtype),
    construct="dtype, n, online, threads, per_row, cluster",
    rows="m",
    examples=("16384x4096 bf16", "4096x32768 bf16", "65536x128 fp16", "4096x131072 fp32"),
)


def quack_config(n: int, dtype: str) -> dict[str, int | bool]:
    """Return what QuACK 0.6.5 runs for rows of ``n``; a test compares it with QuACK's own methods."""
    limits = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128))
    longest = 16384 if dtype != "fp32" else 32768  # of the rows that one block takes
    return {
        "online": True,
        "threads": 128 if n <= 16384 else 256,
        "per_row": next((threads for limit, threads in limits if n <= limit), 256),
        "cluster": next((blocks for blocks in (1, 2, 4, 8) if n <= longest * blocks), 16),
    }


@kernel.rule
def threads_divide_into_rows(threads: int, per_row: int) -> bool:
    """A block works on threads / per_row rows, so it has at least the threads of one row."""
    return per_row <= threads


@kernel.rule
def blocks_have_parts_of_their_own(n: int, dtype: str, per_row: int, cluster: int) -> bool:
    """Each block of a cluster must own a vector of 16 bytes for each thread, or two add up the same part."""
    return cluster == 1 or per_row * cluster * (4 if dtype == "fp32" else 8) <= n


@kernel.rule
def warps_of_clusters_have_one_row(per_row: int, cluster: int) -> bool:
    """Blocks of a cluster exchange one value for each warp, so all 32 threads of a warp work on one row."""
    return cluster == 1 or per_row >= 32


@kernel.rule
def row_fits_registers(n: int, per_row: int, cluster: int) -> bool:
    """A thread holds its part of the row: beyond 128 elements in fp32 registers run out."""
    return n <= 128 * per_row * cluster


@kernel.reference
def reference(x: Any) -> Any:
    """Return the softmax in fp64."""
    return x.softmax(-1)


@kernel.tolerance
def allowed(want: Any, n: int, dtype: str) -> Any:
    """Rounding; and exponents of up to 10 in magnitude, rounded in fp32, beside a sum of n terms."""
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[dtype]
    least = 2.0**-25 if dtype == "fp16" else 2.0**-134
    return want * (unit + 2.0**-23 * (24 + n.bit_length())) + least


@kernel.baseline("torch")
def torch_softmax(x: Any) -> Any:
    """Call PyTorch's own kernel."""
    return x.softmax(-1)
