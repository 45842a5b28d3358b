"""QuACK's RMSNorm (``pip install quack-kernels``), as its wheel has it.

python -m cutegen.tune --kernel quack_rmsnorm.py --shape 16384x4096

QuACK imports torch and triton, so both must be there where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.kernel import Kernel, fixed, free, read, scalar, write

kernel = Kernel(
    "quack_rmsnorm",
    "QuACK's RMSNorm of rows",
    entry="quack.rmsnorm:RMSNorm",
    sizes={"m": free, "n": fixed},
    options={"dtype": ("bf16", "fp16", "fp32"), "rstd": False},
    arguments=(
        read("x", "dtype", ("m", "n")),
        read("weight", "dtype", ("n",)),
        write("out", "dtype", ("m", "n")),
        write("rstd_out", "fp32", ("m",), when="rstd"),
        scalar("eps", "fp32", (1e-6, 0.25)),
    ),
    knobs={
        "threads": (128, 256, 512),
        "per_row": (8, 16, 32, 64, 128, 256),
        "cluster": (1, 2, 4, 8),
        "reload": ("none", "smem", "gmem"),
        "late_weight": (False, True),
    },
    default=lambda n, dtype: quack_config(n, dtype),
    construct="dtype, n, config=module.RmsNormFwdConfig("
    "threads, per_row, cluster, None if reload == 'none' else reload, late_weight)",
    call="x, weight, None, None, out, None, rstd_out, None, eps, stream",
    rows="m",
    examples=("16384x4096 bf16", "512x32768 bf16", "65536x128 fp16", "4096x131072 fp32"),
)


def quack_config(n: int, dtype: str) -> dict[str, int | str | bool]:
    """Return what QuACK 0.6.5 runs for rows of ``n``; a test compares it with QuACK's own function."""
    limits = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128))
    longest = 16384 if dtype != "fp32" else 32768  # of the rows that one block takes
    return {
        "threads": 128 if n <= 16384 else 256,
        "per_row": next((threads for limit, threads in limits if n <= limit), 256),
        "cluster": next((blocks for blocks in (1, 2, 4, 8) if n <= longest * blocks), 16),
        "reload": "none" if n <= 8192 else "smem",
        "late_weight": False,
    }


@kernel.rule
def threads_divide_into_rows(threads: int, per_row: int) -> bool:
    """A block works on threads / per_row rows, so it has at least the threads of one row."""
    return per_row <= threads


@kernel.rule
def blocks_have_parts_of_their_own(n: int, dtype: str, per_row: int, cluster: int) -> bool:
    """Each block of a cluster must own a vector of 16 bytes for each thread; QuACK uses fewer blocks else."""
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
def reference(x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Return the norm in fp64."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return {"out": x * rstd[:, None] * weight, "rstd_out": rstd}


@kernel.baseline("torch")
def torch_rms_norm(x: Any, weight: Any, eps: float) -> dict[str, Any]:
    """Call PyTorch's fused kernel."""
    import torch

    return {"out": torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)}
