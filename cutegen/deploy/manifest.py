"""What the manifest of a deployment may say; part of the loader, so it stands on nothing of ours."""

from __future__ import annotations

import json
from typing import Any

__all__ = [
    "CPP_LIBRARY",
    "FAMILY_CALLS",
    "FIELDS",
    "KERNELS",
    "LOADER",
    "MANIFEST",
    "NAMESPACE",
    "OPERATOR",
    "OUTSIDE",
    "RANGE_LOOKUP",
    "TABLE",
    "TRACED",
    "is_pinned_name",
    "is_record",
    "is_symbol",
    "parse_manifest",
]

LOADER = "pinned.py"
#: The files of the folder, besides the loader; those of kernels are below the last.
MANIFEST, TABLE, KERNELS = "manifest.json", "table.json", "kernels"
#: Parts of the loader of a folder of which some kernels are no GEMMs, some serve ranges, or some are GEMMs.
FAMILY_CALLS, RANGE_LOOKUP, TRACED = "family_calls.py", "range_lookup.py", "traced.py"
#: What a kernel is pinned for, in the order of a manifest's ``key``.
FIELDS = (
    *("m", "n", "k", "batch", "ab_dtype", "out_dtype", "layout", "unaligned_out"),
    *("alpha", "beta", "bias", "activation", "scale", "promote", "any_order"),
)

#: What answers calls that are not pinned: nobody, or torch where the call is a plain GEMM.
OUTSIDE = ("none", "torch")

#: The library of C++ operators, and the operator that it and the loader register with torch.
CPP_LIBRARY, NAMESPACE = "libcutegen_ops.so", "cutegen_pinned"
OPERATOR = (
    "gemm(Tensor a, Tensor b, Tensor? c=None, Tensor? bias=None, Tensor? scale_a=None, "
    'Tensor? scale_b=None, *, float alpha=1.0, float beta=1.0, str activation="", '
    "ScalarType? out_dtype=None, bool fast_accum=False, bool any_order=False) -> Tensor"
)

_GPU_FIELDS = ("gpu_name", "compute_capability", "sm_count")


def is_symbol(text: object) -> bool:
    """Return whether ``text`` is a C identifier, which can be no path."""
    return isinstance(text, str) and text.isascii() and text.isidentifier()


def is_pinned_name(name: str) -> bool:
    """Return whether a manifest may list a file of this name: nothing outside the folder has one."""
    if name in (TABLE, FAMILY_CALLS, RANGE_LOOKUP, TRACED, CPP_LIBRARY):
        return True
    folder, _, file = name.partition("/")
    stem, _, ending = file.rpartition(".")
    return folder == KERNELS and ending in ("so", "py") and is_symbol(stem)


def parse_manifest(text: bytes) -> dict[str, Any]:
    """Return what a manifest says.

    Raises:
        KeyError: Something is missing; further errors of a malformed text are ValueError, TypeError and
            RecursionError.
    """
    manifest = json.loads(text)
    wanted = {
        "files": dict,
        "gpu": dict,
        "cpu_flags": list,
        "kernels": list,
        "ranges": list,
        "families": dict,
    }
    for name, kind in wanted.items():
        if not isinstance(manifest[name], kind):
            raise TypeError(f"{name} is no {kind.__name__}")
    if not {*map(type, manifest["cpu_flags"])} <= {str}:
        raise TypeError("cpu_flags holds something that is no name")
    if set(manifest["gpu"]) != set(_GPU_FIELDS):
        raise ValueError(f"gpu must have {', '.join(_GPU_FIELDS)}")
    found: dict[str, Any] = manifest
    return found


def is_record(record: dict[str, Any]) -> bool:
    """Return whether what a kernel is launched with is of the right kind and range."""
    symbol, scalars, size = (record.get(name) for name in ("symbol", "scalars", "workspace_bytes"))
    if symbol == "":
        return True
    return (
        is_symbol(symbol)
        and record.get("library") == f"{KERNELS}/{symbol}.so"
        and record.get("source") == f"{KERNELS}/{symbol}.py"
        and isinstance(scalars, list)
        and {*map(type, scalars)} <= {int}
        and min(scalars, default=0) >= -(2**63)
        and max(scalars, default=0) < 2**63
        and type(size) is int
        and 0 <= size < 2**63
        and isinstance(record.get("zeroed"), bool)
    )
