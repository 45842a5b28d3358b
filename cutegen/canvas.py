"""An output inside a poisoned buffer, which shows what a kernel left out and what it should not touch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cutegen.problem import DTYPE_BYTES, TMA_ALIGN_BYTES, Problem

if TYPE_CHECKING:
    import torch

__all__ = ["NEVER", "Canvas"]

#: Elements looked at in one go, so that temporaries stay near 64 MB.
_CHUNK = 2**26
#: Poison for integers, which have no NaN: larger than any sum of 8-bit products.
NEVER = -(2**31) + 12345


class Canvas:
    """An output tensor inside a larger buffer that is filled with NaN before each run.

    What stays NaN inside was not written; what is no longer NaN outside was written by mistake. ``d`` has the
    pitch that the problem asks for; ``padded`` adds space between rows and between batches.

    Attributes:
        buffer: The whole allocation, one-dimensional.
        d: The output, ``(m, n)`` or ``(batch, m, n)``.
    """

    def __init__(
        self, problem: Problem, dtype: torch.dtype, device: torch.device, *, padded: bool = False
    ) -> None:
        import torch

        aligned = problem.n * DTYPE_BYTES[problem.out_dtype] % TMA_ALIGN_BYTES == 0
        odd = problem.unaligned_out
        pitch = problem.n + (1 if odd and aligned else 0) + ((3 if odd else 8) if padded else 0)
        stride = (problem.m + (2 if padded else 0)) * pitch
        lead = -(-max(1024, 2 * pitch) // 64) * 64
        self.buffer = torch.empty(2 * lead + problem.batch * stride, dtype=dtype, device=device)
        offset = lead + (1 if odd and padded else 0)
        whole = self.buffer.as_strided(
            (problem.batch, problem.m, problem.n), (stride, pitch, 1), storage_offset=offset
        )
        self.d = whole if problem.batch > 1 else whole[0]

    def poison(self) -> None:
        """Fill everything with NaN, or with a number that no sum reaches."""
        self.buffer.fill_(math.nan if self.buffer.is_floating_point() else NEVER)

    def stray(self) -> int:
        """Return how many elements outside of the output were written."""
        import torch

        return _written(torch.split(self.buffer, _CHUNK)) - _written(_row_blocks(self.d))

    def same_bits(self, other: Canvas) -> bool:
        """Return whether both outputs hold the same bits."""
        import torch

        integer = {2: torch.int16, 4: torch.int32}[self.d.element_size()]
        pairs = zip(_row_blocks(self.d), _row_blocks(other.d), strict=True)
        return all(torch.equal(mine.view(integer), theirs.view(integer)) for mine, theirs in pairs)

    def unwritten(self) -> tuple[int, tuple[int, ...]]:
        """Return how many elements of the output are not finite, and the index of the first."""
        count, row = 0, 0
        first: tuple[int, ...] = ()
        for part in _row_blocks(self.d):
            bad = ~part.isfinite() if part.is_floating_point() else part == NEVER
            here = int(bad.sum())
            if here and not count:
                first = _first_true(bad, row)
            count += here
            row += part.shape[-2]
        return count, first


def _written(parts: Sequence[torch.Tensor]) -> int:
    """Return how many elements are not poison."""
    return sum(
        part.numel() - int((part.isnan() if part.is_floating_point() else part == NEVER).sum())
        for part in parts
    )


def _first_true(flags: torch.Tensor, rows_before: int) -> tuple[int, ...]:
    import torch

    flat = int(flags.flatten().to(torch.uint8).argmax())
    height, width = flags.shape[-2:]
    where = (flat // width % height + rows_before, flat % width)
    return where if flags.dim() == 2 else (flat // (height * width), *where)


def _row_blocks(d: torch.Tensor) -> Sequence[torch.Tensor]:
    import torch

    rows = max(1, _CHUNK * d.shape[-2] // max(1, d.numel()))
    return torch.split(d, rows, dim=-2)
