"""Ask the Operator API's manifest for its operators for one kind of GEMM (GPU libraries: torch, the DSL).

Runs in a process of its own, which sees no GPU; the last line that it prints is one JSON document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from cutegen.dtypes import TORCH_DTYPES

__all__ = ["Kind", "listed", "main"]

#: dtype of A and B, dtype of D, the axes that A (m or k) and B (k or n) are contiguous along, rank.
Kind = tuple[str, str, str, str, int]

#: Operators take any sizes; these are multiples of every alignment that one may require.
_M, _N, _K = 256, 512, 1024
_SCHEDULERS = {
    "StaticPersistentTileSchedulerMetadata": "static",
    "CLCDynamicPersistentTileSchedulerMetadata": "clc",
}


def main(arguments: Sequence[str]) -> int:
    """Print what :func:`listed` returns, as the last line; ``arguments`` are its two, the kind as JSON."""
    target, kind = arguments
    sys.stdout.write("\n" + json.dumps(listed(target, tuple(json.loads(kind)))) + "\n")
    return 0


def listed(target: str, kind: Kind) -> dict[str, Any]:
    """Return ``designs``, the design of each offered operator, and ``refused``, with the API's reasons.

    Args:
        target: Compute capability with suffix, such as ``90a``.
        kind: What is to be computed.
    """
    import cutlass.operators as api

    arguments = _arguments(kind)
    seen: list[Any] = []

    def look_at(metadata: Any) -> bool:
        seen.append(metadata)
        return True

    operators = api.get_operators(arguments, metadata_filter=look_at, target_sm=target)
    offered = {id(operator.metadata) for operator in operators}
    refused = [
        {"operator": metadata.operator_class.__name__, "reason": _reason(metadata, arguments, target)}
        for metadata in seen
        if id(metadata) not in offered
    ]
    return {"designs": [_design(operator.metadata) for operator in operators], "refused": refused}


def _arguments(kind: Kind) -> Any:
    import cutlass.operators as api
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    ab, out, a_axis, b_axis, rank = kind

    def matrix(rows: int, columns: int, by_column: bool, dtype: str) -> Any:
        shape = (columns, rows) if by_column else (rows, columns)
        made = torch.empty((2,) * (rank - 2) + shape, dtype=getattr(torch, TORCH_DTYPES[dtype]))
        return made.transpose(-1, -2) if by_column else made

    with FakeTensorMode():
        a, b = matrix(_M, _K, a_axis == "m", ab), matrix(_K, _N, b_axis == "k", ab)
        accumulator = torch.int32 if ab == "int8" else torch.float32
        return api.GemmArguments(a, b, matrix(_M, _N, False, out), accumulator_type=accumulator)


def _reason(metadata: Any, arguments: Any, target: str) -> str:
    """Return why an operator that was generated is not offered, as its ``supports`` puts it."""
    status = metadata.supports(arguments, target_sm=target)
    if status:
        # The metadata is accepted, so the operator itself gives the reason.
        status = metadata.operator_class(metadata).supports(arguments, target_sm=target)
    return str(status.error) if status.error else "the manifest leaves it out"


def _design(metadata: Any) -> dict[str, Any]:
    """Return the fields of an operator's design that are plain values, and its scheduler's short name."""
    design = metadata.design
    found: dict[str, Any] = {"operator": metadata.operator_class.__name__}
    for name, value in vars(design).items():
        if name == "tile_scheduler" and value is not None:
            found[name] = _SCHEDULERS.get(type(value).__name__, type(value).__name__)
        elif isinstance(value, (bool, int, str)):
            found[name] = value
        elif isinstance(value, (tuple, list)):
            found[name] = [*value]
    return found
