"""A decoder of block-scaled operands that shares nothing with the package's: tables, one place at a time."""

from __future__ import annotations

import math
from typing import Any

import torch

from cutegen.families.gemm.inputs import Workload
from cutegen.families.gemm.problem import Problem

__all__ = [
    "BLOCKS",
    "E2M1",
    "TABLES",
    "decoded",
    "element",
    "factor",
    "filled",
    "place",
    "places",
    "problem_of",
    "product",
]

#: Elements that share a scale factor, the table of the elements and that of the factors.
BLOCKS = {
    "mxfp8_e4m3": (32, "e4m3", "e8m0"),
    "mxfp8_e5m2": (32, "e5m2", "e8m0"),
    "nvfp4": (16, "e2m1", "ue4m3"),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _small_float(byte: int, fraction_bits: int, bias: int) -> float:
    """A number of 8 bits with a sign, by the book; codes beyond the largest number are not told apart."""
    exponent, fraction = (byte & 0x7F) >> fraction_bits, byte & ((1 << fraction_bits) - 1)
    value = fraction / (1 << fraction_bits)
    value = math.ldexp(value, 1 - bias) if exponent == 0 else math.ldexp(1 + value, exponent - bias)
    return -value if byte >> 7 else value


TABLES = {
    "e2m1": E2M1,
    "e4m3": tuple(_small_float(byte, 3, 7) for byte in range(256)),
    "e5m2": tuple(_small_float(byte, 2, 15) for byte in range(256)),
    "ue4m3": tuple(_small_float(byte & 0x7F, 3, 7) for byte in range(256)),
    "e8m0": tuple(2.0 ** (byte - 127) for byte in range(256)),
}


def place(row: Any, block: Any, blocks: int) -> Any:
    """Where the scale factor of a row and a block lies, in bytes; for integers and for tensors of them."""
    tile = row // 128 * ((blocks + 3) // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def places(rows: int, blocks: int) -> torch.Tensor:
    """All of them, ``(rows, blocks)``."""
    return place(torch.arange(rows)[:, None], torch.arange(blocks)[None, :], blocks)


def element(stored: torch.Tensor, row: int, at: int, dtype: str) -> float:
    """One element of a matrix ``(rows, k)`` as it is stored."""
    table = TABLES[BLOCKS[dtype][1]]
    if dtype != "nvfp4":
        return table[int(stored.view(torch.uint8)[row, at])]
    byte = int(stored[row, at // 2])
    return table[byte >> 4 if at % 2 else byte & 15]


def factor(memory: torch.Tensor, row: int, at: int, k: int, dtype: str) -> float:
    """The scale factor of one element."""
    block, _, scale = BLOCKS[dtype]
    return TABLES[scale][int(memory.view(torch.uint8)[place(row, at // block, k // block)])]


def decoded(stored: torch.Tensor, memory: torch.Tensor, dtype: str) -> torch.Tensor:
    """What an operand ``(rows, k)``, or a batch of them, stands for, in fp64."""
    if stored.dim() == 3:
        parts = zip(stored, memory.view(len(stored), -1), strict=True)
        return torch.stack([decoded(part, scales, dtype) for part, scales in parts])
    block, kind, scale = BLOCKS[dtype]
    codes = stored.contiguous().view(torch.uint8).long()
    if dtype == "nvfp4":
        codes = torch.stack((codes % 16, codes // 16), dim=-1).flatten(1)
    rows, k = codes.shape
    factors = memory.view(torch.uint8).long()[places(rows, k // block)]
    numbers = torch.tensor(TABLES[kind], dtype=torch.float64)[codes]
    return numbers * torch.tensor(TABLES[scale], dtype=torch.float64)[factors].repeat_interleave(block, 1)


def product(a: torch.Tensor, b: torch.Tensor, scales: Any, dtype: str) -> torch.Tensor:
    """The product of operands as kernels take them, in fp64."""
    left = decoded(a, scales[0], dtype)
    return left @ decoded(b.transpose(-1, -2), scales[1], dtype).transpose(-1, -2)


def problem_of(words: str) -> Problem:
    return Problem.parse(f"gemm_blockscaled {words}")


def filled(problem: Problem, *, padded: bool = False) -> Workload:
    """The same operands every time."""
    return Workload.fill(problem, torch.Generator().manual_seed(3), padded=padded)
