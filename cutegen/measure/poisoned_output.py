"""An output inside a poisoned buffer, which shows unwritten elements and writes outside of the output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cutegen.dtypes import TMA_ALIGN_BYTES, torch_dtype
from cutegen.family import Argument

if TYPE_CHECKING:
    import torch

__all__ = [
    "NEVER",
    "PoisonedOutput",
    "as_integers",
    "first_difference",
    "is_poisoned",
    "new_output",
    "poison",
    "same_bits",
    "unravel",
    "unwritten",
]

#: Bytes looked at in one go, so that temporaries stay near 64 MB.
_CHUNK_BYTES = 2**27
#: Poison of 32-bit integers, which have no NaN: its magnitude is larger than any sum of 8-bit products.
NEVER = -(2**31) + 12345
#: Byte of the poison of other integers, in each of two runs. Any value may be a right one there, but an
#: element that holds the poison of its run in both runs was not written.
_BYTES = (0x5B, 0xA4)
#: Elements between rows that are not aligned; between others lie as few bytes as their alignment allows.
_ODD_GAP = 3


class PoisonedOutput:
    """An output tensor inside a larger buffer that is poisoned before each run.

    What is still poison inside was not written; what is no longer poison outside was written by mistake.

    Args:
        argument: The output. Rows that are not aligned get an odd pitch.
        device: Where it lives.
        gaps: Leave space between rows and between matrices.
        initial: What the output holds before each run, for kernels that work in place; None poisons it.

    Attributes:
        buffer: The whole allocation, one-dimensional.
        tensor: The output, of the argument's shape, contiguous along its last dimension.
    """

    def __init__(
        self,
        argument: Argument,
        device: torch.device,
        *,
        gaps: bool = False,
        initial: torch.Tensor | None = None,
    ) -> None:
        import torch

        dtype = torch_dtype(argument.dtype)
        strides, size, pitch = _strides(argument, dtype.itemsize, gaps)
        lead = -(-max(1024, 2 * pitch) // 64) * 64
        self.buffer = torch.empty(2 * lead + size, dtype=dtype, device=device)
        offset = lead + (_odd_start(argument, dtype.itemsize) if gaps else 0)
        self.tensor = self.buffer.as_strided(argument.shape, strides, storage_offset=offset)
        self._initial = initial
        self._turn = 0

    def poison(self, turn: int = 0) -> None:
        """Fill everything with NaN or, where the type has none, with the poison of run ``turn``."""
        self._turn = turn
        poison(self.buffer, turn)
        if self._initial is not None:
            self.tensor.copy_(self._initial)

    def stray(self) -> int:
        """Return how many elements outside of the output were written."""
        inside = sum(_written(part, self._turn) for part in _parts(self.tensor))
        return sum(_written(part, self._turn) for part in _parts(self.buffer)) - inside

    def same_bits(self, other: PoisonedOutput) -> bool:
        """Return whether both outputs hold the same bits."""
        return same_bits(self.tensor, other.tensor)

    def unwritten(self) -> tuple[int, tuple[int, ...]]:
        """Return how many elements of the output are poison or not finite, and the index of the first."""
        return unwritten(self.tensor, self._turn)

    @property
    def must_be_written(self) -> bool:
        """Whether it is poisoned; if not, a kernel updates it in place."""
        return self._initial is None

    @property
    def is_certain(self) -> bool:
        """Whether poison is no valid result, so that one run shows what was not written."""
        return _has_certain_poison(self.buffer)

    def kept_poison_of_both(self, other: PoisonedOutput) -> bool:
        """Return whether an element still holds the poison of its run here and in ``other``."""
        pairs = zip(_parts(self.tensor), _parts(other.tensor), strict=True)
        return any(bool((_is_poison(a, self._turn) & _is_poison(b, other._turn)).any()) for a, b in pairs)


def _odd_start(argument: Argument, itemsize: int) -> int:
    """Return at which element an output starts that is as little aligned as its kernels must bear."""
    if not argument.aligned:
        return 1
    return argument.align_bytes // itemsize if argument.align_bytes < TMA_ALIGN_BYTES else 0


def _strides(argument: Argument, itemsize: int, gaps: bool) -> tuple[tuple[int, ...], int, int]:
    """Return strides, the elements that they span, and the pitch of a row."""
    shape = argument.shape
    pitch = shape[-1]
    if len(shape) > 1:
        if gaps:
            pitch += max(1, argument.align_bytes // itemsize) if argument.aligned else _ODD_GAP
        if not argument.aligned and pitch * itemsize % argument.align_bytes == 0:
            pitch += 1
    strides, size = [1], pitch
    for at in range(len(shape) - 2, -1, -1):
        strides.insert(0, size)
        size *= shape[at] + (2 if gaps and at == len(shape) - 2 else 0)
    return tuple(strides), size, pitch


def new_output(argument: Argument, device: torch.device) -> torch.Tensor:
    """Return an output without values, at the pitch that a caller would use."""
    import torch

    strides, size, _ = _strides(argument, torch_dtype(argument.dtype).itemsize, gaps=False)
    buffer = torch.empty(size, dtype=torch_dtype(argument.dtype), device=device)
    return buffer.as_strided(argument.shape, strides)


def poison(tensor: torch.Tensor, turn: int = 0) -> None:
    """Fill ``tensor`` with values that no kernel writes, or is unlikely to write."""
    if tensor.is_floating_point():
        tensor.fill_(math.nan)
        return
    integers = _integers(tensor)
    integers.fill_(NEVER if integers.element_size() == 4 else _pattern(integers, turn))


def is_poisoned(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` still holds poison: anywhere or, where a kernel may write it, everywhere."""
    sure = _has_certain_poison(tensor)
    parts = (_is_poison(part, 0) for part in _parts(tensor))
    return any(bool(part.any()) for part in parts) if sure else all(bool(part.all()) for part in parts)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one shape hold the same bits."""
    import torch

    pairs = zip(_parts(x), _parts(y), strict=True)
    return all(torch.equal(as_integers(mine), as_integers(theirs)) for mine, theirs in pairs)


def first_difference(x: torch.Tensor, y: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element in which two tensors of one shape hold other bits."""
    rows = 0
    for mine, theirs in zip(_parts(x), _parts(y), strict=True):
        differ = as_integers(mine) != as_integers(theirs)
        if bool(differ.any()):
            return _first_true(differ, rows)
        rows += mine.shape[0]
    return ()


def unwritten(tensor: torch.Tensor, turn: int = 0) -> tuple[int, tuple[int, ...]]:
    """Return how many elements of ``tensor`` are poison or not finite, and the index of the first."""
    count, rows = 0, 0
    first: tuple[int, ...] = ()
    for part in _parts(tensor):
        bad = ~_finite(part) if part.is_floating_point() else _is_poison(part, turn)
        here = int(bad.sum())
        if here and not count:
            first = _first_true(bad, rows)
        count += here
        rows += part.shape[0]
    return count, first


def _has_certain_poison(tensor: torch.Tensor) -> bool:
    """Return whether poison is no valid result: NaN, no sum, or a byte that is no truth value."""
    import torch

    return tensor.is_floating_point() or tensor.element_size() == 4 or tensor.dtype == torch.bool


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return truth values as the bytes that they are, and integers as they are."""
    import torch

    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _pattern(tensor: torch.Tensor, turn: int) -> int:
    size = tensor.element_size()
    signed = tensor.dtype.is_signed
    return int.from_bytes(bytes([_BYTES[turn]]) * size, "little", signed=signed)


def _is_poison(part: torch.Tensor, turn: int) -> torch.Tensor:
    if part.is_floating_point():
        return part.float().isnan() if part.element_size() == 1 else part.isnan()
    part = _integers(part)
    return part == (NEVER if part.element_size() == 4 else _pattern(part, turn))


def _finite(part: torch.Tensor) -> torch.Tensor:
    return part.float().isfinite() if part.element_size() == 1 else part.isfinite()


def _written(part: torch.Tensor, turn: int) -> int:
    """Return how many elements are not poison."""
    return part.numel() - int(_is_poison(part, turn).sum())


def as_integers(part: torch.Tensor) -> torch.Tensor:
    """Return a view of ``part`` as integers of the same size."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return part.view(kinds[part.element_size()])


def _first_true(flags: torch.Tensor, rows_before: int) -> tuple[int, ...]:
    import torch

    flat = int(flags.flatten().to(torch.uint8).argmax())
    first, *rest = unravel(flat, flags.shape)
    return (first + rows_before, *rest)


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of element ``flat`` of a tensor of that shape, counted row by row."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return tuple(index)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor`` in pieces along its first dimension."""
    import torch

    size = tensor.numel() * tensor.element_size()
    rows = max(1, _CHUNK_BYTES * tensor.shape[0] // max(1, size))
    yield from torch.split(tensor, rows)
