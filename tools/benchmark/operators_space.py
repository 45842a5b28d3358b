"""Print which operators NVIDIA's CUTLASS Operator API offers for each kind of product, as JSON.

Run by tools/benchmark/operators.py in a process of its own: it imports torch and needs the GPU, because the
API asks the driver how many clusters of each shape run at a time.

    python tools/benchmark/operators_space.py --target 90a --kind bf16,bf16,k,k --kind fp16,fp16,m,n
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

#: The operator class that is Hopper's own; the API also lists those for Ampere.
HOPPER = "Sm90StaticPersistentGemmOperator"
#: Extents do not matter: operators are compiled for symbolic ones.
M, N, K = 256, 512, 1024


def main() -> int:
    """Print one JSON document: ``clusters`` by size, ``kinds`` by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="compute capability with suffix, such as 90a")
    parser.add_argument("--kind", action="append", required=True, metavar="AB,OUT,A_AXIS,B_AXIS")
    parser.add_argument("--no-gpu", action="store_true", help="leave the numbers of clusters out")
    options = parser.parse_args()
    kinds = {kind: points(options.target, *kind.split(",")) for kind in options.kind}
    sizes = {m * n for found in kinds.values() for _, (m, n) in found}
    clusters = {} if options.no_gpu else {size: active_clusters(size) for size in sorted(sizes)}
    json.dump({"clusters": clusters, "kinds": kinds}, sys.stdout)
    return 0


def points(target: str, ab: str, out: str, a_axis: str, b_axis: str) -> list[tuple[list[int], list[int]]]:
    """Return tile and cluster shapes (M, N) of the operators for one kind of product.

    Args:
        target: Compute capability with suffix.
        ab: dtype of A and B.
        out: dtype of D.
        a_axis: The axis, m or k, that A is contiguous along.
        b_axis: The axis, k or n, that B is contiguous along.
    """
    import cutlass.operators as api
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    with FakeTensorMode():
        a = matrix(M, K, a_axis == "m", types[ab])
        b = matrix(K, N, b_axis == "k", types[ab])
        d = torch.empty((M, N), dtype=types[out])
        arguments = api.GemmArguments(a, b, d, accumulator_type=torch.float32)
        found = api.get_operators(arguments, target_sm=target)
    designs = [op.metadata.design for op in found if type(op).__name__ == HOPPER]
    return [(list(design.tile_shape[:2]), list(design.cluster_shape[:2])) for design in designs]


def matrix(rows: int, columns: int, by_column: bool, dtype: Any) -> Any:
    """Return a matrix that is contiguous along its columns' or its rows' index."""
    import torch

    if by_column:
        return torch.empty((columns, rows), dtype=dtype).t()
    return torch.empty((rows, columns), dtype=dtype)


def active_clusters(size: int) -> int:
    """Return how many clusters of ``size`` blocks the GPU runs at a time, as the API asks for it."""
    import torch
    from cutlass.operators.providers.cutedsl.integration_utils.mma import get_max_active_clusters

    torch.zeros(1, device="cuda")  # the question needs a current context
    return int(get_max_active_clusters((size, 1)))


if __name__ == "__main__":
    sys.exit(main())
