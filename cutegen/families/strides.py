"""How tensors lie in memory: overlap, alignment, and strides that a kernel's signature accepts.

Nothing here imports torch; tensors are asked for their shape, strides and address only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutegen.dtypes import TMA_ALIGN_BYTES
from cutegen.errors import OperandError

if TYPE_CHECKING:
    import torch

__all__ = [
    "View",
    "contiguous_strides",
    "is_aligned",
    "may_repeat",
    "normal_view",
    "overlap",
    "refuse_negated",
    "span_bytes",
]


@dataclass(frozen=True)
class View:
    """Shape and strides (in elements) under which a tensor goes to the kernel instead of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor."""
    strides, step = [], 1
    for extent in shape[::-1]:
        strides.append(step)
        step *= extent or 1
    return tuple(strides[::-1])


def may_repeat(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two places of a tensor may be one address; exact for slices and permutations of dense ones."""
    reach = 0  # elements that the axes so far span, less one
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent > 1:
            if step <= reach:
                return True
            reach += (extent - 1) * step
    return False


def is_aligned(
    shape: Sequence[int], stride: Sequence[int], inner: int, size: int, align_bytes: int = TMA_ALIGN_BYTES
) -> bool:
    """Whether every step but the contiguous one is a multiple of ``align_bytes``; axes of size 1 take no
    step."""
    multiples = [
        extent == 1 or step * size % align_bytes == 0 for extent, step in zip(shape, stride, strict=True)
    ]
    multiples[inner] = True
    return all(multiples)


def normal_view(shape: tuple[int, ...], stride: tuple[int, ...], inner: int, multiple: int) -> View | None:
    """Return a view without a batch of one and without odd strides along axes of size 1, None if as it is.

    torch lets an axis of size 1 have any stride, which a descriptor of the tensor would hold all the same.

    Args:
        shape: Sizes.
        stride: Steps in elements.
        inner: The contiguous axis, counted from the end: -1 or -2.
        multiple: Elements that 16 bytes hold.
    """
    inner += len(shape)
    good = list(stride)
    pitch = -(-shape[inner] // multiple) * multiple
    for at, extent in enumerate(shape):
        if at == inner:
            good[at] = 1
        elif extent == 1 and (stride[at] % multiple or stride[at] < shape[inner]):
            good[at] = pitch
    first = 1 if len(shape) == 3 and shape[0] == 1 else 0
    if first == 0 and tuple(good) == stride:
        return None
    return View(shape[first:], tuple(good[first:]))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to behind its last, 0 if it is empty."""
    if tensor.numel() == 0:
        return 0
    last = 0  # a generator takes as long again
    for extent, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (extent - 1) * step
    return (last + 1) * tensor.element_size()


def _row_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a place of the first axis spans."""
    axes = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    return (sum((extent - 1) * step for extent, step in axes) + 1) * tensor.element_size()


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors may share an element.

    Exact for rows with the same pitch, such as two column ranges of one buffer; otherwise true as soon as
    their address ranges meet.
    """
    start_x, start_y = x.data_ptr(), y.data_ptr()
    if not (start_x < start_y + span_bytes(y) and start_y < start_x + span_bytes(x)):
        return False
    rows = [t.stride(0) * t.element_size() for t in (x, y) if t.dim() > 1]
    if len(rows) != 2 or rows[0] != rows[1] or rows[0] == 0:
        return True
    pitch = rows[0]
    width_x, width_y = map(_row_bytes, (x, y))
    ahead = (start_y - start_x) % pitch
    return ahead < width_x or ahead + width_y > pitch


def refuse_negated(name: str, tensor: torch.Tensor) -> None:
    """Do nothing if the memory of a tensor holds its numbers, not their negatives as for ``x.conj().imag``.

    Raises:
        OperandError: It holds those, and kernels read memory.
    """
    is_neg = getattr(tensor, "is_neg", None)
    if is_neg is not None and is_neg():
        raise OperandError(
            f"{name} has the negative bit, as the imaginary part of a conjugate: its memory holds numbers of "
            f"the other sign; pass {name}.resolve_neg().contiguous()"
        )
