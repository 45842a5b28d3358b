"""Operands whose elements share scale factors along k: where both lie in memory, and which numbers they are.

Tensors may live on any torch device. Nothing here looks up a table in memory or waits for the device, so all
of it can be captured into a graph.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutegen.families.gemm.problem import SCALE_BLOCKS, SCALE_ROWS, BlockScaling

if TYPE_CHECKING:
    import torch

__all__ = [
    "decode",
    "draw",
    "draw_scales",
    "e2m1_values",
    "lay_out",
    "pack",
    "padding",
    "read_back",
    "scale_values",
    "unpack",
]

#: A tile of scale factors has 4 of these side by side: row r is in quarter r // 32. Source: cuBLAS
#: documentation, 1D block scaling factors layout.
_QUARTER = 32
_QUARTERS = SCALE_ROWS // _QUARTER
_E8M0_BIAS = 127
"""Source: OCP Microscaling formats 1.0, e8m0: 2**(x - 127), and 255 is NaN."""
_E8M0_NAN = 255
#: Exponents of drawn e8m0 scale factors: five powers of two around 1.
_LEAST_POWER, _POWERS = -2, 5
#: Bytes of drawn e4m3 scale factors: every fraction with exponents -4 to -2, so 0.0625 to 0.46875.
_LEAST_E4M3, _E4M3_BYTES = 0x18, 24
#: What pads scale factors where a kernel may read but not use them: 2**60, and 448, the largest e4m3. The
#: product of two of them is finite in fp32, so operands of zero make it vanish, as they must.
_POISON = {"e8m0": _E8M0_BIAS + 60, "e4m3": 0x7E}
_CHUNK = 2**24  # elements decoded at a time, so that temporaries stay near 128 MB


def padding(scale: str, *, poisoned: bool) -> int:
    """Return the byte that fills tiles of scale factors beyond the rows and blocks of an operand.

    Our kernels allow whatever is not NaN there: beyond k the operands are zero, as TMA fills them, and zero
    times a finite factor is zero; beyond the last row everything falls outside of D. cuBLAS wants zeros, or
    is wrong without a word. Source: its maintainers' review of NVIDIA/TransformerEngine pull request 1912.

    Args:
        scale: Type of a scale factor.
        poisoned: A large finite number in place of zero, which ruins a result that it gets into.
    """
    return _POISON[scale] if poisoned else 0


def draw(size: tuple[int, ...], scaling: BlockScaling, generator: torch.Generator) -> torch.Tensor:
    """Return random elements of shape ``size``, k last: uniform in [-1, 1), or all codes alike if packed.

    Packed ones are bytes, half as many along k.
    """
    import torch

    device = generator.device
    if scaling.bits == 8:
        dtype = torch.float8_e4m3fn if scaling.element == "e4m3" else torch.float8_e5m2
        wide = torch.empty(size, dtype=torch.bfloat16, device=device)
        return wide.uniform_(-1, 1, generator=generator).to(dtype)
    half = (*size[:-1], size[-1] // 2)
    return torch.randint(0, 256, half, dtype=torch.uint8, device=device, generator=generator)


def draw_scales(size: tuple[int, ...], scaling: BlockScaling, generator: torch.Generator) -> torch.Tensor:
    """Return random bytes of scale factors: several powers of two, for e4m3 with all fractions."""
    import torch

    low, count = (
        (_E8M0_BIAS + _LEAST_POWER, _POWERS) if scaling.scale == "e8m0" else (_LEAST_E4M3, _E4M3_BYTES)
    )
    return torch.randint(
        low, low + count, size, dtype=torch.uint8, device=generator.device, generator=generator
    )


# --- where things lie ---


def lay_out(scales: torch.Tensor, pad: int) -> torch.Tensor:
    """Return bytes of scale factors, ``(batch, rows, blocks)``, in the order of device memory.

    Tiles of 128 rows and 4 blocks have 512 bytes each, those of the same rows follow each other; in a tile
    row r has its 4 bytes at r % 32 * 16 + r // 32 * 4. Incomplete tiles are filled with ``pad``.
    """
    import torch

    batch, rows, blocks = scales.shape
    down, across = -(-rows // SCALE_ROWS), -(-blocks // SCALE_BLOCKS)
    size = (batch, down * SCALE_ROWS, across * SCALE_BLOCKS)
    whole = torch.full(size, pad, dtype=torch.uint8, device=scales.device)
    whole[:, :rows, :blocks].copy_(scales)
    tiles = whole.view(batch, down, _QUARTERS, _QUARTER, across, SCALE_BLOCKS)
    return tiles.permute(0, 1, 4, 3, 2, 5).flatten()


def read_back(memory: torch.Tensor, batch: int, rows: int, blocks: int) -> torch.Tensor:
    """Return what :func:`lay_out` was given, without padding: ``(batch, rows, blocks)``."""
    down, across = -(-rows // SCALE_ROWS), -(-blocks // SCALE_BLOCKS)
    tiles = memory.view(batch, down, across, _QUARTER, _QUARTERS, SCALE_BLOCKS)
    whole = tiles.permute(0, 1, 4, 3, 2, 5).reshape(batch, down * SCALE_ROWS, across * SCALE_BLOCKS)
    return whole[:, :rows, :blocks]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits, k last, two to a byte: the first of each pair in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes that :func:`pack` was given."""
    import torch

    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# --- which numbers they are ---


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers, in fp32, that e2m1 codes stand for: 0, 0.5, 1, 1.5, 2, 3, 4, 6, with a sign bit.

    Source: OCP Microscaling formats 1.0. Worked out in halves: small codes count them, larger ones have a
    leading one.
    """
    import torch

    size = (codes & 7).int()
    halves = torch.where(size < 2, size, (2 + (size & 1)) << ((size >> 1) - 1).clamp_min(0))
    numbers = halves.float() * 0.5
    return torch.where(codes > 7, -numbers, numbers)


def scale_values(scales: torch.Tensor, scale: str) -> torch.Tensor:
    """Return the numbers, in fp32, that bytes of scale factors stand for; the sign of e4m3 is not read.

    Source: PTX ISA, ue8m0 and ue4m3.
    """
    import torch

    if scale == "e4m3":
        return (scales & 0x7F).view(torch.float8_e4m3fn).float()
    # The byte becomes the exponent of a double, whose bias is 1023.
    double = (scales.long() + (1023 - _E8M0_BIAS)) << 52
    return double.view(torch.float64).masked_fill(scales == _E8M0_NAN, math.nan).float()


def decode(stored: torch.Tensor, memory: torch.Tensor, scaling: BlockScaling) -> torch.Tensor:
    """Return the numbers that an operand stands for, in fp32, ``(batch, rows, k)``.

    Exact as long as they are below 2**128: an element times its factor has at most 6 significant bits, and
    none is smaller than the smallest fp32.

    Args:
        stored: Its elements, ``(batch, rows, k)``, or k / 2 bytes where they are packed.
        memory: Its scale factors as they lie in memory, one byte each.
        scaling: Which types these are.
    """
    import torch

    batch, rows, width = stored.shape
    k = width * 8 // scaling.bits
    scales = read_back(memory.view(torch.uint8), batch, rows, k // scaling.block)
    values = torch.empty((batch, rows, k), dtype=torch.float32, device=stored.device)
    step = max(1, _CHUNK // k)
    for i in range(batch):
        for top in range(0, rows, step):
            part = stored[i, top : top + step]
            numbers = part.float() if scaling.bits == 8 else e2m1_values(unpack(part))
            factors = scale_values(scales[i, top : top + step].contiguous(), scaling.scale)
            blocks = numbers.reshape(*factors.shape, scaling.block) * factors.unsqueeze(-1)
            values[i, top : top + step] = blocks.flatten(1)
    return values
