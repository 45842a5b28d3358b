"""Values that are drawn for the inputs of declared families."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cutegen.dtypes import torch_dtype
from cutegen.family import Argument

if TYPE_CHECKING:
    import torch

__all__ = ["draw", "with_gaps"]


def draw(argument: Argument, generator: torch.Generator, *, below: int, gaps: bool) -> torch.Tensor:
    """Return normal values, integers below ``below``, or either truth; with ``gaps``, rows have NaN between
    them."""
    import torch

    dtype, device = torch_dtype(argument.dtype), generator.device
    if dtype.is_floating_point:
        values = torch.randn(argument.shape, dtype=torch.float32, device=device, generator=generator)
        values = values.to(dtype)
    elif dtype == torch.bool:
        values = torch.rand(argument.shape, device=device, generator=generator) < 0.5
    else:
        top = min(below - 1, torch.iinfo(dtype).max)
        values = torch.randint(0, top + 1, argument.shape, dtype=dtype, device=device, generator=generator)
    return values if not gaps or len(argument.shape) < 2 else with_gaps(values, argument)


def with_gaps(values: torch.Tensor, argument: Argument) -> torch.Tensor:
    """Return a copy of ``values``, of two dimensions or more, with NaN (0 for integers) between its rows."""
    import torch

    dtype, device = values.dtype, values.device
    extra = 3 if not argument.aligned else max(1, argument.align_bytes // dtype.itemsize)
    width = argument.shape[-1] + extra
    if not argument.aligned and width * dtype.itemsize % argument.align_bytes == 0:
        width += 1
    fill = math.nan if dtype.is_floating_point else 0
    whole = torch.full((*argument.shape[:-1], width), fill, dtype=dtype, device=device)
    whole[..., : argument.shape[-1]] = values
    return whole[..., : argument.shape[-1]]
