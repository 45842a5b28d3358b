"""NVIDIA's persistent Hopper GEMM, an example of CUTLASS, as it is; tools/fetch_foreign.py gets the file.

python tools/fetch_foreign.py foreign && export PYTHONPATH=foreign
python -m cutegen.tune --kernel nvidia_gemm.py --shape 4096x4096x4096

It needs neither torch nor a GPU where it is compiled.
"""

from __future__ import annotations

from typing import Any

from cutegen.arch import Arch, resident_clusters
from cutegen.kernel import Kernel, free, read, write

_TILES = [(64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256)]
_CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
_MATRIX = "cute.make_tensor({0}.iterator, cute.append({0}.layout, cute.make_layout(1, stride=0)))"

kernel = Kernel(
    "nvidia_gemm",
    "NVIDIA's persistent Hopper GEMM, c = a b^T",
    entry="cute.hopper.kernel.dense_gemm.dense_gemm_persistent:HopperWgmmaGemmPersistentKernel",
    sizes={"m": free, "n": free, "k": free},
    options={"dtype": ("fp16", "bf16")},
    arguments=(
        read("a", "dtype", ("m", "k")),
        read("b", "dtype", ("n", "k")),
        write("c", "dtype", ("m", "n")),
    ),
    knobs={
        "tile_m, tile_n": _TILES,
        "cluster_m, cluster_n": _CLUSTERS,
        "swizzle": (1, 2, 4, 8),
        "along_m": (True, False),
    },
    # The defaults of the example's command line.
    default={"tile_m": 128, "tile_n": 128, "cluster_m": 1, "cluster_n": 1, "swizzle": 1, "along_m": True},
    construct="cutlass.Float32, (tile_m, tile_n), (cluster_m, cluster_n), swizzle, along_m",
    call=f"{_MATRIX.format('a')}, {_MATRIX.format('b')}, {_MATRIX.format('c')}, max_active_clusters, stream",
    tails=({"m": 333, "n": 520, "k": 1032}, {"m": 1100, "n": 2100, "k": 136}),
    examples=("4096x4096x4096 fp16", "512x2112x7168 bf16"),
)


@kernel.derive
def max_active_clusters(cluster_m: int, cluster_n: int, arch: Arch) -> int:
    """Return how many clusters run at once, which the example asks the driver for and compiles in."""
    return resident_clusters(arch.nominal_sm_count, cluster_m * cluster_n)


@kernel.rule
def order_matters(m: int, n: int, tile_m: int, tile_n: int, swizzle: int) -> bool:
    """Swizzled rasterization needs more tiles than the swizzle groups, along both sides."""
    return swizzle == 1 or (m > tile_m * swizzle and n > tile_n * swizzle)


@kernel.reference
def reference(a: Any, b: Any) -> Any:
    """Return the product in fp64."""
    return a @ b.T


@kernel.tolerance
def allowed(want: Any, k: int, dtype: str) -> Any:
    """Rounding, and sums of k products of normal values: additions err by 2**-23 of sums near sqrt(k)."""
    unit, least = {"bf16": (2.0**-8, 2.0**-134), "fp16": (2.0**-11, 2.0**-25)}[dtype]
    return want.abs() * unit + least + 2.0**-23 * max(4.0, k**0.5) * k


@kernel.flops
def flops(m: int, n: int, k: int) -> int:
    """Return multiplications and additions."""
    return 2 * m * n * k


@kernel.baseline("torch.mm")
def torch_mm(a: Any, b: Any) -> Any:
    """Call cuBLAS."""
    return a @ b.T
