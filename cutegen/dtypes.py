"""Element types by the short names that are used everywhere in cutegen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPE_BYTES",
    "INTEGER_RANGES",
    "SHORT_NAMES",
    "TMA_ALIGN_BYTES",
    "TORCH_DTYPES",
    "short_dtype",
    "torch_dtype",
]

#: Bytes of one element.
DTYPE_BYTES = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "tf32": 4,
    "fp64": 8,
    "e4m3": 1,
    "e5m2": 1,
    "e8m0": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "int32": 4,
    "int64": 8,
}
#: torch's name of each dtype. tf32 has none: fp32 tensors must not silently lose precision.
TORCH_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "int32": "int32",
    "int64": "int64",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e8m0": "float8_e8m0fnu",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "bool",
}
#: Short names by what ``str`` gives for torch's dtypes.
SHORT_NAMES = {f"torch.{name}": short for short, name in TORCH_DTYPES.items()}
#: The least and the largest value of each integer type.
INTEGER_RANGES = {
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
#: TMA moves rows whose start and pitch are multiples of 16 bytes (PTX ISA, tensor maps).
TMA_ALIGN_BYTES = 16


def short_dtype(name: str) -> str:
    """Return the short name of a dtype that is written as torch names it; any other text as it is.

    ``bfloat16``, ``torch.bfloat16`` and ``half`` are accepted beside ``bf16`` and ``fp16``.
    """
    if name in DTYPE_BYTES:
        return name
    name = name.removeprefix("torch.")
    return {"half": "fp16", "float": "fp32"}.get(name) or SHORT_NAMES.get(f"torch.{name}", name)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a short name; tf32 values are stored as fp32."""
    import torch

    dtype: torch.dtype = getattr(torch, "float32" if name == "tf32" else TORCH_DTYPES[name])
    return dtype
